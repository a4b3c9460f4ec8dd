"""PPO with a critic against REINFORCE, RLOO, GRPO and best of n, on the recipe `arithmetic`.

Trains with each way to make advantages, from the same model per seed, with the same β, learning
rate, batch and epochs, for the same processor time of one thread. Prints the reward after equal
compute and where a run first reached equal KL, best of n of the model at the start, and what the
critics knew.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.common import (
    CONSOLE,
    Records,
    at_seconds,
    best_of,
    cell,
    column,
    figure_of,
    kept,
    limit,
    parser_of,
    print_table,
    recipe_config,
    samples_of_the_base,
    train,
)
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer

NO_CRITIC = {"vf_coef": 0.0, "lam": 0.95, "value_model": "shared"}
"""`lam` as it is by default: without a value function it has no effect and may not be given."""

SETTINGS: dict[str, dict[str, Any]] = {
    "PPO": {"advantage": "gae", "value_model": "shared", "value_head": "gradient"},
    "PPO, detached head": {
        "advantage": "gae",
        "value_model": "detached",
        "value_head": "gradient",
        "value_learning_rate": 1e-3,
    },
    "REINFORCE": NO_CRITIC | {"advantage": "reinforce"},
    "RLOO": NO_CRITIC | {"advantage": "rloo", "samples_per_prompt": 8},
    "GRPO": NO_CRITIC
    | {"advantage": "group", "samples_per_prompt": 8, "whiten_advantages": "none"},
}

MOST_PROMPTS = 100
"""Held-out prompts of which the base is sampled."""

BEST_OF = (2, 4, 8, 16)
SMOOTH = 5
"""Iterations of which a point is the mean."""


def run(directory: Path, recipe: str, seed: int, seconds: float, samples: int) -> dict[str, Any]:
    """The records of each setting, and `base`: rewards of samples of the model at the start."""
    folder = directory / f"seed-{seed}"
    base = recipe_config(recipe, folder, seed)
    # A rate that does not depend on the number of iterations, which differs by setting: the mean of
    # the recipe's.
    common = {
        "iterations": 100_000,
        "eval_interval": 100_000,
        "lr_schedule": "constant",
        "learning_rate": base.learning_rate / (2 if base.lr_schedule == "linear" else 1),
    }
    results: dict[str, Any] = {}
    for label, options in SETTINGS.items():
        output = folder / label
        config = recipe_config(recipe, folder, seed, **common, **options, output_dir=str(output))
        results[label] = kept(output / "records.json", partial(train, config, seconds=seconds))
        results["base"] = kept(folder / "base.json", partial(_base, config, samples))
    return results


def _base(config: PPOConfig, samples: int) -> list[list[float]]:
    trainer = PPOTrainer(config, console=CONSOLE)
    held_out = trainer.evaluation.prompts
    assert held_out is not None
    few = held_out.select(range(min(MOST_PROMPTS, len(held_out))))
    return samples_of_the_base(trainer, few, samples)


def at_kl(kl: np.ndarray, reward: np.ndarray, target: float) -> float:
    """The reward where the KL first reached `target`, on the line between two iterations; NaN if it
    never did."""
    beyond = np.flatnonzero(kl >= target)
    if len(beyond) == 0:
        return float("nan")
    i = int(beyond[0])
    if i == 0:
        return float(reward[0])
    share = (target - kl[i - 1]) / (kl[i] - kl[i - 1])
    return float(reward[i - 1] + share * (reward[i] - reward[i - 1]))


def _reward_at_kl(records: Records, target: float) -> float:
    return at_kl(column(records, "kl", SMOOTH), column(records, "reward", SMOOTH), target)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, seeds=10, seconds=120.0)
    parser.add_argument("--recipe", default="arithmetic")
    parser.add_argument("--kls", type=float, nargs="+", default=[0.1, 0.25, 0.5])
    options = parser.parse_args(arguments)
    seconds = 3.0 if options.quick else options.seconds
    seeds = range(1 if options.quick else options.seeds)
    samples = 16 if options.quick else 64
    runs = [run(options.directory, options.recipe, seed, seconds, samples) for seed in seeds]
    points = [seconds / 3, 2 * seconds / 3, seconds]
    rows = {}
    for label in SETTINGS:
        rows[label] = [
            *(cell(at_seconds(run[label], "reward", p, SMOOTH) for run in runs) for p in points),
            *(cell(_reward_at_kl(run[label], kl) for run in runs) for kl in options.kls),
        ]
    heads = [f"{point:.0f} s" for point in points] + [f"{kl:g} nats" for kl in options.kls]
    print_table(["reward", *heads], rows)
    for n in BEST_OF:
        kl, _ = best_of(runs[0]["base"], n)
        reward = cell(best_of(run["base"], n)[1] for run in runs)
        print(f"\nbest of {n}: {reward} at {kl:.2f} nats or less")
    for label in ("PPO", "PPO, detached head"):
        explained = [column(run[label], "explained_variance") for run in runs]
        share = cell((values[len(values) // 2 :].mean() for values in explained), 2)
        print(f"\n{label}: the critic explains {share} of the returns' variance")
    _draw(runs, seconds, options.directory / "estimators.png")


def _draw(runs: list[dict[str, Any]], seconds: float, path: Path) -> None:
    """Left the reward against compute, mean and deviation of the seeds; right against the KL, each
    seed."""
    share = "reward: share that is right"
    figure, (left, right) = figure_of(
        [
            ("Reward against compute", "seconds, one thread", share),
            ("Reward against the distance", "KL to the start, nats per response", share),
        ]
    )
    x = np.linspace(0, seconds, 80)
    for label in SETTINGS:
        lines = np.array([at_seconds(run[label], "reward", x, SMOOTH) for run in runs])
        mean = lines.mean(0)
        spread = lines.std(0)
        (line,) = left.plot(x, mean, linewidth=1.8, label=label)
        colour = line.get_color()
        left.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.12)
        for records in (run[label] for run in runs):
            curve = [column(records, name, SMOOTH) for name in ("kl", "reward")]
            right.plot(*curve, color=colour, linewidth=0.9, alpha=0.5)
    farthest = right.dataLim.x1
    kls, rewards = limit(np.concatenate([run["base"] for run in runs]))
    near = kls <= farthest
    right.plot(kls[near], rewards[near], color="black", linewidth=1.4, label="the limit")
    for n in BEST_OF:
        kl = best_of(runs[0]["base"], n)[0]
        right.plot(kl, np.mean([best_of(run["base"], n)[1] for run in runs]), "k.")
    right.legend(frameon=False, loc="lower right", fontsize=9)
    left.legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
