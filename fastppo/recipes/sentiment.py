"""`smollm2-sentiment`: continue everyday sentences in a positive tone."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from rich.console import Console

from fastppo.data.datasets import write_rows
from fastppo.recipes import smollm2


def _lines(name: str) -> list[str]:
    return files("fastppo.recipes").joinpath(name).read_text("utf-8").splitlines()


PROMPTS = _lines("sentiment_prompts.txt")
HELD_OUT = _lines("sentiment_held_out.txt")


def prepare(directory: Path, seed: int, console: Console) -> None:
    """Write model/, prompts.jsonl and held_out.jsonl."""
    smollm2.unpack(directory / "model")
    write_rows(directory / "prompts.jsonl", [{"prompt": text} for text in PROMPTS])
    write_rows(directory / "held_out.jsonl", [{"prompt": text} for text in HELD_OUT])
