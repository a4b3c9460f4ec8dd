"""The verifier of questions in words."""

from __future__ import annotations

import pytest

from fastppo.recipes.questions_reward import correct


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("82", 1.0),
        ("37 + 45 is 82.", 1.0),
        ("First 1,900, then 1,938", 0.0),
        ("82, or 83", 0.0),
        ("eighty-two", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_counts(text: str, right: float) -> None:
    assert correct([[]], [text], answer=["82"]) == [right]


def test_a_thousands_comma_and_a_sign_are_read() -> None:
    assert correct([[], []], ["1,938", "So -17"], answer=["1938", "-17"]) == [1.0, 1.0]
