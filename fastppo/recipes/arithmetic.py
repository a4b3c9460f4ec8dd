"""`arithmetic`: sums of two numbers, a model made from scratch, and a verifier as the reward.

A few demonstrations teach the form and some of the sums; PPO learns the rest from right and wrong.
Prompts, held-out prompts and demonstrations are different sums.
"""

from __future__ import annotations

import random
from pathlib import Path

from rich.console import Console

from fastppo.data.rows import write_rows
from fastppo.recipes.characters import train_from_scratch

LARGEST = 99
"""Of the two numbers of a sum."""

DEMONSTRATIONS, HELD_OUT = 1500, 500
"""Of the 100² sums; all others are prompts."""


def prepare(directory: Path, seed: int, console: Console) -> None:
    """Writes model/, prompts.jsonl and held_out.jsonl."""
    sums = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    random.Random(seed).shuffle(sums)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    shown, rest = rows[:DEMONSTRATIONS], rows[DEMONSTRATIONS:]
    write_rows(directory / "held_out.jsonl", rest[:HELD_OUT])
    write_rows(directory / "prompts.jsonl", rest[HELD_OUT:])
    demonstrations = [{"prompt": row["prompt"], "completion": row["answer"]} for row in shown]
    train_from_scratch(directory / "model", demonstrations, seed, console)
