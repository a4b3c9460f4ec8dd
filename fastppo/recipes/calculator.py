"""`calculator`: products of two numbers, with a tool to compute them.

In the first turn the model writes a call, `[34*57]`, and the environment answers `=1938;`. In the
second turn the model repeats the number. Demonstrations of both turns teach the format, but half of
the calls have wrong numbers; the model learns from the reward to call with the prompt's.
"""

from __future__ import annotations

import random
from pathlib import Path

from rich.console import Console

from fastppo.data.datasets import write_rows
from fastppo.recipes.characters import train_from_scratch

SMALLEST = 10
LARGEST = 99
"""Largest factor."""

DEMONSTRATIONS = 1500
HELD_OUT = 200
PROMPTS = 3000

WRONG = 0.5
"""Share of demonstrated calls with other numbers than the prompt's."""


def prepare(directory: Path, seed: int, console: Console) -> None:
    """Write model/, prompts.jsonl and held_out.jsonl."""
    draw = random.Random(seed)
    numbers = range(SMALLEST, LARGEST + 1)
    products = [(a, b) for a in numbers for b in numbers]
    draw.shuffle(products)
    rows = [{"prompt": f"{a}*{b}?", "answer": str(a * b)} for a, b in products]
    write_rows(directory / "held_out.jsonl", rows[:HELD_OUT])
    write_rows(directory / "prompts.jsonl", rows[HELD_OUT : HELD_OUT + PROMPTS])
    demonstrations = []
    for a, b in products[-DEMONSTRATIONS:]:
        prompt = f"{a}*{b}?"
        if draw.random() < WRONG:
            a = draw.choice(numbers)
            b = draw.choice(numbers)
        call = f"[{a}*{b}]"
        demonstrations += [
            {"prompt": prompt, "completion": call},
            {"prompt": f"{prompt}{call}={a * b};", "completion": str(a * b)},
        ]
    train_from_scratch(directory / "model", demonstrations, seed, console, epochs=5)
