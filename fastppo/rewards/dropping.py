"""A batch without the samples that no reward could be had of."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor

from fastppo.data.prompts import Prompts
from fastppo.rewards.reward import RewardError
from fastppo.rewards.scorer import Scores
from fastppo.rollout import Rollout


def without_dropped(
    prompts: Prompts, rollout: Rollout, scores: Scores
) -> tuple[Prompts, Rollout, Scores, dict[str, float]]:
    """Prompts, responses and scores of the samples that have one, and what share has none.

    Raises:
        RewardError: none has.
    """
    if scores.kept is None:
        return prompts, rollout, scores, {}
    kept, count = scores.kept, len(prompts)
    share = {"dropped_samples": (count - len(kept)) / count}
    if len(kept) == count:
        return prompts, rollout, scores, share
    if not kept:
        raise RewardError(f"all {count} samples of a batch were dropped, so there is none to train")
    return prompts.select(kept), _select(rollout, kept), scores.select(kept), share


def _select(rollout: Rollout, rows: list[int]) -> Rollout:
    chosen: dict[str, Any] = {}
    for each in fields(rollout):
        value = getattr(rollout, each.name)
        if isinstance(value, Tensor):
            chosen[each.name] = value[rows]
        else:
            chosen[each.name] = None if value is None else [value[row] for row in rows]
    return Rollout(**chosen)
