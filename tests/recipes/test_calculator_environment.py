"""The calculator environment."""

from __future__ import annotations

import pytest

from fastppo.recipes.calculator_environment import Calculator


@pytest.fixture
def game() -> Calculator:
    game = Calculator()
    game.reset("34*57?", "1938")
    return game


def test_a_call_gets_the_product_and_the_next_turn_is_scored(game: Calculator) -> None:
    assert game.step("[34*57]") == ("=1938;", 0.0, False)
    assert game.step("1938")[1:] == (1.0, True)


@pytest.mark.parametrize("text", ["34*57", "[34+57]", ""])
def test_other_text_is_the_final_answer(text: str, game: Calculator) -> None:
    assert game.step(text)[1:] == (0.0, True)
