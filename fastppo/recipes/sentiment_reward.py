"""The rewards of the recipe `smollm2-sentiment`. Copied into its folder, to be changed."""

import functools
import math
import re
from typing import Any


def vader(prompts: list[str], completions: list[str]) -> list[float]:
    """VADER's compound score of the completion, from -1 to 1."""
    return [_score(text) for text in completions]


def vader_by_word(prompts: list[str], completions: list[str]) -> list[list[tuple[int, float]]]:
    """The same, paid as it is earned: what each word adds to the score of the words before it.

    The total of a response is what `vader` returns for it, so the best policy is the same (Ng et
    al. 1999), but a word gets no credit for what was earned before it.
    """
    return [_additions(text) for text in completions]


def _additions(text: str) -> list[tuple[int, float]]:
    """(offset of a word's end, what the word adds), of the words that add something."""
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    scores = [0.0, *(_score(text[:end]) for end in ends)]
    pairs = zip(ends, scores[1:], scores[:-1], strict=True)
    return [(end, after - before) for end, after, before in pairs if after != before]


def _score(text: str) -> float:
    return _vader().polarity_scores(text)["compound"]


def afinn(prompts: list[str], completions: list[str]) -> list[float]:
    """Another lexicon, from -1 to 1 by VADER's own formula: never trained on."""
    valences = [_afinn().score(text) for text in completions]
    return [valence / math.sqrt(valence**2 + 15) for valence in valences]


@functools.cache
def _vader() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


@functools.cache
def _afinn() -> Any:
    from afinn import Afinn

    return Afinn()
