"""Rewards within a response: which token each is paid at."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from typing import Any

from fastppo.rewards.reward import Partial


def token_rewards(
    partial: Partial | None,
    completion: str,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    tokenizer: Any,
) -> list[float]:
    """One reward per response token, from rewards by token or by step.

    The value of an (end, value) pair goes to the first token with which the decoded response
    agrees with the first `end` characters of `completion`, so a character that takes several tokens
    counts from its last one. An end beyond the text goes to the last token, which is the EOS of a
    response that ended by itself. Several values on one token add up. None is zeros: a reward that
    was one number is not placed here.

    The response is decoded after its prompt, as `decode_completions` does. Each step decodes
    O(log T) prefixes, because the text only grows with the tokens.

    Raises:
        ValueError: not one number per response token, an end < 1, or a completion that is not the
            response's text.
    """
    count = len(response_ids)
    if partial is None or len(partial) == 0:
        return [0.0] * count
    if not isinstance(partial[0], tuple):
        if len(partial) != count:
            raise ValueError(
                f"expected one reward per token, got {len(partial)} for {count} response tokens"
            )
        return [float(value) for value in partial]
    if count == 0:
        raise ValueError(f"got {len(partial)} step rewards for a response of 0 tokens")

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    before = list(prompt_ids)
    response = list(response_ids)
    head = decode(before)
    if not decode(before + response).startswith(head):  # the completion was decoded alone
        before = []
        head = ""

    @functools.cache
    def reached(token: int) -> int:
        """Characters of the completion that are written once this token is there. The half of a
        character decodes to U+FFFD, which is not the completion's, so it does not count."""
        text = decode(before + response[: token + 1])[len(head) :]
        pairs = zip(text, completion, strict=False)
        return next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(completion))
        )

    if reached(count - 1) < len(completion):
        raise ValueError(
            f"completion must be the text of response_ids after the prompt, got {completion!r}, "
            f"which leaves it at character {reached(count - 1)}"
        )
    rewards = [0.0] * count
    for end, value in partial:
        if end < 1:
            raise ValueError(f"a step must end at a character offset >= 1, got {end}")
        token = bisect.bisect_left(range(count), end, key=reached)
        rewards[min(token, count - 1)] += value
    return rewards


def paid_where_written(rewards: Sequence[float], written: Sequence[bool]) -> list[float]:
    """Rewards of the tokens that the policy wrote. That of another token is paid at the last one
    before it that the policy wrote, or at the first one after it if there is none before."""
    paid = [0.0] * sum(written)
    written_so_far = 0
    for reward, is_written in zip(rewards, written, strict=True):
        written_so_far += is_written
        paid[max(written_so_far - 1, 0)] += reward
    return paid
