"""How good a reward model is: accuracy, likelihood and calibration on cases made by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fastppo.stages.calibration import accuracy, calibration, log_loss, write_calibration


def _difference(*probabilities: float) -> torch.Tensor:
    """s_better − s_worse of pairs that the model gives these probabilities."""
    return torch.tensor([math.log(p / (1 - p)) for p in probabilities], dtype=torch.float64)


def test_a_model_that_is_right_as_often_as_it_says_is_calibrated() -> None:
    """Sure to 3/4, right three times of four; the mirrored half says the same."""
    found = calibration(_difference(0.75, 0.75, 0.75, 0.25))
    assert found["calibration_error"] == pytest.approx(0, abs=1e-12)
    assert found["accuracy"] == 0.75
    assert found["brier"] == pytest.approx((3 * 0.25**2 + 0.75**2) / 4)
    assert found["log_loss"] == pytest.approx(-(3 * math.log(0.75) + math.log(0.25)) / 4)
    low, high = found["bins"]
    assert (low["low"], low["high"], low["count"]) == (0.2, pytest.approx(0.3), 4)
    assert (high["count"], high["predicted"], high["observed"]) == (4, pytest.approx(0.75), 0.75)
    assert (low["predicted"], low["observed"]) == (pytest.approx(0.25), 0.25)


@pytest.mark.parametrize(
    ("probabilities", "error"),
    [
        ([0.95, 0.05], 0.45),  # sure, and right half the time
        ([0.95] * 4, 0.05),
        ([0.55] * 4, 0.45),  # always right, and does not know it
        ([0.95, 0.95, 0.65, 0.35], (2 * 0.05 + 2 * 0.15) / 4),
    ],
)
def test_the_calibration_error_on_cases_made_by_hand(
    probabilities: list[float], error: float
) -> None:
    found = calibration(_difference(*probabilities))
    assert found["calibration_error"] == pytest.approx(error)
    assert sum(each["count"] for each in found["bins"]) == 2 * len(probabilities)


def test_equal_scores_are_half_right() -> None:
    assert accuracy(torch.tensor([1.0, -1.0, 0.0, 2.0])) == 2.5 / 4


def test_the_log_loss_is_exact_far_from_zero() -> None:
    """σ would be 1 or 0 there in fp32."""
    assert log_loss(torch.tensor([100.0])) == pytest.approx(math.exp(-100), rel=1e-6)
    assert log_loss(torch.tensor([-100.0])) == pytest.approx(100)


def test_what_is_written_is_what_was_found_with_a_picture(tmp_path) -> None:
    found = calibration(_difference(0.75, 0.75, 0.75, 0.25))
    write_calibration(tmp_path, found)
    assert json.loads((tmp_path / "calibration.json").read_text()) == found
    assert (tmp_path / "calibration.png").read_bytes()[:4] == b"\x89PNG"
