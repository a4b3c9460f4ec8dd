"""Stop strings end a response at the token that completes one, and are found in its last tokens."""

from __future__ import annotations

import pytest
import tiny

from fastppo.rollout.stopping import StopStrings


def _bytes(text: str) -> list[int]:
    return tiny.byte_tokenizer()(text)["input_ids"]


def test_a_string_counts_once_its_last_token_is_there() -> None:
    strings = StopStrings(tiny.byte_tokenizer(), ["\n\n", "END"])
    texts = ["a\n", "a\n\n", "EN", "the END", "", "end"]
    assert strings.ended(list(map(_bytes, texts))) == [False, True, False, True, False, False]


def test_a_character_of_several_tokens_is_found_whole() -> None:
    strings = StopStrings(tiny.byte_tokenizer(), ["€"])
    tokens = _bytes("so €")
    assert len(tokens) == 6
    assert [strings.ended([tokens[:n]])[0] for n in range(7)] == [False] * 6 + [True]


@pytest.mark.parametrize(
    ("tokenizer", "strings", "says"),
    [
        (None, ["x"], "need a tokenizer"),
        (tiny.tokenizer(), ["x", "w1 <eos>"], r"special token '<eos>', .* stop_token_ids \(1\)"),
    ],
)
def test_what_cannot_be_looked_for_is_refused(tokenizer, strings, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        StopStrings(tokenizer, strings)
    StopStrings(None, [])
