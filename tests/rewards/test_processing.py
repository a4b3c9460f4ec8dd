"""Scores before they become rewards: scales in closed form, and a running scale that goes on."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from fastppo.rewards.processing import MIN_DEVIATION, RunningScale


def _batches(sizes=(5, 1, 16, 3), offset: float = 0.0) -> list[torch.Tensor]:
    return [offset + 3 * torch.randn(size) for size in sizes]


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_the_running_scale_is_the_deviation_of_all_scores_so_far(offset: float) -> None:
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


def test_a_restored_scale_goes_on_to_the_same_bits() -> None:
    batches = _batches()
    uninterrupted = RunningScale()
    interrupted = RunningScale()
    straight = [uninterrupted(batch) for batch in batches]
    before = [interrupted(batch) for batch in batches[:2]]
    restored = RunningScale(**json.loads(json.dumps(asdict(interrupted))))
    after = [restored(batch) for batch in batches[2:]]
    assert torch.equal(torch.cat(straight), torch.cat(before + after))
    assert asdict(restored) == asdict(uninterrupted)


def test_scores_that_never_varied_are_left_alone() -> None:
    scale = RunningScale()
    for batch in (torch.full((3,), 0.1), torch.full((5,), 0.1)):
        assert torch.equal(scale(batch), batch)
    assert RunningScale(2, 0.0, 2 * (0.99 * MIN_DEVIATION) ** 2).deviation == 1.0
    assert RunningScale(2, 0.0, 2 * MIN_DEVIATION**2 * 1.01).deviation < 2 * MIN_DEVIATION
    assert RunningScale().deviation == 1.0


def test_a_score_that_is_not_finite_does_not_reach_the_state() -> None:
    scale = RunningScale()
    with pytest.raises(ValueError, match=r"scores must be finite, got \[1.0, nan\]"):
        scale(torch.tensor([1.0, float("nan")]))
    assert scale == RunningScale()
