"""What the studies share: timed runs that are kept, cells of tables, and what bounds a policy.

Among all policies at a distance k from the base, KL(π‖base) averaged over the prompts, none earns
more than the tilted one, π*(y|x) ∝ base(y|x)·exp(r(x, y)/β), with the β at which its KL is k
(Ziegler et al. 2019, eq. 2). With m samples of the base to a prompt, the weight of a sample is
w_i = softmax(r/β)_i, the reward Σ w_i r_i and the KL Σ w_i log(m·w_i). Few effective samples,
1/Σ w_i², mean that this is the reward of a handful of lucky ones, and too low.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.training import iterate
from fastppo.data.prompts import Prompts
from fastppo.demo.run import supervised_stages
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from fastppo.recipes.catalogue import find
from fastppo.recipes.run import lay_out, prepare
from fastppo.run.options import read_yaml

CONSOLE = Console(stderr=True)

LEAST_EFFECTIVE = 6.0
"""Effective samples to a prompt, their mean, below which the limit is not shown."""

Records = list[dict[str, Any]]


def parser_of(study: str, **numbers: float) -> argparse.ArgumentParser:
    """A study's command line: where its runs go, how many seeds, and its numbers."""
    parser = argparse.ArgumentParser(description=study.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the runs go")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--quick", action="store_true", help="a version of minutes")
    return parser


# -------------------------------------------------------------------------------------------- runs


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """What the JSON file holds; made and written if it is not there."""
    if not path.exists():
        made = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made), encoding="utf-8")
    return json.loads(path.read_text("utf-8"))


def train(config: PPOConfig, *, seconds: float = math.inf, iterations: int = 0) -> Records:
    """The metrics of every iteration with its `processor_seconds` since the start, for so many
    seconds or so many iterations. Processor time of one thread is the wall clock of an idle core,
    and does not depend on what else the machine does."""
    torch.set_num_threads(1)
    trainer = PPOTrainer(config, console=CONSOLE)
    records: Records = []
    start = time.process_time()
    spent = 0.0
    while spent < seconds and (iterations == 0 or len(records) < iterations):
        metrics = iterate(trainer)
        spent = time.process_time() - start
        records.append(metrics | {"processor_seconds": spent})
    CONSOLE.print(f"{config.output_dir}: {len(records)} iterations, {metrics['reward']:.3f}")
    return records


def demo_stages(directory: Path, seed: int) -> Path:
    """The folder of the demo's first two stages with this seed, trained if they are not there."""
    stages = directory / f"seed-{seed}"
    if not (stages / "reward_model" / "config.json").exists():
        supervised_stages(stages, seed=seed, device="cpu", console=CONSOLE)
    return stages


def recipe_config(name: str, folder: Path, folder_seed: int, **options: Any) -> PPOConfig:
    """A recipe's config, with its model and prompts made in the folder. A run.yaml that is there
    already is the one that counts."""
    recipe = find(name)
    path = lay_out(recipe, folder)
    config = read_yaml(path, PPOConfig) | {"seed": folder_seed, "device": "cpu"} | options
    PPOConfig(**config)  # refused before anything is made
    prepare(recipe, folder, folder_seed, CONSOLE)
    return PPOConfig(**config)


def samples_of_the_base(trainer: PPOTrainer, prompts: Prompts, samples: int) -> list[list[float]]:
    """[prompts, samples] rewards of what the policy, not trained yet, answers."""
    return [
        trainer.evaluate(prompts.select([row] * samples))["scores"].total.tolist()
        for row in range(len(prompts))
    ]


# ------------------------------------------------------------------------------- tables and curves


def column(records: Records, name: str, smooth: int = 1) -> np.ndarray:
    """A metric over the iterations, each value the mean of it and those before it."""
    values = [record[name] for record in records]
    return np.array([np.mean(values[max(0, i + 1 - smooth) : i + 1]) for i in range(len(values))])


def at_seconds(records: Records, name: str, seconds: Any, smooth: int = 1) -> Any:
    """The metric when so many seconds (a number, or several) of processor time were spent."""
    return np.interp(seconds, column(records, "processor_seconds"), column(records, name, smooth))


def cell(values: Iterable[float], digits: int = 3) -> str:
    """Mean ± deviation of the runs that have a value, and how many they are where some have not."""
    every = np.array(list(values), dtype=float)
    there = every[~np.isnan(every)]
    if len(there) == 0:
        return "not reached"
    spread = f" ± {there.std(ddof=1):.{digits}f}" if len(there) > 1 else ""
    count = "" if len(there) == len(every) else f" ({len(there)} of {len(every)})"
    return f"{there.mean():.{digits}f}{spread}{count}"


def print_table(head: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    print(f"| {' | '.join(head)} |")
    print("|---" * len(head) + "|")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


def figure_of(panels: Sequence[tuple[str, str, str]]) -> tuple[Any, Any]:
    """A figure with a panel for each (title, x label, y label)."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    size = (4.6 * len(panels), 3.7)
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained")
    for axis, (title, x_label, y_label) in zip(figure.axes, panels, strict=True):
        axis.set_title(title, loc="left", fontweight="bold", fontsize=11)
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
    return figure, axes


# --------------------------------------------------------------------------- what bounds a policy


def tilted(rewards: Any, beta: float) -> tuple[float, float, float]:
    """(KL in nats, reward, effective samples) of the base tilted by exp(r/β), prompts' means.

    Args:
        rewards: [prompts, samples] of samples of the base.
    """
    array = np.asarray(rewards, dtype=np.float64)
    log_weights = (array - array.max(1, keepdims=True)) / beta
    log_weights -= np.log(np.exp(log_weights).sum(1, keepdims=True))
    weights = np.exp(log_weights)
    kl = (weights * (log_weights + math.log(array.shape[1]))).sum(1).mean()
    reward = (weights * array).sum(1).mean()
    effective = (1 / (weights**2).sum(1)).mean()
    return float(kl), float(reward), float(effective)


def limit(rewards: Any) -> tuple[np.ndarray, np.ndarray]:
    """(KL, reward) of the limit, from the base on, as far as the samples show it."""
    spread = float(np.ptp(np.asarray(rewards)))
    betas = spread * np.logspace(3, -3, 300) if spread else [1.0]
    points = [tilted(rewards, beta) for beta in betas]
    shown = [(kl, reward) for kl, reward, effective in points if effective >= LEAST_EFFECTIVE]
    kl, reward = np.array(shown).reshape(-1, 2).T
    return kl, reward


def share_of_gain(rewards: Any, reward: float, kl: float) -> float:
    """What a policy at this KL gains over the base, of what the limit does; NaN where the samples
    do not show the limit."""
    kls, limits = limit(rewards)
    if not 0 < kl <= kls[-1]:
        return math.nan
    base = float(np.mean(rewards))
    return (reward - base) / (float(np.interp(kl, kls, limits)) - base)


def best_of(rewards: Any, n: int) -> tuple[float, float]:
    """(KL at most, reward) of the best of n draws of the base: log n − (n − 1)/n nats (Beirami et
    al. 2024), and the mean over all choices of n of the samples."""
    ordered = np.sort(np.asarray(rewards, dtype=np.float64), axis=1)
    count = ordered.shape[1]
    chances = [math.comb(place, n - 1) / math.comb(count, n) for place in range(count)]
    return math.log(n) - (n - 1) / n, float((ordered @ np.array(chances)).mean())
