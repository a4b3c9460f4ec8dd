"""Is a critic worth its cost? PPO against REINFORCE, RLOO and GRPO at equal CPU time.

    python -m benchmarks.studies.critic runs/critic
    python -m benchmarks.studies.critic runs/key-and-door --task key-and-door
    python -m benchmarks.studies.critic runs/sentiment --task smollm2-sentiment

`demo` is the PPO stage of the demo. The value head is the closed-form one, the same with a value
loss on the trunk, or one that is trained by AdamW. The gold reward is compared, which is never
trained on. A seed counts as lost if the policy exploits the reward model and moves far from the
base. `key-and-door` has one reward, after eight turns. `smollm2-sentiment` is the recipe in bf16.

All settings of a seed start from the same weights, with the same constant learning rate, batch size
and epochs, and train one after another on one thread. The study prints the metrics at equal compute
and at equal iterations, the critic's lead paired by seed, and the critic's own metrics. Finished
runs are not repeated.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.common import (
    CONSOLE,
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
from benchmarks.studies.key_and_door import key_and_door
from fastppo.demo.run import ppo_config
from fastppo.ppo.options.config import PPOConfig
from fastppo.recipes.catalogue import find
from fastppo.recipes.run import prepare, write_files
from fastppo.run.options import read_yaml

HOLE = 10.0
"""KL in nats per response beyond which a seed may be lost. Policies with a good gold reward stay
closer to the base.
"""

CRITIC_METRICS = {
    "explained_variance": "explained share of the returns' variance",
    "advantage_correlation": "correlation of the advantages with and without it",
}
KEPT = ("processor_seconds", "reward", "monitor/gold_reward", "kl", *CRITIC_METRICS)
"""Metrics of an iteration to save."""

CLOSED_FORM = {"value_model": "shared", "value_head": "auto", "value_learning_rate": None}
BY_ADAMW = {"value_model": "shared", "value_head": "gradient", "value_learning_rate": 1e-3}

NO_CRITIC = {
    "value_model": "shared",
    "value_head": "auto",
    "value_learning_rate": None,
    "lam": 0.95,
}
"""The value function's options at their defaults, since they have no effect here."""


def without_critic(samples_per_prompt: int) -> dict[str, dict[str, Any]]:
    """Return the settings without a critic. RLOO and GRPO compare samples of one prompt."""
    grouped = NO_CRITIC | {"samples_per_prompt": samples_per_prompt}
    return {
        "REINFORCE": NO_CRITIC | {"advantage": "reinforce"},
        "RLOO": grouped | {"advantage": "rloo"},
        "GRPO": grouped | {"advantage": "group"},
    }


# --------------------------------------------------------------------------------------- the tasks


def demo(directory: Path, seed: int, output_dir: Path, **options: Any) -> PPOConfig:
    stages = demo_stages(directory, seed)
    return ppo_config(stages, output_dir, seed=seed, device="cpu", **options)


