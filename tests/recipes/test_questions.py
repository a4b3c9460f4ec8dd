"""Sums in words."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from fastppo.data.rows import load_rows
from fastppo.recipes import questions


@pytest.mark.parametrize("make", [questions.prepare, questions.prepare_sums])
def test_answers_are_right_and_no_question_is_held_out_and_trained_on(make, tmp_path: Path) -> None:
    make(tmp_path, 1, Console(file=io.StringIO()))
    prompts, held_out = (
        load_rows(str(tmp_path / f"{name}.jsonl")) for name in ("prompts", "held_out")
    )
    assert (len(prompts), len(held_out)) == (questions.PROMPTS, questions.HELD_OUT)
    texts = [row["prompt"][0]["content"] for row in [*prompts, *held_out]]
    assert len(set(texts)) == len(texts)
    for row, text in zip(prompts, texts, strict=False):
        found = re.search(r"What is (\d+) ([+*]) (\d+)(?: ([+-]) (\d+))?\?", text)
        assert found, text
        a, b = int(found[1]), int(found[3])
        value = a + b if found[2] == "+" else a * b
        if found[4]:
            value += int(found[5]) if found[4] == "+" else -int(found[5])
        assert row["answer"] == str(value), text
    again = tmp_path / "again"
    again.mkdir()
    make(again, 1, Console(file=io.StringIO()))
    assert (again / "prompts.jsonl").read_bytes() == (tmp_path / "prompts.jsonl").read_bytes()
