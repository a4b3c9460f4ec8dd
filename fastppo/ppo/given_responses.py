"""Responses generated and scored elsewhere, for `PPOTrainer.step`.

Texts become tokens, and per-token values become packed tensors of the tokens in the mask. Anything
that does not fit raises before the update.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.data.chat import encode_prompt, is_chat, token_ids
from fastppo.functional.scalars import describe
from fastppo.ppo.policies import GivenPolicy
from fastppo.rewards.placing import generated_token_rewards
from fastppo.rewards.scorer import Scores
from fastppo.rollout import FINISHED, TRUNCATED, Branch, Rollout

TokenRows = Sequence[Sequence[float] | Tensor]
"""One number per token of each response."""


class GivenResponses(NamedTuple):
    """Responses generated and scored elsewhere."""

    prompt_ids: list[list[int]]
    rollout: Rollout
    """Without sampler logprobs."""
    scores: Scores
    policy: GivenPolicy
    """Old logprobs and values, if given."""


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
    episodes: Sequence[int] | None = None,
) -> GivenResponses:
    """Tokenize and check given responses; for the arguments see `PPOTrainer.step`.

    Args:
        vocabulary, context: sizes in tokens.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    if not len(prompts) or len(prompts) != len(responses):
        raise ValueError(
            f"expected as many responses as prompts, at least one, got {len(prompts)} prompts and "
            f"{len(responses)} responses"
        )
    prompt_ids = [
        encode_prompt(prompt, tokenizer, f"prompt {row}")
        if isinstance(prompt, str) or is_chat(prompt)
        else _token_ids(f"prompt {row}", prompt)
        for row, prompt in enumerate(prompts)
    ]
    response_ids = []
    for row, response in enumerate(responses):
        if isinstance(response, str):
            response_ids.append(token_ids(tokenizer, response))
        else:
            response_ids.append(_token_ids(f"response {row}", response))
    if finish_reasons is None:
        has_ended = [not ids or ids[-1] in stop_token_ids for ids in response_ids]
        finish_reasons = [FINISHED if ended else TRUNCATED for ended in has_ended]
    response_mask = None
    if masks is None:
        check_ends(response_ids, stop_token_ids)
    else:
        response_mask = _masks(masks, response_ids)
    rollout = Rollout(response_ids, list(finish_reasons), response_mask=response_mask)
    check_responses(prompt_ids, rollout, vocabulary=vocabulary, context=context)
    if episodes is not None and token_rewards is not None:
        raise ValueError("token_rewards are of single rows: pass scores alone with episodes")
    total = torch.as_tensor(scores, dtype=torch.float32, device="cpu")
    ends = _last_rows(episodes, len(prompts))
    if total.shape != (len(ends),):
        raise ValueError(f"scores must be [{len(ends)}], got {list(total.shape)}")
    if not total.isfinite().all():
        raise ValueError(f"scores must be finite, got {total.tolist()}")
    within = None
    if token_rewards is not None:
        rewards = _rows("token_rewards", token_rewards, response_ids)
        _finite_numbers("token_rewards", rewards)
        if response_mask is not None:
            rewards = [
                generated_token_rewards(*pair) for pair in zip(rewards, response_mask, strict=True)
            ]
        within = _finite_numbers("token_rewards", rewards)
    policy = GivenPolicy(
        _policy_values("old_logprobs", old_logprobs, rollout),
        _policy_values("values", values, rollout),
    )
    if len(ends) < len(prompts):
        prompt_ids, rollout = _joined_rows(prompt_ids, rollout, ends)
    return GivenResponses(
        prompt_ids, rollout, Scores(total, within, rollout.generated_lengths), policy
    )


def _last_rows(episodes: Sequence[int] | None, count: int) -> list[int]:
    """Return the last row of each episode.

    Args:
        episodes: the episode of each row; None if every row is one.
        count: number of rows.
    """
    if episodes is None:
        return list(range(count))
    numbers = _list(episodes)
    if len(numbers) != count:
        raise ValueError(f"episodes must be one per response, got {len(numbers)} for {count}")
    ends = [row for row in range(count) if row + 1 == count or numbers[row] != numbers[row + 1]]
    if len(ends) != len(set(numbers)):
        raise ValueError(f"the rows of an episode must be adjacent, got episodes={numbers}")
    return ends


