"""Responses that somebody else generated and scored, as `PPOTrainer.step` takes them.

Texts become tokens, and what is given by token becomes packed tensors of the tokens that the policy
wrote; what does not fit is refused before anything is learned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.data.chat import encode_prompt, is_chat, token_ids
from fastppo.functional.scalars import shown
from fastppo.ppo.old_policy import GivenPolicy
from fastppo.rewards.placing import paid_where_written
from fastppo.rewards.scorer import Scores
from fastppo.rollout import FINISHED, TRUNCATED, Rollout

TokenRows = Sequence[Sequence[float] | Tensor]
"""A number for each token of each response."""


class GivenResponses(NamedTuple):
    """Responses that somebody else generated and scored."""

    prompt_ids: list[list[int]]
    rollout: Rollout
    """Without the sampler's logprobs: nobody says how they were drawn."""
    scores: Scores
    policy: GivenPolicy
    """That drew them, as far as it is known."""


def given_responses(
    prompts: Sequence[str | Sequence[Any]],
    responses: Sequence[str | Sequence[int]],
    scores: Sequence[float] | Tensor,
    *,
    finish_reasons: Sequence[str] | None,
    tokenizer: Any,
    stop_token_ids: Sequence[int],
    vocabulary: int,
    context: int | None,
    masks: Sequence[Sequence[bool] | Tensor] | None = None,
    token_rewards: TokenRows | None = None,
    old_logprobs: TokenRows | None = None,
    values: TokenRows | None = None,
) -> GivenResponses:
    """Texts, chat messages or ids as tokens; without finish reasons, whether a stop token is last.

    Args:
        vocabulary, context: their sizes, tokens.

    Raises:
        ValueError: see `check_counts` and `check_responses`; the scores are not one per prompt, or
            not finite; a value per token does not fit the responses, or is not finite.
    """
    check_counts(len(prompts), len(responses))
    prompt_ids = [
        encode_prompt(prompt, tokenizer, f"prompt {row}")
        if isinstance(prompt, str) or is_chat(prompt)
        else list(prompt)
        for row, prompt in enumerate(prompts)
    ]
    response_ids = [token_ids(tokenizer, response) for response in responses]
    if finish_reasons is None:
        has_ended = [not ids or ids[-1] in stop_token_ids for ids in response_ids]
        finish_reasons = [FINISHED if ended else TRUNCATED for ended in has_ended]
    total = check_scores(scores, len(prompt_ids))
    written = None if masks is None else check_masks(masks, response_ids)
    rollout = Rollout(response_ids, list(finish_reasons), written=written)
    within = None if token_rewards is None else packed_rewards(token_rewards, rollout)
    policy = GivenPolicy(
        None if old_logprobs is None else packed_values("old_logprobs", old_logprobs, rollout),
        None if values is None else packed_values("values", values, rollout),
    )
    check_responses(prompt_ids, rollout, vocabulary=vocabulary, context=context)
    paid = Scores(total, within, rollout.written_lengths)
    return GivenResponses(prompt_ids, rollout, paid, policy)


def check_masks(
    masks: Sequence[Sequence[bool] | Tensor], responses: Sequence[Sequence[int]]
) -> list[list[bool]]:
    """Each response's as a list; raises ValueError where one does not fit its response, is not
    bool, or has no True."""
    rows = _rows("masks", masks, responses)
    for row, mask in enumerate(rows):
        if not all(isinstance(value, bool) for value in mask):
            raise ValueError(f"masks of response {row} must be bool, got {shown(mask)}")
        if not any(mask):
            raise ValueError(f"masks of response {row} has no True: the policy wrote none of it")
    return rows


def packed_values(name: str, values: TokenRows, rollout: Rollout) -> Tensor:
    """[N] fp32 on the CPU, of the tokens that the policy wrote; raises ValueError where a row does
    not fit its response, or has what is not a finite number for one of them."""
    rows = _rows(name, values, rollout.tokens)
    if rollout.written is not None:
        pairs = zip(rows, rollout.written, strict=True)
        rows = [list(itertools.compress(row, written)) for row, written in pairs]
    return _finite_numbers(name, rows)


def packed_rewards(values: TokenRows, rollout: Rollout) -> Tensor:
    """[N] fp32 on the CPU, each paid where the policy wrote; raises ValueError as `packed_values`
    does."""
    rows = _rows("token_rewards", values, rollout.tokens)
    _finite_numbers("token_rewards", rows)
    if rollout.written is not None:
        pairs = zip(rows, rollout.written, strict=True)
        rows = [paid_where_written(row, written) for row, written in pairs]
    return _finite_numbers("token_rewards", rows)


def _finite_numbers(name: str, rows: list[list[Any]]) -> Tensor:
    packed = []
    for row, numbers in enumerate(rows):
        kinds = {type(number) for number in numbers}
        values = torch.tensor(numbers if kinds <= {int, float} else [math.nan]).float()
        if not values.isfinite().all():
            raise ValueError(
                f"{name} of response {row} must be finite numbers, got {shown(numbers)}"
            )
        packed.append(values)
    return torch.cat(packed)


def _rows(name: str, values: Any, responses: Sequence[Sequence[int]]) -> list[list[Any]]:
    """A list for each response, of as many as it has tokens."""
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in values]
    if len(rows) != len(responses):
        raise ValueError(
            f"{name} must be one list per response, got {len(rows)} for {len(responses)}"
        )
    for number, (row, response) in enumerate(zip(rows, responses, strict=True)):
        if not isinstance(row, (list, tuple)) or len(row) != len(response):
            count = len(row) if isinstance(row, (list, tuple)) else shown(row)
            raise ValueError(
                f"{name} of response {number} must be one per token: expected {len(response)}, "
                f"got {count}"
            )
    return [list(row) for row in rows]


def check_counts(prompts: int, responses: int) -> None:
    """Raises ValueError where there are not as many responses as prompts, or none."""
    if not prompts or prompts != responses:
        raise ValueError(
            f"expected as many responses as prompts, at least one, got {prompts} prompts and "
            f"{responses} responses"
        )


def check_responses(
    prompts: Sequence[Sequence[int]],
    rollout: Rollout,
    *,
    vocabulary: int,
    context: int | None,
) -> None:
    """Raises ValueError where responses do not fit their prompts, the context or the vocabulary."""
    responses = rollout.tokens
    finish_reasons = rollout.finish_reasons
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not response:
            raise ValueError(f"response {row} is empty")
        if context is not None and len(prompt) + len(response) > context:
            raise ValueError(
                f"prompt and response {row} have {len(prompt) + len(response)} tokens; the "
                f"model's context has {context}"
            )
        if prompt and not 0 <= min(*prompt, *response) <= max(*prompt, *response) < vocabulary:
            raise ValueError(f"prompt or response {row} has tokens outside [0, {vocabulary})")
    if len(finish_reasons) != len(prompts) or {*finish_reasons} - {FINISHED, TRUNCATED}:
        raise ValueError(
            f"finish_reasons must be {len(prompts)} of {FINISHED} or {TRUNCATED}, "
            f"got {finish_reasons}"
        )


def check_scores(scores: Sequence[float] | Tensor, count: int) -> Tensor:
    """[count] fp32 on the CPU; raises ValueError where there are not as many, or one is not
    finite."""
    total = torch.as_tensor(scores, dtype=torch.float32, device="cpu")
    if total.shape != (count,):
        raise ValueError(f"scores must be [{count}], got {list(total.shape)}")
    if not total.isfinite().all():
        raise ValueError(f"scores must be finite, got {total.tolist()}")
    return total
