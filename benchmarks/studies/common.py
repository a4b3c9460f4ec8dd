"""Run, cache, tabulate and plot: helpers of the studies."""

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
from fastppo.demo.run import supervised_stages
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer

CONSOLE = Console(stderr=True)

Records = list[dict[str, Any]]


def parser_of(study: str, **numbers: float) -> argparse.ArgumentParser:
    """Return a study's argument parser, with a flag for each of its numbers."""
    parser = argparse.ArgumentParser(description=study.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the runs go")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--quick", action="store_true", help="a version of minutes")
    return parser


# -------------------------------------------------------------------------------------------- runs


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """Return the content of a JSON file; compute and write it first if it does not exist."""
    if not path.exists():
        made = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made), encoding="utf-8")
    return json.loads(path.read_text("utf-8"))


def train(config: PPOConfig, *, seconds: float = math.inf, iterations: int = 0) -> Records:
    """Train for a CPU time or a number of iterations.

    Returns:
        The metrics of each iteration with `processor_seconds`, the CPU time since the start. With
        one thread this is the wall-clock time of an idle core.
    """
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
    """Return the folder of the demo's first two stages; train them if necessary."""
    stages = directory / f"seed-{seed}"
    if not (stages / "reward_model" / "config.json").exists():
        supervised_stages(stages, seed=seed, device="cpu", console=CONSOLE)
    return stages


# ------------------------------------------------------------------------------- tables and curves


def column(records: Records, name: str, smooth: int = 1) -> np.ndarray:
    """Return the running mean of a metric over `smooth` iterations; missing values are NaN."""
    values = [record.get(name, math.nan) for record in records]
    return np.array([np.mean(values[max(0, i + 1 - smooth) : i + 1]) for i in range(len(values))])


def at_seconds(records: Records, name: str, seconds: Any, smooth: int = 1) -> Any:
    """Interpolate a metric at one or more CPU times, in seconds."""
    return np.interp(seconds, column(records, "processor_seconds"), column(records, name, smooth))


def cell(values: Iterable[float], digits: int = 3) -> str:
    """Format mean ± standard deviation over the runs with a value, and their number."""
    every = np.array(list(values), dtype=float)
    present = every[~np.isnan(every)]
    if len(present) == 0:
        return "not reached"
    spread = f" ± {present.std(ddof=1):.{digits}f}" if len(present) > 1 else ""
    count = "" if len(present) == len(every) else f" ({len(present)} of {len(every)})"
    return f"{present.mean():.{digits}f}{spread}{count}"


def print_table(head: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    print(f"| {' | '.join(head)} |")
    print("|---" * len(head) + "|")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


def figure_of(panels: Sequence[tuple[str, str, str]]) -> Any:
    """Return a figure with a panel for each (title, x label, y label), three per row."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = plt.figure(figsize=(4.6 * columns, 3.7 * rows), layout="constrained")
    for place, (title, x_label, y_label) in enumerate(panels, start=1):
        axis = figure.add_subplot(rows, columns, place)
        axis.set_title(title, loc="left", fontweight="bold", fontsize=11)
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
    return figure
