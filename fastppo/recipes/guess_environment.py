"""TextArena's GuessTheNumber, six guesses, for a model that reads no rules.

The rules are the same in every game and longer than a game; this model knows them from the games
that it was shown. Hints, moves that are refused, and the reward are the game's own.
"""

from __future__ import annotations

from typing import Any

from fastppo.environments.textarena import Game


class Guess(Game):
    """One game."""

    def __init__(self) -> None:
        super().__init__("GuessTheNumber-v0", max_turns=5)  # and a last guess, by the game

    def reset(self, prompt: Any, seed: int | None = None) -> str:
        """Begins the game of a seed."""
        super().reset(prompt, seed)
        return "Guess:"
