"""`arithmetic`: sums of two numbers, with a model made from scratch and a verifier as the reward.

Each prompt has four demonstrations. Half of them are off by one or ten, so the fine-tuned model is
wrong equally often; with PPO it learns the right answers from the verifier. Held-out sums appear in
no demonstration and no prompt. All numbers have two digits (07+15=22), so a digit's position gives
its place value and the model can generalize.
"""

from __future__ import annotations

import random
from pathlib import Path

from rich.console import Console

from fastppo.data.datasets import write_rows
from fastppo.recipes.characters import train_from_scratch

LARGEST = 49
"""Largest summand."""

HELD_OUT = 200
"""Number of held-out sums; all others are prompts."""

DEMONSTRATIONS = 4
"""Completions per prompt."""

SLIPS = 0.5
"""Share of wrong demonstrations."""


def prepare(directory: Path, seed: int, console: Console) -> None:
    """Write model/, prompts.jsonl and held_out.jsonl."""
    draw = random.Random(seed)
    sums = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    draw.shuffle(sums)
    rows = [{"prompt": f"{a:02}+{b:02}=", "answer": f"{a + b:02}"} for a, b in sums]
    write_rows(directory / "held_out.jsonl", rows[:HELD_OUT])
    write_rows(directory / "prompts.jsonl", rows[HELD_OUT:])
    demonstrations = [
        {"prompt": row["prompt"], "completion": _slip(row["answer"], draw)}
        for row in rows[HELD_OUT:]
        for _ in range(DEMONSTRATIONS)
    ]
    train_from_scratch(directory / "model", demonstrations, seed, console, epochs=8)


def _slip(answer: str, draw: random.Random) -> str:
    """Return the answer, or a number off by one or ten."""
    if draw.random() >= SLIPS:
        return answer
    near = [int(answer) + off for off in (-10, -1, 1, 10)]
    return f"{draw.choice([number for number in near if number >= 0]):02}"