def sentiment(directory: Path, seed: int, output_dir: Path, **options: Any) -> PPOConfig:
    """Return the recipe's config, from an existing run.yaml if there is one.

    All seeds share the model.
    """
    recipe = find("smollm2-sentiment")
    folder = directory / "recipe"
    changes: dict[str, Any] = {
        "precision": "bf16",
        "param_dtype": "bfloat16",
        "eval_interval": 100_000,
        "seed": seed,
        "device": "cpu",
        "output_dir": str(output_dir),
    }
    config = read_yaml(write_files(recipe, folder), PPOConfig) | changes | options
    PPOConfig(**config)  # fails before the preparation
    prepare(recipe, folder, 0, CONSOLE)
    return PPOConfig(**config)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Task of the study."""

    config: Callable[..., PPOConfig]
    """Function of the study's directory, the seed, the run's directory and further options."""
    critics: dict[str, dict[str, Any]]
    """Settings with a critic. All settings are compared with the first of them."""
    samples_per_prompt: int
    """Number of samples per prompt for RLOO and GRPO."""
    metrics: dict[str, int]
    """Metrics to print, with their digits. The first one is compared."""
    seconds: float
    seeds: range
    smooth: int = 5
    """Number of iterations in a running mean."""

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        return self.critics | without_critic(self.samples_per_prompt)


TASKS = {
    "demo": Task(
        config=demo,
        critics={
            "critic, closed form": CLOSED_FORM,
            "critic, closed form, vf_coef 0.5": CLOSED_FORM | {"vf_coef": 0.5},
            "critic, AdamW": BY_ADAMW,
        },
        samples_per_prompt=8,
        metrics={"monitor/gold_reward": 3, "reward": 2, "kl": 1},
        seconds=30,
        # Not used to develop the method.
        seeds=range(301, 311),
        smooth=3,
    ),
    "key-and-door": Task(
        config=key_and_door,
        critics={"PPO": CLOSED_FORM, "PPO, vf_coef 0.5": CLOSED_FORM | {"vf_coef": 0.5}},
        samples_per_prompt=8,
        metrics={"reward": 3},
        seconds=40,
        seeds=range(5),
    ),
    "smollm2-sentiment": Task(
        config=sentiment,
        critics={"PPO": CLOSED_FORM},
        # An iteration has 32 responses; eight per prompt would leave four prompts.
        samples_per_prompt=4,
        metrics={"reward": 3, "kl": 2},
        seconds=120,
        seeds=range(5),
    ),
}


# --------------------------------------------------------------------------------------- the study


def config_of(directory: Path, task: Task, label: str, seed: int) -> PPOConfig:
    """Return the config of a setting and seed.

    The learning rate is constant, since the number of iterations differs by setting.
    """
    return task.config(
        directory,
        seed,
        directory / f"seed-{seed}" / label,
        iterations=100_000,
        lr_schedule="constant",
        **task.settings[label],
    )


def trained(config: PPOConfig, seconds: float) -> Records:
    """Train and return the saved metrics to five digits."""
    train(config, iterations=1)  # compiles the kernels before the clock starts
    return [
        {name: float(f"{record[name]:.5g}") for name in KEPT if name in record}
        for record in train(config, seconds=seconds)
    ]


def run(directory: Path, task: Task, label: str, seed: int, seconds: float) -> Records:
    """Return the records of a setting and seed."""
    config = config_of(directory, task, label, seed)
    return kept(Path(config.output_dir) / "records.json", partial(trained, config, seconds))


def paired(differences: Iterable[float]) -> str:
    """Format mean ± standard error of differences paired by seed."""
    values = np.array(list(differences))
    if len(values) == 1:
        return f"{values[0]:+.3f}"
    return f"{values.mean():+.3f} ± {values.std(ddof=1) / len(values) ** 0.5:.3f}"


def median(records: Sequence[dict[str, Any]], name: str) -> float:
    """Return the median of a metric's finite values, or NaN.

    A batch with equal returns would distort a mean.
    """
    values = [record[name] for record in records if math.isfinite(record.get(name, math.nan))]
    return statistics.median(values) if values else math.nan


def print_tables(task: Task, runs: dict[str, list[Records]], seconds: float) -> None:
    points = [seconds / 3, 2 * seconds / 3, seconds]
    fewest = min(len(records) for of_seeds in runs.values() for records in of_seeds)
    thirds = [part for part in np.array_split(np.arange(fewest), 3) if len(part)]
    ends = [int(part[-1]) for part in thirds]
    compared, *others = task.metrics
    by_seed = {
        label: np.array(
            [
                [
                    *at_seconds(records, compared, points, task.smooth),
                    *column(records, compared, task.smooth)[ends],
                ]
                for records in of_seeds
            ]
        )
        for label, of_seeds in runs.items()
    }
    heads = [f"{point:.0f} s" for point in points] + [f"iteration {end + 1}" for end in ends]
    more = [f"{name}, {seconds:.0f} s" for name in others]
    rows = {}
    for label, of_seeds in runs.items():
        rows[label] = [cell(values, task.metrics[compared]) for values in by_seed[label].T]
        for name in others:
            at_the_end = (column(records, name, task.smooth)[-1] for records in of_seeds)
            rows[label].append(cell(at_the_end, task.metrics[name]))
        if "kl" in others:
            lost = sum(column(records, "kl", task.smooth)[-1] > HOLE for records in of_seeds)
            rows[label].append(str(lost))
        rows[label].append(cell((float(len(records)) for records in of_seeds), 0))
    if "kl" in others:
        more.append("seeds lost")
    print_table([compared, *heads, *more, "iterations"], rows)
    first = next(iter(runs))
    print()
    rows = {
        label: [paired(values) for values in (by_seed[first] - by_seed[label]).T]
        for label in runs
        if label != first
    }
    print_table([f"{first}, ahead of", *heads], rows)
    print()
    rows = {}
    for label in task.critics:
        for name, title in CRITIC_METRICS.items():
            rows[f"{label}: {title}"] = [
                cell((median([records[i] for i in part], name) for records in runs[label]), 2)
                for part in thirds
            ]
    spans = [f"iterations {part[0] + 1} to {part[-1] + 1}" for part in thirds]
    print_table(["the critic", *spans], rows)


def draw(task: Task, runs: dict[str, list[Records]], seconds: float, path: Path) -> None:
    """Draw mean and standard error over seeds: the printed metrics and explained variance."""
    explained = "explained_variance"
    panels = [(name, "seconds, one thread", name) for name in task.metrics]
    figure = figure_of([*panels, ("explained variance", "iteration", explained)])
    for axis, name in zip(figure.axes, [*task.metrics, explained], strict=True):
        for label in task.critics if name == explained else runs:
            records = runs[label]
            if name == explained:
                fewest = min(map(len, records))
                x = np.arange(fewest, dtype=float)
                lines = np.array([column(each, name, task.smooth)[:fewest] for each in records])
            else:
                x = np.linspace(0.05 * seconds, seconds, 60)
                lines = np.array([at_seconds(each, name, x, task.smooth) for each in records])
            (line,) = axis.plot(x, lines.mean(0), linewidth=1.8, label=label)
            error = lines.std(0) / len(lines) ** 0.5
            low = lines.mean(0) - error
            axis.fill_between(x, low, low + 2 * error, color=line.get_color(), alpha=0.15)
    figure.axes[0].legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, seeds=0, seconds=0.0)
    parser.add_argument("--task", choices=TASKS, default="demo")
    options = parser.parse_args(arguments)
    task = TASKS[options.task]
    seconds = 3.0 if options.quick else options.seconds or task.seconds
    seeds = task.seeds[:1] if options.quick else task.seeds[: options.seeds or None]
    runs: dict[str, list[Records]] = {label: [] for label in task.settings}
    for seed in seeds:
        for label in task.settings:
            runs[label].append(run(options.directory, task, label, seed, seconds))
    print_tables(task, runs, seconds)
    draw(task, runs, seconds, options.directory / "critic.png")


if __name__ == "__main__":
    main()
