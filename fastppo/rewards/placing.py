"""Assign rewards within a response to tokens."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from typing import Any

from fastppo.rewards.reward import StepRewards


def token_rewards(
    steps: StepRewards | None,
    completion: str,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    tokenizer: Any,
) -> list[float]:
    """Return one reward per response token, from rewards by token or by step.

    The value of an (end, value) pair goes to the first token at which the decoded response agrees
    with the first `end` characters of `completion`. A character of several tokens thus counts from
    its last token. An end beyond the text goes to the last token, the EOS of a finished response.
    Values on the same token add up. None gives zeros.

    The response is decoded after its prompt, as in `decode_completions`. Each step decodes
    O(log T) prefixes.

    Raises:
        ValueError: the number of rewards is not the number of tokens, an end is < 1, or the
            completion is not the text of the response.
    """
    count = len(response_ids)
    if steps is None or len(steps) == 0:
        return [0.0] * count
    if not isinstance(steps[0], tuple):
        if len(steps) != count:
            raise ValueError(
                f"expected one reward per token, got {len(steps)} for {count} response tokens"
            )
        return [float(value) for value in steps]
    if count == 0:
        raise ValueError(f"got {len(steps)} step rewards for a response of 0 tokens")

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    before = list(prompt_ids)
    response = list(response_ids)
    prompt_text = decode(before)
    if not decode(before + response).startswith(prompt_text):  # the completion was decoded alone
        before = []
        prompt_text = ""

    @functools.cache
    def characters_up_to(token: int) -> int:
        """Count the completion's characters in the response up to a token.

        Half a character decodes to U+FFFD, which differs from the completion, so it is not counted.
        """
        text = decode(before + response[: token + 1])[len(prompt_text) :]
        pairs = zip(text, completion, strict=False)
        return next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(completion))
        )

    if characters_up_to(count - 1) < len(completion):
        raise ValueError(
            f"completion must be the text of response_ids after the prompt, got {completion!r}, "
            f"which differs at character {characters_up_to(count - 1)}"
        )
    rewards = [0.0] * count
    for end, value in steps:
        if end < 1:
            raise ValueError(f"a step must end at a character offset >= 1, got {end}")
        token = bisect.bisect_left(range(count), end, key=characters_up_to)
        rewards[min(token, count - 1)] += value
    return rewards


def generated_token_rewards(rewards: Sequence[float], response_mask: Sequence[bool]) -> list[float]:
    """Return the rewards of the tokens that the policy wrote.

    The reward of any other token moves to the last generated token before it, or else to the first
    one after it.
    """
    result = [0.0] * sum(response_mask)
    generated_so_far = 0
    for reward, is_generated in zip(rewards, response_mask, strict=True):
        generated_so_far += is_generated
        result[max(generated_so_far - 1, 0)] += reward
    return result
