"""What the studies share: timed runs that are kept, cells of tables, figures."""

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


# ------------------------------------------------------------------------------- tables and curves


def column(records: Records, name: str, smooth: int = 1) -> np.ndarray:
    """A metric over the iterations, each value the mean of it and those before it; NaN where an
    iteration has none."""
    values = [record.get(name, math.nan) for record in records]
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


def figure_of(panels: Sequence[tuple[str, str, str]]) -> Any:
    """A figure with a panel for each (title, x label, y label), three to a row."""
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
