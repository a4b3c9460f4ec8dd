"""Reward against KL, gold against proxy, and the limit that the base sets.

Trains a recipe with several β and seeds. Every few iterations the policy answers the held-out
prompts, several times each. Beside the curves stand what samples of the base say of the same
prompts: the most that any policy earns at a KL, and best of n.
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
    share_of_gain,
)
from benchmarks.training import iterate
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer

BEST_OF = (2, 4, 8, 16)
SAMPLES = 8
"""Responses to each held-out prompt in an evaluation."""

KEYS = ("reward", "kl")
SHOWN = 3
"""Prompts whose responses are printed for each β."""


def train_and_evaluate(config: PPOConfig, interval: int) -> Records:
    """An evaluation every `interval` iterations; the last one has `completions`, too."""
    trainer = PPOTrainer(config, console=CONSOLE)
    held_out = trainer.evaluation.prompts
    assert held_out is not None
    rows = [row for row in range(len(held_out)) for _ in range(SAMPLES)]
    records: Records = []
    for iteration in range(1, config.iterations + 1):
        iterate(trainer)
        if iteration % interval == 0:
            evaluation = trainer.evaluate(held_out.select(rows))
            gold = [name for name in evaluation if name.startswith("monitor/")]
            record: dict[str, Any] = {name: evaluation[name] for name in KEYS}
            # The first reward that is monitored, or the proxy itself where there is none.
            record["gold"] = evaluation[(gold or ["reward"])[0]]
            step = max(1, len(held_out) // SHOWN) * SAMPLES
            record["completions"] = evaluation["completions"][::step][:SHOWN]
            records.append(record)
    CONSOLE.print(f"{config.output_dir}: reward {records[-1]['reward']:.3f}")
    return records


def _base(config: PPOConfig, samples: int) -> list[list[float]]:
    trainer = PPOTrainer(config, console=CONSOLE)
    assert trainer.evaluation.prompts is not None
    return samples_of_the_base(trainer, trainer.evaluation.prompts, samples)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, seeds=3, iterations=30, interval=5)
    parser.add_argument("--recipe", default="smollm2-sentiment")
    parser.add_argument("--betas", type=float, nargs="+", default=[0.0, 0.02, 0.05, 0.1])
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds = 1
        options.iterations = 6
        options.interval = 2
        options.betas = [0.0, 0.05]
    if options.iterations < options.interval:
        parser.error(f"--iterations must be >= {options.interval}, the evaluations' interval")
    base_folder = options.directory / "base"
    runs: dict[float, list[Records]] = {beta: [] for beta in options.betas}

    def config_of(name: str, beta: float, seed: int) -> PPOConfig:
        recipe = recipe_config(options.recipe, base_folder, 0)
        return recipe_config(
            options.recipe,
            base_folder,
            0,
            kl_coef=beta,
            # Without a penalty too: it is the x axis.
            reference_model=recipe.model,
            iterations=options.iterations,
            eval_interval=100_000,
            output_dir=str(options.directory / name),
            seed=seed,
        )

    base = kept(
        options.directory / "base_rewards.json",
        partial(_base, config_of("base-samples", 0.0, 0), 16 if options.quick else 320),
    )
    for beta in options.betas:
        for seed in range(options.seeds):
            config = config_of(f"beta-{beta:g}-seed-{seed}", beta, seed)
            runs[beta].append(
                kept(
                    Path(config.output_dir) / "evaluations.json",
                    partial(train_and_evaluate, config, options.interval),
                )
            )
    _print(base, runs)
    _draw(base, runs, options.directory / "reward-kl.png")


def _print(base: Any, runs: dict[float, list[Records]]) -> None:
    """The last evaluation of each β, mean ± deviation of the seeds; best of n; responses."""
    rows = {"the base": ["0", f"{np.mean(base):.3f}", "", "", ""]}
    for beta, seeds in runs.items():
        last = [records[-1] for records in seeds]
        rows[f"β = {beta:g}"] = [
            cell((end["kl"] for end in last), 2),
            cell(end["reward"] for end in last),
            cell(end["gold"] for end in last),
            cell(end["reward"] - beta * end["kl"] for end in last),
            cell((share_of_gain(base, end["reward"], end["kl"]) for end in last), 2),
        ]
    for n in BEST_OF:
        kl, reward = best_of(base, n)
        share = cell([share_of_gain(base, reward, kl)], 2)
        rows[f"best of {n}"] = [f"≤ {kl:.2f}", f"{reward:.3f}", "", "", share]
    heads = ["KL, nats", "proxy", "gold", "r − β·KL", "share of the limit's gain"]
    print_table(["policy", *heads], rows)
    for beta, seeds in runs.items():
        print(f"\nβ = {beta:g}")
        for completion in seeds[0][-1]["completions"]:
            print(f"    … {completion}")


def _draw(base: Any, runs: dict[float, list[Records]], path: Path) -> None:
    figure, (left, right) = figure_of(
        [
            ("Reward against the distance", "KL to the base, nats per response", "reward"),
            ("Gold against proxy", "reward, trained on", "gold reward, never trained on"),
        ]
    )
    for beta, seeds in runs.items():
        curves = {
            name: np.array([column(records, name) for records in seeds])
            for name in ("kl", "reward", "gold")
        }
        for axis, x, y in ((left, "kl", "reward"), (right, "reward", "gold")):
            (line,) = axis.plot(curves[x].mean(0), curves[y].mean(0), lw=2, label=f"β = {beta:g}")
            axis.plot(curves[x].T, curves[y].T, color=line.get_color(), lw=0.7, alpha=0.4)
    left.plot(*limit(base), color="black", linewidth=1.4, label="the limit")
    for n in BEST_OF:
        kl, reward = best_of(base, n)
        left.plot(kl, reward, "k.")
        left.annotate(f"best of {n}", (kl, reward), fontsize=8)
    left.legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
