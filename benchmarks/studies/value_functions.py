"""Value functions on the demo's task: reward after equal compute.

Trains the demo's first two stages per seed, then PPO with each value function for the same
processor time of one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.common import (
    Records,
    at_seconds,
    cell,
    demo_stages,
    figure_of,
    kept,
    parser_of,
    print_table,
    train,
)
from fastppo.demo.run import ppo_config

SETTINGS: dict[str, dict[str, Any]] = {
    "shared trunk": {"value_model": "shared"},
    "detached trunk": {"value_model": "detached"},
    "shared, 4 warm-up iterations": {"value_model": "shared", "value_warmup_iterations": 4},
    "critic": {"value_model": "critic"},
}

SMOOTH = 3

PANELS = {
    "reward": ("Proxy reward", "seconds of PPO, one thread", "reward model's score"),
    "monitor/gold_reward": ("Gold reward", "seconds of PPO, one thread", "0 to 1"),
    "explained_variance": ("Explained variance", "seconds of PPO, one thread", "1 is perfect"),
}


def run(directory: Path, seed: int, seconds: float) -> dict[str, Records]:
    stages = demo_stages(directory, seed)
    records = {}
    for label, options in SETTINGS.items():
        output = stages / label.replace(" ", "-").replace(",", "")
        # A rate that does not depend on the number of iterations, which differs by setting.
        config = ppo_config(
            stages,
            output,
            lr_schedule="constant",
            iterations=10_000,
            seed=seed,
            device="cpu",
            **options,
        )
        records[label] = kept(output / "records.json", partial(train, config, seconds=seconds))
    return records


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser_of(__doc__, seeds=5, seconds=30.0).parse_args(arguments)
    seconds = 2.0 if options.quick else options.seconds
    seeds = range(1 if options.quick else options.seeds)
    runs = [run(options.directory, seed, seconds) for seed in seeds]
    points = [seconds / 3, 2 * seconds / 3, seconds]
    rows = {}
    for label in SETTINGS:
        rows[label] = [
            cell((at_seconds(run[label], metric, point, SMOOTH) for run in runs), 2)
            for metric in ("reward", "monitor/gold_reward")
            for point in points
        ]
    heads = [f"{metric}, {point:.0f} s" for metric in ("proxy", "gold") for point in points]
    print_table(["value function", *heads], rows)
    figure, axes = figure_of(list(PANELS.values()))
    x = np.linspace(0.05 * seconds, seconds, 60)
    for axis, metric in zip(axes, PANELS, strict=True):
        for label in SETTINGS:
            lines = np.array([at_seconds(run[label], metric, x, SMOOTH) for run in runs])
            (line,) = axis.plot(x, lines.mean(0), linewidth=1.8, label=label)
            axis.fill_between(x, lines.min(0), lines.max(0), color=line.get_color(), alpha=0.12)
    axes[2].set_yscale("symlog", linthresh=0.5)  # linear around 0, logarithmic far below it
    axes[0].legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(options.directory / "value-functions.png", dpi=130)


if __name__ == "__main__":
    main()
