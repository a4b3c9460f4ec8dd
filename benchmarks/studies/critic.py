"""Does the critic pay? PPO with the value head in closed form, or by AdamW, beside PPO without one.

The demo's first two stages per seed, then its PPO stage with each setting for the same processor
time of one thread, at the same learning rate, batch, epochs and β. A run that was stopped goes on
with the next setting of its seed. Gold is what nobody trains on; a seed is lost where the policy
ended in the reward model's hole, far from the base.
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
    column,
    demo_stages,
    figure_of,
    kept,
    parser_of,
    print_table,
    train,
)
from fastppo.demo.run import ppo_config

CLOSED_FORM = "critic, closed form"

GROUPS = {"vf_coef": 0.0, "samples_per_prompt": 8}

SETTINGS: dict[str, dict[str, Any]] = {
    CLOSED_FORM: {},
    "critic, AdamW": {"value_head": "gradient", "value_learning_rate": 1e-3},
    "REINFORCE": {"advantage": "reinforce", "vf_coef": 0.0},
    "RLOO": GROUPS | {"advantage": "rloo"},
    "GRPO": GROUPS | {"advantage": "group", "whiten_advantages": "none"},
}

FIRST_SEED = 301
"""Seeds above those that the method was made on."""

KEPT = ("processor_seconds", "monitor/gold_reward", "reward", "kl", "explained_variance")
"""What is kept of an iteration."""

SMOOTH = 3
"""Iterations of which a point is the mean."""

HOLE = 10.0
"""Nats per response: no policy that earns gold is this far from the base."""

EXPLAINED = ((5, 10), (10, 15), (20, 25), (30, 35))
"""Iterations over which explained variance is averaged, from the first up to before the second."""

PANELS = {
    "monitor/gold_reward": ("Gold reward", "seconds of PPO, one thread", "0 to 1"),
    "reward": ("Proxy reward", "seconds of PPO, one thread", "reward model's score"),
    "explained_variance": ("Explained variance", "iteration", "of Monte Carlo returns"),
}


def run(directory: Path, seed: int, seconds: float) -> dict[str, Records]:
    """The records of each setting."""
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
        records[label] = kept(output / "records.json", partial(trained, config, seconds))
    return records


def trained(config: Any, seconds: float) -> Records:
    """What is kept of a run, to five digits."""
    return [
        {name: float(f"{record[name]:.5g}") for name in KEPT}
        for record in train(config, seconds=seconds)
    ]


def warm_up(directory: Path) -> None:
    """Two iterations of a critic and two of groups: loops are compiled before the clock starts."""
    stages = demo_stages(directory, FIRST_SEED)
    for label in (CLOSED_FORM, "RLOO"):
        config = ppo_config(stages, stages / "warm-up", device="cpu", **SETTINGS[label])
        train(config, iterations=2)


def mean_and_error(differences: Sequence[float]) -> str:
    """Mean ± standard error of what is paired by seed."""
    values = np.array(differences)
    if len(values) < 2:
        return f"{values.mean():+.3f}"
    return f"{values.mean():+.3f} ± {values.std(ddof=1) / len(values) ** 0.5:.3f}"


def tables(runs: Sequence[dict[str, Records]], points: Sequence[float]) -> None:
    """Prints what each setting has after so many seconds, what the critic explains, and what it is
    ahead by."""
    rows = {}
    for label in SETTINGS:
        row = []
        for metric, digits in (("monitor/gold_reward", 3), ("reward", 2), ("kl", 1)):
            row += [
                cell((at_seconds(run[label], metric, point, SMOOTH) for run in runs), digits)
                for point in points
            ]
        kls = [column(run[label], "kl", SMOOTH)[-1] for run in runs]
        lengths = (float(len(run[label])) for run in runs)
        rows[label] = [*row, str(sum(kl > HOLE for kl in kls)), cell(lengths, 0)]
    names = [f"{name}, {point:g} s" for name in ("gold", "proxy", "KL") for point in points]
    print_table(["", *names, "seeds lost", "iterations"], rows)
    print()
    rows = {}
    for label in list(SETTINGS)[:2]:
        rows[label] = []
        for begin, end in EXPLAINED:
            means = (
                np.mean(column(run[label], "explained_variance")[begin:end])
                for run in runs
                if len(run[label]) >= end
            )
            rows[label].append(cell(means, 2))
    spans = [f"iterations {begin} to {end - 1}" for begin, end in EXPLAINED]
    print_table(["explained variance", *spans], rows)
    print()
    rows = {}
    for label in list(SETTINGS)[1:]:
        rows[label] = []
        for point in points:
            metric = "monitor/gold_reward"
            ahead = [
                at_seconds(run[CLOSED_FORM], metric, point, SMOOTH)
                - at_seconds(run[label], metric, point, SMOOTH)
                for run in runs
            ]
            rows[label].append(mean_and_error(ahead))
    print_table(["gold ahead of", *(f"{point:g} s" for point in points)], rows)


def draw(runs: Sequence[dict[str, Records]], seconds: float, path: Path) -> None:
    figure, axes = figure_of(list(PANELS.values()))
    for axis, metric in zip(axes, PANELS, strict=True):
        for label in SETTINGS:
            records = [run[label] for run in runs]
            if metric == "explained_variance":
                if label not in list(SETTINGS)[:2]:
                    continue
                shortest = min(map(len, records))
                x = np.arange(shortest, dtype=float)
                lines = np.array([column(each, metric, SMOOTH)[:shortest] for each in records])
            else:
                x = np.linspace(0.05 * seconds, seconds, 60)
                lines = np.array([at_seconds(each, metric, x, SMOOTH) for each in records])
            (line,) = axis.plot(x, lines.mean(0), linewidth=1.8, label=label)
            error = lines.std(0) / len(lines) ** 0.5
            low = lines.mean(0) - error
            axis.fill_between(x, low, low + 2 * error, color=line.get_color(), alpha=0.15)
    axes[0].legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser_of(__doc__, seeds=10, seconds=30.0).parse_args(arguments)
    seconds = 2.0 if options.quick else options.seconds
    seeds = range(FIRST_SEED, FIRST_SEED + (1 if options.quick else options.seeds))
    warm_up(options.directory)
    runs = [run(options.directory, seed, seconds) for seed in seeds]
    kept(options.directory / f"critic-{len(runs)}-seeds.json", lambda: runs)
    tables(runs, [seconds / 3, 2 * seconds / 3, seconds])
    draw(runs, seconds, options.directory / "critic.png")


if __name__ == "__main__":
    main()
