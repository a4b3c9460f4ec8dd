"""How good a reward model is on held-out pairs: accuracy, likelihood, calibration."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CALIBRATION_BINS = 10


def accuracy(difference: Tensor) -> float:
    """Share of pairs [P] with s_better − s_worse > 0; equal scores count one half."""
    return ((difference > 0).double() + 0.5 * (difference == 0).double()).mean().item()


def log_loss(difference: Tensor) -> float:
    """Mean of −log P(label), nats; log 2 for a model that knows nothing."""
    return -nn.functional.logsigmoid(difference.double()).mean().item()


def calibration_error(difference: Tensor) -> float:
    """Whether P(first is better) = σ(s_first − s_second) comes true as often as it says: the
    expected error Σ n_b/N·|mean P − share that came true|, over bins of equal width in [0, 1].

    Each pair [P] counts in both orders, because a row names the better text first and every outcome
    would be 1.

    Source: Guo et al. 2017.
    """
    p = torch.sigmoid(difference.double())
    predicted = torch.cat([p, 1 - p])
    outcome = torch.cat([torch.ones_like(p), torch.zeros_like(p)])
    index = (predicted * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    sums = torch.zeros(CALIBRATION_BINS, dtype=torch.float64, device=p.device)
    sums.index_add_(0, index, predicted - outcome)
    return sums.abs().sum().item() / len(predicted)
