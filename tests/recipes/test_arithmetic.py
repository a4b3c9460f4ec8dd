"""The data of the recipe `arithmetic`."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from fastppo.data.rows import load_rows
from fastppo.recipes import arithmetic


def test_sums_are_right_and_no_sum_is_in_two_files(tmp_path: Path, monkeypatch) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr(arithmetic, "train_from_scratch", lambda _, rows, *more: shown.extend(rows))
    arithmetic.prepare(tmp_path, 3, Console(file=io.StringIO()))
    prompts, held_out = (
        load_rows(str(tmp_path / f"{name}.jsonl")) for name in ("prompts", "held_out")
    )
    assert len(shown) == arithmetic.DEMONSTRATIONS
    assert len(held_out) == arithmetic.HELD_OUT
    sums = [row["prompt"] for row in [*prompts, *held_out, *shown]]
    assert len(set(sums)) == len(sums) == (arithmetic.LARGEST + 1) ** 2
    for row in [*prompts[:50], *held_out[:50]]:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert int(a) + int(b) == int(row["answer"])
    for row in shown[:50]:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert int(a) + int(b) == int(row["completion"])
