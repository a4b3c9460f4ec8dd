"""`calculator`: products that no small model knows, and a tool that does.

In the first turn the model writes a call, `[34*57]`; the environment answers `=1938;`; in the
second turn the model says the number. Demonstrations of both turns teach the form, but half of them
call another product than the prompt's; only the reward teaches to call the right one.
"""

from __future__ import annotations

import random
from pathlib import Path

from rich.console import Console

from fastppo.data.rows import write_rows
from fastppo.recipes.characters import train_from_scratch

SMALLEST = 10
LARGEST = 99
"""Numbers in a product."""

DEMONSTRATIONS = 1500
HELD_OUT = 200
PROMPTS = 3000

WRONG = 0.5
"""Share of the demonstrated calls that are of another product."""


def prepare(directory: Path, seed: int, console: Console) -> None:
    """Writes model/, prompts.jsonl and held_out.jsonl."""
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
