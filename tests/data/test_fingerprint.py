"""Fingerprints differ where contents do, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from fastppo.data import fingerprint


def test_one_model_has_one_fingerprint_and_another_of_its_shape_has_another() -> None:
    one, same, other = (
        fingerprint.of_weights(tiny.model(seed=seed).named_parameters()) for seed in (0, 0, 1)
    )
    assert one == same != other


@pytest.mark.parametrize("changed", [{"b": torch.zeros(3)}, {"a": torch.zeros(4)}])
def test_names_and_shapes_count(changed: dict[str, torch.Tensor]) -> None:
    zeros = {"a": torch.zeros(3)}
    assert fingerprint.of_weights(zeros.items()) != fingerprint.of_weights(changed.items())
    halves = {"a": torch.zeros(3, dtype=torch.bfloat16)}
    assert fingerprint.of_weights(zeros.items()) != fingerprint.of_weights(halves.items())


def test_a_large_tensor_is_read_in_part_and_an_empty_one_at_all() -> None:
    large = torch.zeros(10 * fingerprint.SAMPLED)
    before = fingerprint.of_weights([("x", large)])
    large[10] = 1  # one that is read: every tenth is
    assert fingerprint.of_weights([("x", large)]) != before
    assert fingerprint.of_weights([("x", torch.zeros(0))])
    assert fingerprint.of_weights([("x", torch.zeros(()))])


def test_rows_count_with_every_column_in_their_order() -> None:
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    assert fingerprint.of_rows(rows) == fingerprint.of_rows(
        [dict(reversed(r.items())) for r in rows]
    )
    assert fingerprint.of_rows(rows) != fingerprint.of_rows(rows[::-1])
    assert fingerprint.of_rows(rows) != fingerprint.of_rows([rows[0], {**rows[1], "answer": 3}])
    # An object without a JSON form is known by its type: its address would differ each time.
    assert fingerprint.of_rows([object()]) == fingerprint.of_rows([object()])


def test_files_and_texts(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    before = fingerprint.of_file(tmp_path / "a")
    (tmp_path / "a").write_text("y")
    assert before != fingerprint.of_file(tmp_path / "a")
    assert fingerprint.of_text("x") != fingerprint.of_text("y")
    assert fingerprint.of_text("\ud800"), "half of a surrogate pair is a text too"
