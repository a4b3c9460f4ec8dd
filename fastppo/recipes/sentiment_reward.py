"""Rewards of the recipe `smollm2-sentiment`, copied into its folder for you to change."""

import functools
import math
import re
from typing import Any


def vader(prompts: list[str], completions: list[str]) -> list[float]:
    """Return VADER's compound score of each completion, from -1 to 1."""
    return [_score(text) for text in completions]


def vader_by_word(prompts: list[str], completions: list[str]) -> list[list[tuple[int, float]]]:
    """Return the same score split over words: the change of the score with each word.

    The total of a response equals its `vader` score, so the optimal policy is the same (Ng et al.
    1999), but each word gets credit only for its own effect.
    """
    return [_additions(text) for text in completions]


def _additions(text: str) -> list[tuple[int, float]]:
    """Return (offset of a word's end, change of the score) for the words that change it."""
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    scores = [0.0, *(_score(text[:end]) for end in ends)]
    pairs = zip(ends, scores[1:], scores[:-1], strict=True)
    return [(end, after - before) for end, after, before in pairs if after != before]


def _score(text: str) -> float:
    return _vader().polarity_scores(text)["compound"]


def afinn(prompts: list[str], completions: list[str]) -> list[float]:
    """Return AFINN's score, scaled to (-1, 1) by VADER's formula. It is never trained on."""
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
