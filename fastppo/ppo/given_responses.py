"""Responses that somebody else generated and scored, as `PPOTrainer.step` takes them.

Texts become tokens, and what is given by token becomes packed tensors of the tokens that the policy
wrote; what does not fit is refused before anything is learned.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.data.chat import encode_prompt, is_chat, token_ids
from fastppo.functional.scalars import describe
from fastppo.ppo.old_policy import GivenPolicy
from fastppo.rewards.placing import paid_where_written
from fastppo.rewards.scorer import Scores
from fastppo.rollout import FINISHED, TRUNCATED, Rollout

LARGEST = torch.finfo(torch.float32).max

TokenRows = Sequence[Sequence[float] | Tensor]
"""A number for each token of each response."""


class GivenResponses(NamedTuple):
    """Responses that somebody else generated and scored."""

    prompt_ids: list[list[int]]
    rollout: Rollout
    """Without the sampler's logprobs, since it is not known how they were drawn."""
    scores: Scores
    policy: GivenPolicy
    """What is known of the policy that drew them."""


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
        ValueError: see `check_counts`, `check_ends` and `check_responses`; the scores are not one
            per prompt, or not finite; a value per token does not fit the responses, or is not
            finite.
    """
    prompts = _items("prompts", prompts)
    responses = _items("responses", responses)
    check_counts(len(prompts), len(responses))
    prompt_ids = [
        encode_prompt(prompt, tokenizer, f"prompt {row}")
        if isinstance(prompt, str) or is_chat(prompt)
        else _ids(f"prompt {row}", prompt)
        for row, prompt in enumerate(prompts)
    ]
    response_ids = []
    for row, response in enumerate(responses):
        if isinstance(response, str):
            response_ids.append(token_ids(tokenizer, response))
        else:
            response_ids.append(_ids(f"response {row}", response))
    if finish_reasons is None:
        has_ended = [not ids or ids[-1] in stop_token_ids for ids in response_ids]
        finish_reasons = [FINISHED if ended else TRUNCATED for ended in has_ended]
    finish_reasons = _items("finish_reasons", finish_reasons)
    total = check_scores(scores, len(prompt_ids))
    written = None
    if masks is None:
        check_ends(response_ids, stop_token_ids)
    else:
        written = check_masks(masks, response_ids)
    rollout = Rollout(response_ids, finish_reasons, written=written)
    within = None if token_rewards is None else packed_rewards(token_rewards, rollout)
    policy = GivenPolicy(
        None if old_logprobs is None else packed_values("old_logprobs", old_logprobs, rollout),
        None if values is None else packed_values("values", values, rollout),
    )
    check_responses(prompt_ids, rollout, vocabulary=vocabulary, context=context)
    paid = Scores(total, within, rollout.written_lengths)
    return GivenResponses(prompt_ids, rollout, paid, policy)


def _items(name: str, value: Any) -> list[Any]:
    """The entries of a sequence, an array or a tensor; raises ValueError for anything else."""
    if hasattr(value, "tolist"):
        try:
            value = value.tolist()
        except (RuntimeError, TypeError) as error:  # of a tensor on `meta`, or a sparse one
            raise ValueError(f"{name} cannot be read: {error}") from error
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a list, got {describe(value)}")
    return list(value)


def _ids(name: str, value: Any) -> list[int]:
    """Token ids; raises ValueError for anything but whole numbers."""
    ids = _items(name, value)
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
        raise ValueError(f"{name} must be a text or token ids, got {describe(value)}")
    return [int(token) for token in ids]


def check_masks(
    masks: Sequence[Sequence[bool] | Tensor], responses: Sequence[Sequence[int]]
) -> list[list[bool]]:
    """Each response's as a list; raises ValueError where one does not fit its response, is not
    bool, or has no True."""
    rows = _rows("masks", masks, responses)
    for row, mask in enumerate(rows):
        if not all(isinstance(value, bool) for value in mask):
            raise ValueError(f"masks of response {row} must be bool, got {describe(mask)}")
        if not any(mask):
            raise ValueError(f"masks of response {row} has no True: the policy wrote none of it")
    return rows


def check_ends(responses: Sequence[Sequence[int]], stop_token_ids: Sequence[int]) -> None:
    """Raises ValueError where tokens follow a response's first stop token: without a mask nothing
    says that the policy wrote them, and `generate` of transformers pads what ended early."""
    for row, response in enumerate(responses):
        for position, token in enumerate(response[:-1]):
            if token in stop_token_ids:
                raise ValueError(
                    f"responses: response {row} continues after its stop token, token "
                    f"{position + 1} of {len(response)}: cut it there if the rest is padding, else "
                    "pass masks, True for each token that the policy wrote"
                )


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
    for row, numbers in enumerate(rows):
        if any(isinstance(number, bool) or not _is_finite(number) for number in numbers):
            raise ValueError(
                f"{name} of response {row} must be finite numbers, got {describe(numbers)}"
            )
    return torch.tensor([x for numbers in rows for x in numbers], dtype=torch.float32)


def _is_finite(value: Any) -> bool:
    """Whether it is a number that fp32 holds."""
    return isinstance(value, (int, float)) and abs(value) <= LARGEST


def _rows(name: str, values: Any, responses: Sequence[Sequence[int]]) -> list[list[Any]]:
    """A list for each response, of as many as it has tokens."""
    rows = [
        _items(f"{name} of response {number}", row)
        for number, row in enumerate(_items(name, values))
    ]
    if len(rows) != len(responses):
        raise ValueError(
            f"{name} must be one list per response, got {len(rows)} for {len(responses)}"
        )
    for number, (row, response) in enumerate(zip(rows, responses, strict=True)):
        if len(row) != len(response):
            raise ValueError(
                f"{name} of response {number} must be one per token: expected {len(response)}, "
                f"got {len(row)}"
            )
    return rows


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
    known = [FINISHED, TRUNCATED]  # not a set: a reason may be a list
    if len(finish_reasons) != len(prompts) or not all(x in known for x in finish_reasons):
        raise ValueError(
            f"finish_reasons must be {len(prompts)} of {FINISHED} or {TRUNCATED}, "
            f"got {describe(finish_reasons)}"
        )


def check_scores(scores: Sequence[float] | Tensor, count: int) -> Tensor:
    """[count] fp32 on the CPU; raises ValueError where there are not as many, or one is not
    finite."""
    listed = _items("scores", scores)
    try:
        total = torch.as_tensor(listed, dtype=torch.float32, device="cpu")
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"scores must be numbers, got {describe(listed)}") from error
    if total.shape != (count,):
        raise ValueError(f"scores must be [{count}], got {list(total.shape)}")
    if not total.isfinite().all():
        raise ValueError(f"scores must be finite, got {total.tolist()}")
    return total
