"""Data of the recipe `calculator`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fastppo.data.datasets import load_rows
from fastppo.recipes import calculator
from fastppo.recipes.calculator_environment import Calculator


def test_demonstrations_have_both_turns_and_half_of_the_calls_are_wrong(
    tmp_path: Path, monkeypatch
) -> None:
    shown: list[dict[str, str]] = []

    def keep(directory: Path, rows: list[dict[str, str]], *more: Any, **options: Any) -> None:
        shown.extend(rows)

    monkeypatch.setattr(calculator, "train_from_scratch", keep)
    calculator.prepare(tmp_path, 0, Console(file=io.StringIO()))
    prompts = load_rows(str(tmp_path / "prompts.jsonl"))
    held_out = load_rows(str(tmp_path / "held_out.jsonl"))
    assert (len(prompts), len(held_out)) == (calculator.PROMPTS, calculator.HELD_OUT)
    for row in prompts[:50]:
        a, b = row["prompt"].removesuffix("?").split("*")
        assert int(a) * int(b) == int(row["answer"])
    calls = shown[::2]
    answers = shown[1::2]
    wrong = [row["completion"] != f"[{row['prompt'].removesuffix('?')}]" for row in calls]
    assert sum(wrong) / len(wrong) == pytest.approx(calculator.WRONG, abs=0.05)
    for call, answer in zip(calls[:50], answers[:50], strict=True):
        environment = Calculator()
        environment.reset(call["prompt"], "")
        observation, reward, done = environment.step(call["completion"])
        assert (reward, done) == (0.0, False)
        assert answer["prompt"] == call["prompt"] + call["completion"] + observation
        assert observation == f"={answer['completion']};"
    demonstrated = {row["prompt"] for row in calls}
    unseen = [row["prompt"] for row in [*prompts, *held_out]]
    assert len(set(unseen)) == len(unseen)
    assert demonstrated.isdisjoint(unseen)
