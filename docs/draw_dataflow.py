"""Draws docs/dataflow.svg: what flows through one PPO iteration, with shapes on the arrows.

python docs/draw_dataflow.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

INK, QUIET = "#1b2430", "#5b6673"
STEP, SHARED, FROZEN = "#dbe7f6", "#f6e3c5", "#e9ebee"


def box(
    axes: Axes, x: float, y: float, width: float, height: float, title: str, text: str, fill: str
) -> None:
    """A box with its centre at (x, y)."""
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=fill,
            edgecolor=INK,
            linewidth=1.0,
        )
    )
    lines = text.count("\n") + 1 if text else 0
    top = y + 0.115 * lines
    axes.text(x, top, title, ha="center", va="center", fontsize=10.5, color=INK, weight="bold")
    if text:
        axes.text(
            x, top - 0.2, text, ha="center", va="top", fontsize=8.2, color=INK, linespacing=1.35
        )


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    label: str = "",
    at: tuple[float, float] | None = None,
    *,
    dashed: bool = False,
) -> None:
    axes.annotate(
        "",
        xy=end,
        xytext=start,
        arrowprops={
            "arrowstyle": "-|>",
            "color": INK,
            "linewidth": 1.1,
            "linestyle": (0, (4, 2)) if dashed else "-",
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )
    if label:
        x, y = at or ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.14)
        axes.text(x, y, label, ha="center", va="center", fontsize=7.8, color=QUIET, linespacing=1.3)


def draw(path: Path) -> None:
    figure, axes = plt.subplots(figsize=(11.4, 4.1))
    axes.set_xlim(0.1, 12.4)
    axes.set_ylim(0.35, 4.45)
    axes.axis("off")

    top, bottom_of_top, top_of_trunk = 3.75, 3.3, 1.75
    box(axes, 0.9, top, 1.3, 0.9, "prompts", "text or chat", STEP)
    box(axes, 3.2, top, 1.5, 0.9, "rollout", "draw responses", STEP)
    box(axes, 5.6, top, 1.5, 0.9, "scores", "functions or\nreward models", STEP)
    box(axes, 8.2, top, 1.8, 0.9, "experience", "KL, GAE, whitening:\none kernel", STEP)
    box(axes, 11.1, top, 1.9, 0.9, "update", "epochs, minibatches,\nmicrobatches", STEP)
    for left, right, label in (
        (1.55, 2.45, "token ids\nof B"),
        (3.95, 4.85, "texts\nof B"),
        (6.35, 7.3, "rewards\n[B], [N]"),
        (9.1, 10.15, "advantages,\nreturns\n[N]"),
    ):
        arrow(axes, (left, top), (right, top), label, ((left + right) / 2, top + 0.28))

    box(
        axes,
        7.15,
        1.2,
        9.8,
        1.1,
        "one trunk, one forward pass, two heads",
        "lm-head: logprobs, entropy, KL and the loss with its gradient, a chunk of the logits at a "
        "time\nvalue head: one linear layer in fp32",
        SHARED,
    )
    box(axes, 5.6, 2.52, 1.5, 0.72, "reference", "a frozen policy", FROZEN)

    arrow(axes, (3.2, top_of_trunk), (3.2, bottom_of_top), "next token,\nlogprob", (2.66, 2.5))
    arrow(axes, (6.35, 2.6), (7.6, bottom_of_top), "reference\nlogprobs [N]", (7.45, 2.78))
    arrow(
        axes,
        (8.2, top_of_trunk),
        (8.2, bottom_of_top),
        "old logprobs [N]\nvalues [N]",
        (8.92, 2.5),
    )
    arrow(axes, (10.75, top_of_trunk), (10.75, bottom_of_top), "hidden\n[N, H]", (10.42, 2.5))
    arrow(
        axes,
        (11.45, bottom_of_top),
        (11.45, top_of_trunk),
        "gradients,\nAdamW",
        (11.92, 2.5),
        dashed=True,
    )
    axes.text(
        0.15,
        0.7,
        "B sequences,\nN response tokens,\nH the trunk's width.\nThe heads see no\n"
        "prompt and no padding;\nno [N, V] is held.",
        fontsize=7.8,
        color=QUIET,
        va="bottom",
        linespacing=1.35,
    )
    figure.savefig(path, bbox_inches="tight", pad_inches=0.05, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    here = Path(__file__).parent
    with plt.rc_context({"svg.fonttype": "path", "svg.hashsalt": "fastppo"}):
        draw(here / "dataflow.svg")
