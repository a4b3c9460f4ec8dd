"""How good a reward model is: accuracy, likelihood and calibration on cases made by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fastppo.stages.calibration import accuracy, calibration_error, log_loss


@pytest.mark.parametrize(
    ("probabilities", "error"),
    [
        ([0.75, 0.75, 0.75, 0.25], 0.0),  # sure to 3/4, right three times of four
        ([0.95, 0.05], 0.45),  # sure, and right half the time
        ([0.95] * 4, 0.05),
        ([0.55] * 4, 0.45),  # always right, and does not know it
        ([0.95, 0.95, 0.65, 0.35], (2 * 0.05 + 2 * 0.15) / 4),
    ],
)
def test_the_calibration_error_on_cases_made_by_hand(
    probabilities: list[float], error: float
) -> None:
    logits = [math.log(p / (1 - p)) for p in probabilities]
    difference = torch.tensor(logits, dtype=torch.float64)
    assert calibration_error(difference) == pytest.approx(error, abs=1e-12)


def test_equal_scores_are_half_right() -> None:
    assert accuracy(torch.tensor([1.0, -1.0, 0.0, 2.0])) == 2.5 / 4


def test_the_log_loss_is_exact_far_from_zero() -> None:
    """σ would be 1 or 0 there in fp32."""
    assert log_loss(torch.tensor([100.0])) == pytest.approx(math.exp(-100), rel=1e-6)
    assert log_loss(torch.tensor([-100.0])) == pytest.approx(100)
    assert log_loss(torch.tensor([0.0])) == pytest.approx(math.log(2))
