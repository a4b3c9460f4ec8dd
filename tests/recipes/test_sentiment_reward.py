"""Two lexicons that agree on what is glad, where they are installed."""

from __future__ import annotations

import pytest

from fastppo.recipes.sentiment_reward import vader, vader_by_word

TEXTS = [" a wonderful, happy day.", " a horrible, sad day.", " a table with four legs."]


def test_what_the_words_add_is_the_score_in_total_and_is_paid_where_a_word_ends() -> None:
    pytest.importorskip("vaderSentiment")
    texts = [*TEXTS, "", "   ", " not good, and then GREAT!!", "good\n\nbad good", "good  \n"]
    paid = vader_by_word(["It was"] * len(texts), texts)
    totals = [sum(value for _, value in steps) for steps in paid]
    assert totals == pytest.approx(vader(["It was"] * len(texts), texts), abs=1e-12)
    (end, value), *_ = paid[0]
    assert TEXTS[0][:end] == " a wonderful,"
    assert value > 0.5
    assert paid[2:5] == [[], [], []]  # nothing is added by words that say nothing
    assert paid[7][-1][0] == len("good")
    assert [value < 0 for _, value in paid[6]] == [False, True, False]
