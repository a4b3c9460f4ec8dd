"""Demonstrations of the recipe `guess`."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("textarena")

from fastppo.recipes import guess
from fastppo.recipes.characters import PIECES, make_tokenizer


def test_demonstrations_are_games_without_repeated_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, str]] = []

    def keep(directory: Path, rows: list[dict[str, str]], *more: Any, **options: Any) -> None:
        shown.extend(rows)

    monkeypatch.setattr(guess, "train_from_scratch", keep)
    guess.prepare(tmp_path, 0, Console(file=io.StringIO()))
    games = [re.findall(r"\[(\d+)\]", row["completion"]) for row in shown]
    assert all(len(set(guesses)) == len(guesses) for guesses in games)
    assert {int(number) for guesses in games for number in guesses} == set(range(1, 21))
    assert max(map(len, games)) == 6, "the game allows a last guess after its fifth turn"
    assert "The target number is lower." in shown[0]["completion"] + shown[1]["completion"]


def test_the_tokenizer_has_one_token_per_word_and_mark() -> None:
    tokenizer = make_tokenizer(["[", "]", "17", "lower", "."], PIECES.pattern)
    assert tokenizer("[17]\n is lower.")["input_ids"] == [3, 5, 4, 2, 6, 7]
    assert tokenizer.decode([3, 5, 4]) == "[17]"
