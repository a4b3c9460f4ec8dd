"""Draws docs/demo.png from a run of `fastppo demo`: python docs/draw_demo.py runs/demo"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from fastppo.run.log import read_jsonl


def draw(run: Path) -> None:
    """Three panels side by side, of one run."""
    records = read_jsonl(run / "ppo" / "metrics.jsonl")
    panels = (
        ("Proxy reward", "reward model's score", "reward", "#1f5fa8"),
        ("Gold reward", "0 to 1, never trained on", "monitor/gold_reward", "#3a8d5d"),
        ("KL to the SFT model", "nats per response", "kl", "#c8553d"),
    )
    plt.rcParams.update({"font.size": 10, "font.family": "sans-serif"})
    figure, axes = plt.subplots(1, 3, figsize=(11, 2.9), layout="constrained")
    for axis, (title, unit, name, colour) in zip(axes, panels, strict=True):
        x = [record["iteration"] for record in records]
        axis.plot(x, [record[name] for record in records], color=colour, linewidth=2)
        axis.set_title(title, loc="left", fontweight="bold", fontsize=11)
        axis.set_ylabel(unit)
        axis.set_xlabel("PPO iteration")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
    axes[1].set_ylim(0, 1)
    figure.savefig(Path(__file__).parent / "demo.png", dpi=130)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
