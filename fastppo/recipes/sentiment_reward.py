"""The rewards of the recipe `smollm2-sentiment`. Copied into its folder, to be changed."""

import functools
import math
from typing import Any


def vader(prompts: list[str], completions: list[str]) -> list[float]:
    """VADER's compound score of the completion, from -1 to 1: what is trained on."""
    return [_vader().polarity_scores(text)["compound"] for text in completions]


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
