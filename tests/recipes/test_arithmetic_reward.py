"""The verifier of sums."""

from __future__ import annotations

from fastppo.recipes.arithmetic_reward import correct


def test_the_answer_and_nothing_else_is_right() -> None:
    texts = ["82", " 82", "83", "82+", "", "082"]
    assert correct(["37+45="] * 6, texts, answer=["82"] * 6) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