def _joined_rows(
    prompt_ids: list[list[int]], rollout: Rollout, ends: Sequence[int]
) -> tuple[list[list[int]], Rollout]:
    """Return the last row of each episode, with the rows before it as its branches."""
    joined = rollout.select(ends)
    joined.branches = [
        [Branch(prompt_ids[row], rollout.select([row])) for row in range(start, end)]
        for start, end in zip((0, *(end + 1 for end in ends)), ends, strict=False)
    ]
    return [prompt_ids[end] for end in ends], joined


def _list(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _token_ids(name: str, value: Any) -> list[int]:
    ids = _list(value)
    if not all(isinstance(token, int) for token in ids):
        raise ValueError(f"{name} must be a text or token ids, got {describe(value)}")
    return ids


def _rows(name: str, values: Any, responses: Sequence[Sequence[int]]) -> list[list[Any]]:
    """Return one list per response, with one entry per token."""
    rows = [_list(row) for row in values]
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


def _masks(masks: Any, responses: Sequence[Sequence[int]]) -> list[list[bool]]:
    rows = _rows("masks", masks, responses)
    for row, mask in enumerate(rows):
        if not all(isinstance(value, bool) for value in mask):
            raise ValueError(f"masks of response {row} must be bool, got {describe(mask)}")
        if not any(mask):
            raise ValueError(f"masks of response {row} has no True: nothing to learn from")
    return rows


def _finite_numbers(name: str, rows: list[list[Any]]) -> Tensor:
    """Return the rows as one packed tensor, [N] fp32 on the CPU."""
    for row, numbers in enumerate(rows):
        if not torch.tensor(numbers, dtype=torch.float32).isfinite().all():
            raise ValueError(
                f"{name} of response {row} must be finite numbers, got {describe(numbers)}"
            )
    return torch.tensor([x for numbers in rows for x in numbers], dtype=torch.float32)


def _policy_values(name: str, values: TokenRows | None, rollout: Rollout) -> Tensor | None:
    """Return the values of the tokens in the mask, [N] fp32 on the CPU."""
    if values is None:
        return None
    rows = _rows(name, values, rollout.tokens)
    if rollout.response_mask is not None:
        pairs = zip(rows, rollout.response_mask, strict=True)
        rows = [list(itertools.compress(row, response_mask)) for row, response_mask in pairs]
    return _finite_numbers(name, rows)


def check_ends(responses: Sequence[Sequence[int]], stop_token_ids: Sequence[int]) -> None:
    """Raise ValueError if tokens follow a stop token.

    They are usually padding: `generate` of transformers pads finished responses.
    """
    for row, response in enumerate(responses):
        for position, token in enumerate(response[:-1]):
            if token in stop_token_ids:
                raise ValueError(
                    f"responses: response {row} continues after its stop token, token "
                    f"{position + 1} of {len(response)}: cut it there if the rest is padding, else "
                    "pass masks, True for each token that the policy generated"
                )


def check_responses(
    prompts: Sequence[Sequence[int]],
    rollout: Rollout,
    *,
    vocabulary: int,
    context: int | None,
) -> None:
    """Raise ValueError if a response does not fit its prompt, the context or the vocabulary."""
    for row, (prompt, response) in enumerate(zip(prompts, rollout.tokens, strict=True)):
        if not response:
            raise ValueError(f"response {row} is empty")
        if context is not None and len(prompt) + len(response) > context:
            raise ValueError(
                f"prompt and response {row} have {len(prompt) + len(response)} tokens; the "
                f"model's context has {context}"
            )
        if prompt and not 0 <= min(*prompt, *response) <= max(*prompt, *response) < vocabulary:
            raise ValueError(f"prompt or response {row} has tokens outside [0, {vocabulary})")
    reasons = rollout.finish_reasons
    if len(reasons) != len(prompts) or not {*reasons} <= {FINISHED, TRUNCATED}:
        raise ValueError(
            f"finish_reasons must be {len(prompts)} of {FINISHED} or {TRUNCATED}, "
            f"got {describe(reasons)}"
        )
