"""Stop strings end a response at the token that completes one."""

from __future__ import annotations

import pytest
import tiny

from fastppo.rollout.stopping import StopStrings


def _bytes(text: str) -> list[int]:
    return tiny.byte_tokenizer()(text)["input_ids"]


def test_a_string_is_found_at_its_last_token() -> None:
    strings = StopStrings(tiny.byte_tokenizer(), ["\n\n", "END"])
    texts = ["a\n", "a\n\n", "EN", "the END", "", "end"]
    assert strings.ended(list(map(_bytes, texts))) == [False, True, False, True, False, False]


def test_a_character_of_several_tokens_is_found_at_its_last_token() -> None:
    strings = StopStrings(tiny.byte_tokenizer(), ["€"])
    tokens = _bytes("so €")
    assert len(tokens) == 6
    assert [strings.ended([tokens[:n]])[0] for n in range(7)] == [False] * 6 + [True]


@pytest.mark.parametrize(
    ("tokenizer", "strings", "named"),
    [
        (None, ["x"], "tokenizer"),
        (tiny.tokenizer(), ["x", "w1 <eos>"], "<eos>.* stop_token_ids"),
    ],
)
def test_strings_without_a_tokenizer_or_with_a_special_token_are_refused(
    tokenizer, strings, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        StopStrings(tokenizer, strings)
    StopStrings(None, [])
