"""`calculator`: products that no small model knows, and a tool that does.

In the first turn the model writes a call, `[34*57]`; the environment answers `=1938;`; in the
second turn the model says the number. Demonstrations of both turns teach the form, and half of them
call the wrong product, so what comes of them calls wrongly; that a call should be of what was asked
follows from the reward alone.
"""

from __future__ import annotations

import random
from pathlib import Path

from rich.console import Console

from fastppo.data.rows import write_rows
from fastppo.recipes.characters import train_from_scratch

SMALLEST, LARGEST = 10, 99
"""Of the two numbers of a product."""

DEMONSTRATIONS, HELD_OUT, PROMPTS = 1500, 200, 3000

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
        asked = f"{a}*{b}?"
        if draw.random() < WRONG:
            a, b = draw.choice(numbers), draw.choice(numbers)
        call = f"[{a}*{b}]"
        demonstrations += [
            {"prompt": asked, "completion": call},
            {"prompt": f"{asked}{call}={a * b};", "completion": str(a * b)},
        ]
    train_from_scratch(directory / "model", demonstrations, seed, console, epochs=5)
