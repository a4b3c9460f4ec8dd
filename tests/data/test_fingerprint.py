"""Fingerprints differ where contents do, and nowhere else."""

from __future__ import annotations

import tiny
import torch

from fastppo.data import fingerprint


def test_one_model_has_one_fingerprint_and_another_of_its_shape_has_another() -> None:
    one, same, other = (
        fingerprint.of_weights(tiny.model(seed=seed).named_parameters()) for seed in (0, 0, 1)
    )
    assert one == same != other


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
