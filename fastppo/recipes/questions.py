"""Arithmetic in words for chat models, with a verifier as the reward."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from rich.console import Console

from fastppo.data.datasets import write_rows

PROMPTS = 2000
HELD_OUT = 100


def prepare(directory: Path, seed: int, console: Console) -> None:
    """Write prompts.jsonl and held_out.jsonl: a product plus or minus a number."""
    _write(directory, seed, _two_steps)


def prepare_sums(directory: Path, seed: int, console: Console) -> None:
    """Write prompts.jsonl and held_out.jsonl: single sums, for the smallest models."""
    _write(directory, seed, _sum)


def _write(directory: Path, seed: int, make: Any) -> None:
    draw = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < PROMPTS + HELD_OUT:
        question, answer = make(draw)
        rows[question] = {
            "prompt": [{"role": "user", "content": question}],
            "answer": str(answer),
        }
    distinct = list(rows.values())
    write_rows(directory / "held_out.jsonl", distinct[:HELD_OUT])
    write_rows(directory / "prompts.jsonl", distinct[HELD_OUT:])


def _sum(draw: random.Random) -> tuple[str, int]:
    a = draw.randint(1, 49)
    b = draw.randint(1, 49)
    return f"What is {a} + {b}? Answer with the number alone.", a + b


def _two_steps(draw: random.Random) -> tuple[str, int]:
    a = draw.randint(11, 99)
    b = draw.randint(3, 29)
    c = draw.randint(11, 999)
    sign = draw.choice("+-")
    result = a * b + c if sign == "+" else a * b - c
    question = f"What is {a} * {b} {sign} {c}? Think step by step. End with the number alone."
    return question, result
