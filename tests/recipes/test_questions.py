"""Data of the recipes with arithmetic in words."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from fastppo.data.datasets import load_rows
from fastppo.recipes import questions


@pytest.mark.parametrize("make", [questions.prepare, questions.prepare_sums])
def test_answers_are_right_and_held_out_questions_are_unseen(make, tmp_path: Path) -> None:
    make(tmp_path, 1, Console(file=io.StringIO()))
    prompts, held_out = (
        load_rows(str(tmp_path / f"{name}.jsonl")) for name in ("prompts", "held_out")
    )
    assert (len(prompts), len(held_out)) == (questions.PROMPTS, questions.HELD_OUT)
    texts = [row["prompt"][0]["content"] for row in [*prompts, *held_out]]
    assert len(set(texts)) == len(texts)
    for row, text in zip(prompts, texts, strict=False):
        sum_of_words = re.search(r"What is (\d+) ([+*]) (\d+)(?: ([+-]) (\d+))?\?", text)
        assert sum_of_words, text
        a = int(sum_of_words[1])
        b = int(sum_of_words[3])
        value = a + b if sum_of_words[2] == "+" else a * b
        if sum_of_words[4]:
            value += int(sum_of_words[5]) if sum_of_words[4] == "+" else -int(sum_of_words[5])
        assert row["answer"] == str(value), text
    again = tmp_path / "again"
    again.mkdir()
    make(again, 1, Console(file=io.StringIO()))
    assert (again / "prompts.jsonl").read_bytes() == (tmp_path / "prompts.jsonl").read_bytes()
