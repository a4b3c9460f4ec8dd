"""Running normalization of scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastppo.rewards.processing import RunningScale


def _batches(sizes=(5, 1, 16, 3), offset: float = 0.0) -> list[torch.Tensor]:
    return [offset + 3 * torch.randn(size) for size in sizes]


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_the_running_scale_is_the_standard_deviation_so_far(offset: float) -> None:
    """Against NumPy on everything seen, the current batch included; also far from zero, where a
    sum of squares would lose the deviation's digits."""
    scale = RunningScale()
    seen = np.empty(0)
    for batch in _batches(offset=offset):
        seen = np.concatenate([seen, batch.double().numpy()])
        scaled = scale(batch)
        expected = batch.double().numpy() / seen.std()
        # fp32 results: half a unit in the last place, 2⁻²⁴, of the quotient.
        np.testing.assert_allclose(scaled.double(), expected, rtol=2**-23)
        assert scaled.dtype == torch.float32
    assert scale.count == len(seen)
    assert scale.mean == pytest.approx(seen.mean(), rel=1e-12)
    assert scale.deviation == pytest.approx(seen.std(), rel=1e-12)
