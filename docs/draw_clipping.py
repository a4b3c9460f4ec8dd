"""Draws docs/clipping.svg, the clipped objective and its gradient: python docs/draw_clipping.py

Both come from `fastppo.policy_loss` and autograd, point by point: nothing of the formula is written
here a second time.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import fastppo

CLIP_RATIO = 0.2
CASES = {
    (1.0, "above"): "ratio above 1 + ε:\nlikely enough, gradient 0",
    (1.0, "below"): "ratio below 1 − ε:\npulled back up",
    (-1.0, "above"): "ratio above 1 + ε:\npushed back down",
    (-1.0, "below"): "ratio below 1 − ε:\nunlikely enough, gradient 0",
}
"""The four cases, by the advantage's sign and the side on which the ratio has left the range."""


def objective(ratio: Tensor, advantage: float) -> tuple[Tensor, Tensor]:
    """(objective of a token, its derivative by the token's logprob), at each ratio."""
    logprobs = ratio.log().requires_grad_()
    zeros, advantages = torch.zeros_like(ratio), torch.full_like(ratio, advantage)
    value = -torch.stack(
        [
            fastppo.policy_loss(*token, clip_ratio=CLIP_RATIO)
            for token in zip(logprobs.split(1), zeros.split(1), advantages.split(1), strict=True)
        ]
    )
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    return value.detach(), gradient


def draw(path: Path) -> None:
    ratio = torch.linspace(0.4, 1.6, 241, dtype=torch.float64)
    low, high = 1 - CLIP_RATIO, 1 + CLIP_RATIO
    plt.rcParams.update({"font.size": 10, "font.family": "sans-serif", "svg.hashsalt": "fastppo"})
    figure, axes = plt.subplots(
        2, 2, figsize=(9.5, 5.6), layout="constrained", sharex=True, height_ratios=(3, 2)
    )
    for (top, bottom), advantage in zip(axes.T, (1.0, -1.0), strict=True):
        value, gradient = objective(ratio, advantage)
        colour = "#1f5fa8" if advantage > 0 else "#c8553d"
        top.plot(ratio, advantage * ratio, color="#999999", linestyle="--", linewidth=1.2)
        top.plot(ratio, value, color=colour, linewidth=2.4)
        bottom.plot(ratio, gradient, color=colour, linewidth=2.4)
        for axis in (top, bottom):
            axis.axvspan(low, high, color="#000000", alpha=0.05, linewidth=0)
            axis.axvline(1, color="#999999", linewidth=0.8)
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25, linewidth=0.6)
        sign = ">" if advantage > 0 else "<"
        better = "better than expected" if advantage > 0 else "worse than expected"
        top.set_title(f"A {sign} 0: {better}", loc="left", fontweight="bold", fontsize=11)
        top.set_ylabel("objective of a token")
        bottom.set_ylabel("its gradient\nby the logprob")
        bottom.set_xlabel("ratio π/π_old")
        bottom.set_xticks([0.4, low, 1, high, 1.6], ["0.4", "1 − ε", "1", "1 + ε", "1.6"])
        for side, x in (("below", 0.42), ("above", 1.58)):
            top.text(
                x,
                0.03 if (side == "above") == (advantage > 0) else 0.97,
                CASES[advantage, side],
                transform=top.get_xaxis_transform(),
                ha="left" if side == "below" else "right",
                va="bottom" if (side == "above") == (advantage > 0) else "top",
                fontsize=8.5,
            )
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).parent / "clipping.svg")
