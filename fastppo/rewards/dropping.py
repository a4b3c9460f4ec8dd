"""A batch without the samples that have no score."""

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
    """Prompts, responses and scores of the samples that have a score, and the share without one as
    a metric.

    Raises:
        RewardError: none has a score.
    """
    if scores.kept is None:
        return prompts, rollout, scores, {}
    kept = scores.kept
    count = len(prompts)
    metrics = {"dropped_samples": (count - len(kept)) / count}
    if len(kept) == count:
        return prompts, rollout, scores, metrics
    if not kept:
        raise RewardError(f"all {count} samples of a batch were dropped, so there is none to train")
    return prompts.select(kept), _select(rollout, kept), scores.select(kept), metrics


def _select(rollout: Rollout, rows: list[int]) -> Rollout:
    selected: dict[str, Any] = {}
    for field in fields(rollout):
        value = getattr(rollout, field.name)
        if isinstance(value, Tensor):
            selected[field.name] = value[rows]
        else:
            selected[field.name] = None if value is None else [value[row] for row in rows]
    return Rollout(**selected)
