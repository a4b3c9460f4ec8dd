"""How good a reward model is on held-out pairs: accuracy, likelihood, calibration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CALIBRATION_BINS = 10


def accuracy(difference: Tensor) -> float:
    """Share of pairs [P] with s_better − s_worse > 0; equal scores count one half."""
    return ((difference > 0).double() + 0.5 * (difference == 0).double()).mean().item()


def log_loss(difference: Tensor) -> float:
    """Mean of −log P(label), nats; log 2 for a model that knows nothing."""
    return -nn.functional.logsigmoid(difference.double()).mean().item()


def calibration(difference: Tensor, bins: int = CALIBRATION_BINS) -> dict[str, Any]:
    """Whether P(first is better) = σ(s_first − s_second) comes true as often as it says.

    Each pair counts in both orders, (p, outcome 1) and (1 − p, outcome 0), because a row names the
    better text first and every outcome would be 1. The curve is symmetric about (½, ½), and its
    right half says: of the pairs that the model was p sure of, it was right on this share.

    Args:
        difference: [P], s_better − s_worse.
        bins: of equal width over [0, 1].

    Returns:
        dict: `accuracy`; `log_loss`, nats; `brier`, mean (1 − p)²; `calibration_error`, the
        expected one, Σ n_b/N·|mean p − share|; `pairs`; `bins`, each {low, high, count, predicted,
        observed} in that order, without the empty ones.

    Source: Guo et al. 2017 for the expected calibration error.
    """
    p = torch.sigmoid(difference.double())
    both = torch.cat([p, 1 - p])
    outcome = torch.cat([torch.ones_like(p), torch.zeros_like(p)])
    index = (both * bins).long().clamp(max=bins - 1)
    filled = []
    error = 0.0
    for b in range(bins):
        inside = index == b
        if count := int(inside.sum()):
            predicted = both[inside].mean().item()
            observed = outcome[inside].mean().item()
            error += count / len(both) * abs(predicted - observed)
            filled.append(
                {
                    "low": b / bins,
                    "high": (b + 1) / bins,
                    "count": count,
                    "predicted": predicted,
                    "observed": observed,
                }
            )
    return {
        "accuracy": accuracy(difference),
        "log_loss": log_loss(difference),
        "brier": (1 - p).square().mean().item(),
        "calibration_error": error,
        "pairs": len(p),
        "bins": filled,
    }


def write_calibration(directory: str | Path, measured: dict[str, Any]) -> None:
    """calibration.json and calibration.png: predicted against observed shares, and the counts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    directory = Path(directory)
    (directory / "calibration.json").write_text(json.dumps(measured, indent=2) + "\n")
    bins = measured["bins"]
    with plt.rc_context({"font.size": 10}):
        figure, (curve, counts) = plt.subplots(
            2, 1, figsize=(4.5, 5.5), layout="constrained", sharex=True, height_ratios=(3, 1)
        )
        curve.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle="--")
        predicted = [entry["predicted"] for entry in bins]
        observed = [entry["observed"] for entry in bins]
        curve.plot(predicted, observed, "o-", color="#1f5fa8", linewidth=2)
        curve.set_ylabel("observed share")
        curve.set_title(
            f"{measured['pairs']} held-out pairs, accuracy {measured['accuracy']:.1%}, "
            f"calibration error {measured['calibration_error']:.3f}",
            loc="left",
            fontsize=9,
        )
        middle = [(entry["low"] + entry["high"]) / 2 for entry in bins]
        width = [0.9 * (entry["high"] - entry["low"]) for entry in bins]
        counts.bar(middle, [entry["count"] for entry in bins], width, color="#9db8d6")
        counts.set_ylabel("pairs, both orders")
        counts.set_xlabel("predicted P(first is better)")
        for axis in (curve, counts):
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25, linewidth=0.6)
        figure.savefig(directory / "calibration.png", dpi=130)
        plt.close(figure)
