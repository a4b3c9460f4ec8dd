"""TextArena's GuessTheNumber with six guesses and without the rules in the prompt.

The rules never change and are longer than a game; the model knows them from its demonstrations.
Hints, illegal moves and the reward are the game's own.
"""

from __future__ import annotations

from typing import Any

from fastppo.environments.textarena import Game


class Guess(Game):
    """One game of GuessTheNumber."""

    def __init__(self) -> None:
        super().__init__("GuessTheNumber-v0", max_turns=5)  # the game adds a last guess

    def reset(self, prompt: Any, seed: int | None = None) -> str:
        """Start the game of a seed."""
        super().reset(prompt, seed)
        return "Guess:"
