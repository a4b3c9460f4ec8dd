"""Rewards of the recipe `smollm2-sentiment`."""

from __future__ import annotations

import pytest

from fastppo.recipes.sentiment_reward import vader, vader_by_word

TEXTS = [" a wonderful, happy day.", " a horrible, sad day.", " a table with four legs."]


def test_the_changes_by_word_add_up_to_the_score() -> None:
    pytest.importorskip("vaderSentiment")
    texts = [*TEXTS, "", "   ", " not good, and then GREAT!!", "good\n\nbad good", "good  \n"]
    paid = vader_by_word(["It was"] * len(texts), texts)
    totals = [sum(value for _, value in steps) for steps in paid]
    assert totals == pytest.approx(vader(["It was"] * len(texts), texts), abs=1e-12)
    (end, value), *_ = paid[0]
    assert TEXTS[0][:end] == " a wonderful,"
    assert value > 0.5
    assert paid[2:5] == [[], [], []]  # neutral words change nothing
    assert paid[7][-1][0] == len("good")
    assert [value < 0 for _, value in paid[6]] == [False, True, False]
