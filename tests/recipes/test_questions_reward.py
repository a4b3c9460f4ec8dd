"""Verifier of arithmetic in words."""

from __future__ import annotations

import pytest

from fastppo.recipes.questions_reward import correct


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("82", 1.0),
        ("37 + 45 is 82.", 1.0),
        ("82, or 83", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_counts(text: str, right: float) -> None:
    assert correct([[]], [text], answer=["82"]) == [right]


def test_commas_and_signs_are_parsed() -> None:
    assert correct([[], []], ["1,938", "So -17"], answer=["1938", "-17"]) == [1.0, 1.0]
