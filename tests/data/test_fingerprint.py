"""Fingerprints differ exactly if contents do."""

from __future__ import annotations

import pytest
import torch

from fastppo.data import fingerprint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_every_element_counts_with_its_position(dtype: torch.dtype) -> None:
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


def test_rows_count_with_all_columns_in_order() -> None:
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    assert fingerprint.of_rows(rows) == fingerprint.of_rows(
        [dict(reversed(r.items())) for r in rows]
    )
    assert fingerprint.of_rows(rows) != fingerprint.of_rows(rows[::-1])
    assert fingerprint.of_rows(rows) != fingerprint.of_rows([rows[0], {**rows[1], "answer": 3}])
    # An object without a JSON form counts by its type: its address differs each time.
    assert fingerprint.of_rows([object()]) == fingerprint.of_rows([object()])
