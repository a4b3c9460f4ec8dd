"""Two lexicons that agree on what is glad, where they are installed."""

from __future__ import annotations

import pytest

from fastppo.recipes.sentiment_reward import afinn, vader

TEXTS = [" a wonderful, happy day.", " a horrible, sad day.", " a table with four legs."]


@pytest.mark.parametrize(("reward", "package"), [(vader, "vaderSentiment"), (afinn, "afinn")])
def test_a_lexicon_tells_glad_from_sad_within_one(reward, package: str) -> None:
    pytest.importorskip(package)
    glad, sad, neither = reward(["It was"] * 3, TEXTS)
    assert 0.5 < glad <= 1
    assert -1 <= sad < -0.4
    assert neither == 0
