"""Fingerprints differ where contents do, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastppo.data import fingerprint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_every_element_counts_and_its_place_does(dtype: torch.dtype) -> None:
    ones = torch.ones(4099, dtype=dtype)
    fingerprints = {fingerprint.of_weights([("x", ones)])}
    places = (0, 1, 4096, len(ones) - 1)
    for place in places:
        changed = ones.clone()
        changed[place] = 2
        fingerprints.add(fingerprint.of_weights([("x", changed)]))
    assert len(fingerprints) == 1 + len(places)
    of_view = fingerprint.of_weights([("x", torch.stack([ones, ones], 1)[1:, 0])])
    assert of_view == fingerprint.of_weights([("x", ones[:-1])])
    assert fingerprint.of_weights([("x", torch.zeros(0))])
    assert fingerprint.of_weights([("x", torch.zeros(()))])


def test_a_change_that_no_sum_shows_counts() -> None:
    """What one word of a row gains its neighbour loses, and the next row's the other way round."""
    words = torch.zeros(2, 1024, dtype=torch.int64)
    changed = words.clone()
    changed[:, :2] = torch.tensor([[1, -1], [-1, 1]])
    assert fingerprint.of_weights([("x", words)]) != fingerprint.of_weights([("x", changed)])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("from words import LIST", "words.py"),
        ("from lists.words import LIST", "lists/words.py"),  # a package without `__init__.py`
        ("from lists import words", "lists/words.py"),
    ],
)
def test_code_counts_with_what_it_imports_beside_it(line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "lists").mkdir()
    (tmp_path / "reward.py").write_text(f"import math, torch\n{line}\n")
    (tmp_path / words).write_text("LIST = ['a']\n")
    (tmp_path / "other.py").write_text("")
    before = fingerprint.of_code(tmp_path / "reward.py")
    (tmp_path / "other.py").write_text("1")
    assert fingerprint.of_code(tmp_path / "reward.py") == before
    (tmp_path / words).write_text("LIST = ['b']\n")
    assert fingerprint.of_code(tmp_path / "reward.py") != before


@pytest.mark.parametrize(
    ("line", "has_init"),
    [
        ("from . import words", True),
        ("from mine.words import LIST", True),
        ("from . import words", False),
    ],
)
def test_a_module_counts_with_what_it_imports_from_its_package(
    line: str, has_init: bool, tmp_path: Path
) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    if has_init:
        (package / "__init__.py").write_text("")
    (package / "reward.py").write_text(f"import torch, beside\n{line}\n")
    (package / "words.py").write_text("LIST = ['a']\n")
    (tmp_path / "beside.py").write_text("")
    before = fingerprint.of_code(package / "reward.py")
    (tmp_path / "beside.py").write_text("1")
    assert fingerprint.of_code(package / "reward.py") == before
    (package / "words.py").write_text("LIST = ['b']\n")
    assert fingerprint.of_code(package / "reward.py") != before


def test_rows_count_with_every_column_in_their_order() -> None:
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    assert fingerprint.of_rows(rows) == fingerprint.of_rows(
        [dict(reversed(r.items())) for r in rows]
    )
    assert fingerprint.of_rows(rows) != fingerprint.of_rows(rows[::-1])
    assert fingerprint.of_rows(rows) != fingerprint.of_rows([rows[0], {**rows[1], "answer": 3}])
    # An object without a JSON form is known by its type: its address would differ each time.
    assert fingerprint.of_rows([object()]) == fingerprint.of_rows([object()])
