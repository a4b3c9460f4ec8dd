"""Data of the recipe `arithmetic`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fastppo.data.datasets import load_rows
from fastppo.recipes import arithmetic


def test_sums_are_right_and_half_the_demonstrations_are_wrong(tmp_path: Path, monkeypatch) -> None:
    shown: list[dict[str, str]] = []

    def keep(directory: Path, rows: list[dict[str, str]], *more: Any, **options: Any) -> None:
        shown.extend(rows)

    monkeypatch.setattr(arithmetic, "train_from_scratch", keep)
    arithmetic.prepare(tmp_path, 3, Console(file=io.StringIO()))
    prompts, held_out = (
        load_rows(str(tmp_path / f"{name}.jsonl")) for name in ("prompts", "held_out")
    )
    assert len(held_out) == arithmetic.HELD_OUT
    sums = {row["prompt"]: row["answer"] for row in [*prompts, *held_out]}
    assert len(sums) == len(prompts) + len(held_out) == (arithmetic.LARGEST + 1) ** 2
    for prompt, answer in sums.items():
        a, b = prompt.removesuffix("=").split("+")
        assert int(a) + int(b) == int(answer)
        assert {len(a), len(b), len(answer)} == {2}
    assert len(shown) == arithmetic.DEMONSTRATIONS * len(prompts)
    assert {row["prompt"] for row in shown} == {row["prompt"] for row in prompts}
    off = [abs(int(row["completion"]) - int(sums[row["prompt"]])) for row in shown]
    assert set(off) == {0, 1, 10}
    # 4 standard errors of 9200 draws
    assert sum(map(bool, off)) / len(off) == pytest.approx(arithmetic.SLIPS, abs=0.021)
    assert all(row["completion"].isdecimal() and len(row["completion"]) >= 2 for row in shown)
