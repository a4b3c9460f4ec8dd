"""`guess`: TextArena's GuessTheNumber, with a small model made from scratch.

The demonstrations are games of random guesses. They teach the format of a move; the model learns to
use the hints from the game's reward.
"""

from __future__ import annotations

import random
from pathlib import Path

from rich.console import Console

from fastppo.recipes.characters import PIECES, make_tokenizer, train_from_scratch
from fastppo.recipes.guess_environment import Guess

DEMONSTRATIONS = 1000


def prepare(directory: Path, seed: int, console: Console) -> None:
    """Write model/."""
    draw = random.Random(seed)
    rows = [_played(Guess(), draw) for _ in range(DEMONSTRATIONS)]
    words = {piece for row in rows for text in row.values() for piece in PIECES.findall(text)}
    train_from_scratch(
        directory / "model",
        rows,
        seed,
        console,
        tokenizer=make_tokenizer(sorted(words), PIECES.pattern),
        hidden=64,
        context=256,
        batch_size=32,
        learning_rate=5e-3,
    )


def _played(game: Guess, draw: random.Random) -> dict[str, str]:
    """Play a game and return its prompt, with its guesses and hints as the completion."""
    prompt = game.reset("", seed=draw.randrange(2**31))
    guesses = list(range(1, 21))
    draw.shuffle(guesses)
    played = ""
    for guess in guesses:
        hint, _, done = game.step(f"[{guess}]")
        played += f"[{guess}]{hint}"
        if done:
            break
    return {"prompt": prompt, "completion": played}
