"""Four value functions on the demo's task: reward after equal compute, five seeds.

    python docs/study_value_functions.py runs/value-functions

Trains the demo's first two stages per seed, then PPO with each value function for the same time,
counted as processor time of one thread, which is the wall clock on an idle core and does not depend
on what else the machine does. Draws docs/value-functions.png from what was run; a run that is there
already is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from rich.console import Console

from fastppo.demo.run import ppo_config, supervised_stages
from fastppo.ppo.trainer import PPOTrainer
from fastppo.run.log import RunLog, read_jsonl

SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "shared trunk": ({"value_model": "shared"}, "#1f5fa8"),
    "detached trunk": ({"value_model": "detached"}, "#3a8d5d"),
    "branch of 1 layer": ({"value_model": "branch", "value_branch_layers": 1}, "#8a5a9e"),
    "shared, 4 warm-up iterations": (
        {"value_model": "shared", "value_warmup_iterations": 4},
        "#c8553d",
    ),
}


def run(directory: Path, seed: int, seconds: float) -> None:
    console = Console(stderr=True)
    stages = directory / f"seed-{seed}"
    if not (stages / "reward_model" / "config.json").exists():
        supervised_stages(stages, seed=seed, device="cpu", console=console)
    for label, (options, _) in SETTINGS.items():
        output = stages / label.replace(" ", "-").replace(",", "")
        if (output / "times.json").exists():
            continue
        # A rate that does not depend on the number of iterations, which differs by setting.
        shared = {"lr_schedule": "constant", "iterations": 10_000, "seed": seed, "device": "cpu"}
        trainer = PPOTrainer(ppo_config(stages, output, **shared, **options), console=console)
        log, times, start = RunLog(output, trainer.config), [], time.process_time()
        while time.process_time() - start < seconds:
            metrics = trainer.iterate(log)
            times.append(time.process_time() - start)
        log.close()
        (output / "times.json").write_text(json.dumps(times))
        console.print(f"seed {seed}, {label}: {len(times)} iterations, {metrics['reward']:.2f}")


def curves(directory: Path, label: str, metric: str, seconds: np.ndarray) -> np.ndarray:
    """[seeds, points]: the metric at the given seconds, each point a mean of three iterations."""
    found = []
    for run_dir in sorted(directory.glob("seed-*/" + label.replace(" ", "-").replace(",", ""))):
        times = json.loads((run_dir / "times.json").read_text())
        values = [record[metric] for record in read_jsonl(run_dir / "metrics.jsonl")]
        smooth = np.convolve(values, np.ones(3) / 3, mode="valid")
        found.append(np.interp(seconds, times[2:], smooth))
    return np.array(found)


def draw(directory: Path, path: Path, seconds: float) -> None:
    """Mean over the seeds, and the range of them, against compute."""
    plt.rcParams.update({"font.size": 10, "font.family": "sans-serif"})
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.7), layout="constrained")
    x = np.linspace(0.05 * seconds, seconds, 60)
    panels = (
        ("Proxy reward", "reward model's score", "reward"),
        ("Gold reward", "0 to 1", "monitor/gold_reward"),
        ("Explained variance of the values", "1 is perfect", "explained_variance"),
    )
    for axis, (title, unit, metric) in zip(axes, panels, strict=True):
        for label, (_, colour) in SETTINGS.items():
            lines = curves(directory, label, metric, x)
            axis.plot(x, lines.mean(0), color=colour, linewidth=1.8, label=label)
            axis.fill_between(x, lines.min(0), lines.max(0), color=colour, alpha=0.12, linewidth=0)
        axis.set_title(title, loc="left", fontweight="bold", fontsize=11)
        axis.set_xlabel("seconds of PPO, one thread")
        axis.set_ylabel(unit)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
    axes[2].set_yscale("symlog", linthresh=0.5)  # linear around 0, logarithmic far below it
    ticks = (-4, -2, -1, -0.5, 0, 0.5, 1)
    axes[2].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes[2].set_ylim(top=1)
    axes[0].legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(path, dpi=130)


def table(directory: Path, seconds: float) -> None:
    """Reward after a third, two thirds and all of the time: mean ± deviation over the seeds."""
    points = np.array([seconds / 3, 2 * seconds / 3, seconds])
    heads = [f"{metric}, {point:.0f} s" for metric in ("proxy", "gold") for point in points]
    print("| value function | " + " | ".join(heads) + " |")
    print("|---|" + "---|" * len(heads))
    for label in SETTINGS:
        cells = []
        for metric in ("reward", "monitor/gold_reward"):
            lines = curves(directory, label, metric, points)
            spread = lines.std(0, ddof=1) if len(lines) > 1 else np.zeros(len(points))
            cells += [f"{m:.2f} ± {s:.2f}" for m, s in zip(lines.mean(0), spread, strict=True)]
        print(f"| {label} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the runs go")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="of PPO per run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(options.seeds):
        run(options.directory, seed, options.seconds)
    draw(options.directory, Path(__file__).parent / "value-functions.png", options.seconds)
    table(options.directory, options.seconds)
