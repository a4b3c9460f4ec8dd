"""Assignment of rewards within a response to tokens."""

from __future__ import annotations

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from fastppo.rewards.placing import generated_token_rewards, token_rewards

BYTES = tiny.byte_tokenizer()


def _placed(partial, completion: str, prompt: str = "a prompt: ") -> list[float]:
    ids = [*BYTES(completion)["input_ids"], BYTES.eos_token_id]
    return token_rewards(partial, completion, BYTES(prompt)["input_ids"], ids, BYTES)


def test_an_invalid_character_in_the_response_counts_as_one() -> None:
    """A response may hold bytes that are no character; its text then has U+FFFD too."""
    response = [BYTES("é")["input_ids"][0], *BYTES("ab")["input_ids"]]
    text = BYTES.decode(response)
    assert text == "\ufffdab"
    assert token_rewards([(1, 1.0), (2, 2.0)], text, BYTES("p")["input_ids"], response, BYTES) == [
        1.0,
        2.0,
        0.0,
    ]


def test_a_leading_space_that_decoding_drops_is_counted() -> None:
    """The offsets are those of the completion, which begins with the space."""
    tokenizer = tiny.tokenizer()
    prompt = tokenizer("w1 w2")["input_ids"]
    response = tokenizer("w7 w8 <eos>")["input_ids"]
    completion = " w7 w8"
    assert token_rewards(
        [(3, 1.0), (4, 0.5), (6, 2.0)], completion, prompt, response, tokenizer
    ) == [
        1.0,
        2.5,
        0.0,
    ]


def test_rewards_by_token_and_none_pass_through() -> None:
    assert token_rewards([1, 2.0], "ab", [5], [3, 4], BYTES) == [1.0, 2.0]
    assert token_rewards(None, "ab", [5], [3, 4], BYTES) == [0.0, 0.0]
    assert token_rewards([], "ab", [5], [3, 4], BYTES) == [0.0, 0.0]


def test_token_rewards_refuses_inconsistent_arguments() -> None:
    with pytest.raises(
        ValueError, match="expected one reward per token, got 1 for 2 response tokens"
    ):
        token_rewards([1.0], "ab", [5], [3, 4], BYTES)
    with pytest.raises(ValueError, match="character offset >= 1, got 0"):
        _placed([(0, 1.0)], "ab")
    with pytest.raises(ValueError, match="completion must be the text of response_ids"):
        token_rewards([(1, 1.0)], "other", [5], BYTES("ab")["input_ids"], BYTES)
    with pytest.raises(ValueError, match="a response of 0 tokens"):
        token_rewards([(1, 1.0)], "", [5], [], BYTES)


def test_a_prompt_that_ends_within_a_character_is_ignored() -> None:
    """The response then was decoded alone, and so it is here."""
    first, second = BYTES("é")["input_ids"]
    response = [second, *BYTES("ab")["input_ids"]]
    completion = BYTES.decode(response)
    assert completion == "\ufffdab"
    assert token_rewards([(1, 1.0), (3, 2.0)], completion, [first], response, BYTES) == [
        1.0,
        0,
        2.0,
    ]


def test_a_long_response_is_decoded_a_few_times() -> None:
    """O(log T) prefixes for each step, because the text only grows with the tokens."""

    class Counting:
        calls = 0

        def decode(self, ids, skip_special_tokens):
            self.calls += 1
            return BYTES.decode(ids, skip_special_tokens=skip_special_tokens)

    counting = Counting()
    text = "abcdefgh" * 128
    ids = BYTES(text)["input_ids"]
    rewards = token_rewards([(700, 1.0)], text, BYTES("p")["input_ids"], ids, counting)
    assert rewards.index(1.0) == 699
    assert counting.calls < 20  # 2 for the prompt, 1 for the whole, log2(1024) for the step


@given(
    st.text(st.sampled_from("a b.é€🙂"), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(1, 20), st.integers(-3, 3)), max_size=5),
)
def test_placement_agrees_with_counting_bytes(completion, steps) -> None:
    """A character of several tokens counts from its last one, an end beyond the text is the last
    token, and steps that end on one token add up."""
    expected = [0.0] * (len(completion.encode()) + 1)
    for end, value in steps:
        inside = end <= len(completion)
        expected[len(completion[:end].encode()) - 1 if inside else -1] += value
    rewards = _placed([(end, float(value)) for end, value in steps], completion)
    assert rewards == expected


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([True, True, True, True], [1.0, 2.0, 4.0, 8.0]),
        ([True, False, False, True], [7.0, 8.0]),
        ([False, False, True, False], [15.0]),
    ],
)
def test_the_reward_of_a_masked_token_moves_to_the_last_generated_one(mask, expected) -> None:
    assert generated_token_rewards([1.0, 2.0, 4.0, 8.0], mask) == expected
