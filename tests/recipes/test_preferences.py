"""Preferences between a model's own sentences."""

from __future__ import annotations

import math
import random

import pytest

from fastppo.recipes.preferences import SHARPNESS, label


def _length(prompts: list[str], texts: list[str]) -> list[float]:
    return [len(text) / 10 for text in texts]


def test_label_noise_follows_the_sharpness() -> None:
    continued = {f"p{i}": [" aaaa", " aa"] for i in range(4000)}
    pairs = label(continued, _length, random.Random(0))
    assert len(pairs) == 4000
    right = sum(pair["chosen"] == " aaaa" for pair in pairs) / len(pairs)
    # 4 standard errors of 4000 draws
    assert right == pytest.approx(1 / (1 + math.exp(-SHARPNESS * 0.2)), abs=0.03)


def test_ties_and_empty_texts_are_skipped() -> None:
    continued = {"p": [" a", " b", " long", " x", " ", " glad"], "q": [" one"]}
    pairs = label(continued, _length, random.Random(1))
    assert [(pair["prompt"], {pair["chosen"], pair["rejected"]}) for pair in pairs] == [
        ("p", {" long", " x"})
    ]
