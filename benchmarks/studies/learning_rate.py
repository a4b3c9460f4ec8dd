"""Does `learning_rate: auto` need tuning? Compare it with five fixed rates.

    python -m benchmarks.studies.learning_rate runs/learning-rate
    python -m benchmarks.studies.learning_rate runs/learning-rate --settings auto --label new-rule
    python -m benchmarks.studies.learning_rate runs/learning-rate --tasks needle dense --seeds 1

There are three sets of tasks (`--set`): constants of `auto` may be chosen on TUNED, HELD_OUT was
looked at once, at the end, and INDEPENDENT is by an author who had not seen the rule. All settings
of a task and seed start from the same weights and make 60 iterations on one thread. The learning
rate has no schedule, so the first 15 iterations are the short run.

The result of a run is the mean of the judged reward over the last fifth of its iterations; the
responses of a batch are generated before the policy is trained on it. Results are compared at equal
numbers of iterations, and at equal CPU time: the runs of a task and seed are then cut to the time
of the shortest. The share of a task is the mean of `auto` over the seeds, divided by the highest
mean of a fixed rate; the start is subtracted from both where rewards may be negative. A run ends
below its start if its result is lower than the reward of its first batch by more than two standard
errors of that batch's mean.

Runs are kept as JSON, DIRECTORY/TASK/SETTING-SEED.json, so an interrupted study continues where it
stopped. With `--label NAME`, `auto` is called auto-NAME, and its runs are kept beside those of
other versions of the rule. `--fixed` reads the runs at fixed rates and the models of another
directory, `--report` trains nothing, and `--jobs 2` uses two cores.

    python -m benchmarks.studies.learning_rate runs/learning-rate --defaults

`--defaults` varies one default of the update at a time instead, with `auto`, on `demo` and
`key-and-door`, at equal CPU time.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.studies.common import (
    CONSOLE,
    Records,
    cell,
    column,
    figure_of,
    kept,
    parser_of,
    print_table,
)
from benchmarks.studies.held_out_tasks import HELD_OUT
from benchmarks.studies.independent_tasks import INDEPENDENT
from benchmarks.studies.rate_tasks import TUNED
from benchmarks.training import iterate
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer

AUTO = "auto"
FIXED = ("1e-5", "1e-4", "3e-4", "1e-3", "3e-3")

SETS = {"tuned": TUNED, "held-out": HELD_OUT, "independent": INDEPENDENT}
TASKS = {name: task for tasks in SETS.values() for name, task in tasks.items()}

BATCH = 64
"""Responses of a batch, unless the task says otherwise."""

MICROBATCH = 256
"""Sequences per pass: every minibatch in one, which is faster and changes only the rounding."""

LENGTHS = {"short": 15, "long": 60}
"""Iterations of the two lengths of a run; the first is the beginning of the second."""

KEPT = ("kl", "approx_kl", "update_kl", "target_kl", "learning_rate", "entropy")
"""Metrics of an iteration to save, besides the judged reward and the CPU time."""

PLOTTED = ("judged", "deviation", "seconds", "learning_rate", "update_kl")
"""Metrics to keep in the repository; for fixed rates the first three."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "ppo_epochs: 1": {"ppo_epochs": 1},
    "ppo_epochs: 2": {"ppo_epochs": 2},
    "minibatches: 1": {"minibatches": 1},
    "minibatches: 4": {"minibatches": 4},
    "rollout_batch_size: 128": {"rollout_batch_size": 128},
    "rollout_batch_size: 256": {"rollout_batch_size": 256},
    "lam: 1": {"lam": 1.0},
    "lam: 0.8": {"lam": 0.8},
    "whiten_advantages: false": {"whiten_advantages": False},
    "step_kl: 0.01": {"step_kl": 0.01},
    "step_kl: 0.05": {"step_kl": 0.05},
    "step_kl: 0.1": {"step_kl": 0.1},
    "turn_gae, lam: 0.95": {"advantage": "turn_gae"},
    "turn_gae, lam: 0.6": {"advantage": "turn_gae", "lam": 0.6},
}
"""Variants of `--defaults`. `turn_gae` is for episodes of several turns."""

VARIED_ON = ("demo", "key-and-door")
SECONDS = 20.0
"""CPU seconds of a run of `--defaults`."""

RESULTS = Path(__file__).parents[1] / "results" / "studies" / "learning-rate.json"


# -------------------------------------------------------------------------------------------- runs


class Run(NamedTuple):
    """One run of the study."""

    task: str
    setting: str
    seed: int

    def path(self, directory: Path) -> Path:
        return directory / self.task / f"{self.setting}-{self.seed}.json".replace(": ", "-")

    @property
    def options(self) -> dict[str, Any]:
        """Options of the setting."""
        if self.setting in FIXED:
            return {"learning_rate": float(self.setting)}
        return DEFAULTS.get(self.setting, {})


def make_trainer(run: Run, models: Path, output: str) -> tuple[PPOTrainer, Callable[..., Any]]:
    """Return the trainer of a run, and a function of the metrics of an iteration.

    It returns the mean and the standard deviation of the judged reward.
    """
    setup = TASKS[run.task].setup(models, run.seed)
    common: dict[str, Any] = {
        "rollout_batch_size": BATCH,
        "microbatch_size": MICROBATCH,
        "iterations": LENGTHS["long"],
        "output_dir": output,
        "warn_if": [],
        "device": "cpu",
        "seed": run.seed,
    }
    judge = setup.judge
    config = PPOConfig(**common | setup.options | run.options)
    trainer = PPOTrainer(
        config,
        console=CONSOLE,
        monitor_rewards=None if judge is None else [judge],
        **setup.parts,
    )

    def judged(metrics: dict[str, float]) -> tuple[float, float]:
        if judge is None:
            return metrics[setup.metric], metrics["reward_std"]
        return judge.mean, judge.deviation

    return trainer, judged


@functools.cache
def warm_up() -> None:
    """Train for one iteration, so that kernels are compiled before the clock starts."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = make_trainer(Run("bandit", FIXED[0], 0), Path(folder), folder)
        iterate(trainer)


def trained(run: Run, models: Path) -> Records:
    """Train on one thread and return the records of the iterations."""
    torch.set_num_threads(1)
    warm_up()
    is_timed = run.setting in DEFAULTS
    records: Records = []
    with tempfile.TemporaryDirectory() as output:
        trainer, judged = make_trainer(run, models, output)
        start = time.process_time()
        seconds = 0.0
        while seconds < SECONDS if is_timed else len(records) < LENGTHS["long"]:
            metrics = iterate(trainer)
            seconds = time.process_time() - start
            mean, deviation = judged(metrics)
            values = {"judged": mean, "deviation": deviation, "seconds": seconds}
            values |= {name: metrics[name] for name in KEPT if name in metrics}
            values["size"] = trainer.config.rollout_batch_size
            records.append({name: float(f"{value:.5g}") for name, value in values.items()})
    CONSOLE.print(f"{run}: {result(records):.3f}, {seconds:.1f} s", soft_wrap=True)
    return records


def make_records(run: Run, directory: Path, models: Path) -> None:
    """Train, unless the records of the run exist."""
    kept(run.path(directory), lambda: trained(run, models))


class Store(NamedTuple):
    """Where runs are kept."""

    directory: Path
    fixed: Path
    """Folder of the runs at fixed rates and of the models."""

    def of(self, run: Run) -> Path:
        """Return the folder of a run."""
        return self.fixed if run.setting in FIXED else self.directory

    def train(self, runs: Sequence[Run], jobs: int) -> None:
        """Make the missing runs in `jobs` processes."""
        missing = [run for run in runs if not run.path(self.of(run)).exists()]
        models = self.fixed / "models"
        if jobs == 1:
            for run in missing:
                make_records(run, self.of(run), models)
            return
        for task, seed in dict.fromkeys((run.task, run.seed) for run in missing):
            TASKS[task].setup(models, seed)  # prepares data and model once
        todo = [(run, self.of(run), models) for run in missing]
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            pool.starmap(make_records, todo, chunksize=1)

    def read(self, runs: Sequence[Run]) -> dict[Run, Records]:
        """Return the records of the runs that exist."""
        paths = {run: run.path(self.of(run)) for run in runs}
        return {
            run: json.loads(path.read_text("utf-8")) for run, path in paths.items() if path.exists()
        }


# ----------------------------------------------------------------------------------------- results


def result(records: Records) -> float:
    """Return the mean of the judged reward over the last fifth of the iterations."""
    last = records[-max(1, len(records) // 5) :]
    return statistics.fmean(record["judged"] for record in last)


def ends_below_start(records: Records) -> bool:
    """Whether the result is below the first batch's reward by more than two standard errors."""
    first = records[0]
    error = first["deviation"] / first["size"] ** 0.5
    return result(records) < first["judged"] - 2 * error


def at_equal_time(records: dict[Run, Records]) -> dict[Run, Records]:
    """Cut the runs of each task and seed to the CPU time of the shortest."""
    seconds: dict[tuple[str, int], float] = {}
    for run, rows in records.items():
        group = (run.task, run.seed)
        seconds[group] = min(rows[-1]["seconds"], seconds.get(group, rows[-1]["seconds"]))
    return {
        run: [row for row in rows if row["seconds"] <= seconds[run.task, run.seed]] or rows[:1]
        for run, rows in records.items()
    }


@dataclass(frozen=True)
class Comparison:
    """`auto` and the fixed rates on one task."""

    task: str
    results: dict[str, list[float]]
    """Results of each setting, by seed."""
    below: dict[str, int]
    """Number of runs of each setting that end below their start."""
    start: float
    """Mean reward of the first batches."""

    def mean(self, setting: str) -> float:
        return statistics.fmean(self.results[setting])

    @property
    def best(self) -> str:
        """The fixed rate with the highest mean."""
        return max((name for name in FIXED if name in self.results), key=self.mean)

    def share(self, auto: str) -> float:
        """Return the share of the best fixed rate that `auto` reaches, NaN if that is no gain."""
        origin = self.start if TASKS[self.task].is_signed else 0.0
        gain = self.mean(self.best) - origin
        return (self.mean(auto) - origin) / gain if gain > 0 else math.nan


def compare(records: dict[Run, Records]) -> list[Comparison]:
    """Return the comparison of each task."""
    comparisons = []
    for task in dict.fromkeys(run.task for run in records):
        of_task = {run: rows for run, rows in records.items() if run.task == task}
        results: dict[str, list[float]] = {}
        below: dict[str, int] = {}
        for run, rows in of_task.items():
            results.setdefault(run.setting, []).append(result(rows))
            below[run.setting] = below.get(run.setting, 0) + ends_below_start(rows)
        start = statistics.fmean(rows[0]["judged"] for rows in of_task.values())
        comparisons.append(Comparison(task, results, below, start))
    return comparisons


def print_comparison(records: dict[Run, Records], auto: str) -> None:
    """Print a table of results and shares for each length, and the summary of the shares."""
    summary: dict[str, list[str]] = {}
    for length, iterations in LENGTHS.items():
        short = {run: rows[:iterations] for run, rows in records.items()}
        of_time = {each.task: each for each in compare(at_equal_time(short))}
        rows = {}
        shares: dict[str, list[float]] = {"iterations": [], "CPU time": []}
        below = {"iterations": 0, "CPU time": 0}
        for each in compare(short):
            if auto not in each.results or len(each.results) == 1:
                continue
            timed = of_time[each.task]
            for name, comparison in (("iterations", each), ("CPU time", timed)):
                share = comparison.share(auto)
                if not math.isnan(share):
                    shares[name].append(share)
                below[name] += comparison.below[auto]
            cells = [
                _cell(each, setting) if setting in each.results else "not run"
                for setting in (auto, *FIXED)
            ]
            percent = [f"{100 * x.share(auto):.0f} %" for x in (each, timed)]
            rows[each.task] = [f"{each.start:.3f}", *cells, *percent]
        if not rows:
            continue
        head = [f"{length}: {iterations} iterations", "start", auto, *FIXED]
        print_table([*head, "share, equal iterations", "share, equal CPU time"], rows)
        print()
        for name, values in shares.items():
            summary[f"{length}, equal {name}"] = [
                f"{100 * min(values):.0f} %",
                f"{100 * statistics.median(values):.0f} %",
                f"{sum(value >= 0.85 for value in values)} of {len(values)}",
                str(below[name]),
            ]
    head = ["", "lowest share", "median share", "tasks at 85 % or more", "runs below their start"]
    print_table(head, summary)


def _cell(comparison: Comparison, setting: str) -> str:
    lost = comparison.below[setting]
    return cell(comparison.results[setting]) + (f", {lost} below" if lost else "")


def print_variants(records: dict[Run, Records]) -> None:
    """Print the results of `--defaults`."""
    rows: dict[str, list[str]] = {}
    for setting in DEFAULTS:
        rows[setting] = []
        for task in VARIED_ON:
            results = [
                result(rows_of)
                for run, rows_of in records.items()
                if (run.task, run.setting) == (task, setting)
            ]
            rows[setting].append(cell(results) if results else "")
    print_table(["", *VARIED_ON], rows)


def draw(records: dict[Run, Records], path: Path) -> None:
    """Draw the mean judged reward of each setting over the iterations, one panel per task."""
    tasks = list(dict.fromkeys(run.task for run in records))
    figure = figure_of([(task, "iteration", "reward") for task in tasks])
    for axis, task in zip(figure.axes, tasks, strict=True):
        for setting in dict.fromkeys(run.setting for run in records):
            curves = [
                column(rows, "judged", 5)
                for run, rows in records.items()
                if (run.task, run.setting) == (task, setting)
            ]
            style: dict[str, Any] = {"linewidth": 1.2, "alpha": 0.8}
            if setting not in FIXED:
                style = {"linewidth": 2.4, "color": "black"}
            if curves:
                axis.plot(np.mean(curves, axis=0), label=setting, **style)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def keep(records: dict[Run, Records], auto: str, path: Path) -> None:
    """Write the curves of the runs to a file, in place of those of the same tasks."""
    kept_tasks = json.loads(path.read_text("utf-8")) if path.exists() else {}
    tasks: dict[str, Any] = {}
    for run, rows in records.items():
        names = PLOTTED if run.setting == auto else PLOTTED[:3]
        curves = {name: [row.get(name) for row in rows] for name in names}
        setting = AUTO if run.setting == auto else run.setting
        seeds = tasks.setdefault(run.task, {}).setdefault(setting, {})
        seeds[str(run.seed)] = curves | {"size": rows[0]["size"]}
    path.write_text(json.dumps(kept_tasks | tasks), encoding="utf-8")


def read(path: Path, name: str) -> dict[Run, Records]:
    """Return the records of a set of tasks that `keep` wrote."""
    records = {}
    kept_tasks = json.loads(path.read_text("utf-8"))
    for task in SETS[name]:
        for setting, seeds in kept_tasks.get(task, {}).items():
            for seed, curves in seeds.items():
                size = curves.pop("size")
                rows = zip(*curves.values(), strict=True)
                records[Run(task, setting, int(seed))] = [
                    dict(zip(curves, row, strict=True)) | {"size": size} for row in rows
                ]
    return records


# --------------------------------------------------------------------------------------- the study


def grid(tasks: Sequence[str], settings: Sequence[str], seeds: int) -> list[Run]:
    """Return the runs of the comparison, seed by seed."""
    return [
        Run(task, setting, seed) for seed in range(seeds) for task in tasks for setting in settings
    ]


def variants(seeds: int) -> list[Run]:
    """Return the runs of `--defaults`."""
    return [
        Run(task, setting, seed)
        for seed in range(seeds)
        for setting in DEFAULTS
        for task in VARIED_ON
        if task == "key-and-door" or "turn_gae" not in setting
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__ or "", seeds=3, jobs=1)
    parser.add_argument("--set", choices=SETS, default="tuned", help="the set of tasks")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="only these tasks")
    parser.add_argument(
        "--settings", nargs="+", choices=(AUTO, *FIXED), default=[AUTO, *FIXED], help="what to run"
    )
    parser.add_argument("--label", default="", help="the name of this version of auto")
    parser.add_argument("--fixed", type=Path, help="folder of the fixed rates' runs and the models")
    parser.add_argument("--report", action="store_true", help="print what exists, train nothing")
    parser.add_argument("--keep", action="store_true", help=f"also write {RESULTS.name}")
    parser.add_argument("--defaults", action="store_true", help="vary the defaults of the update")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    store = Store(options.directory, options.fixed or options.directory)
    seeds = 1 if options.quick else options.seeds
    if options.defaults:
        runs = variants(seeds)
        store.train(runs, options.jobs)
        print_variants(store.read(runs))
        return
    tasks = ["bandit"] if options.quick else options.tasks or list(SETS[options.set])
    auto = f"{AUTO}-{options.label}" if options.label else AUTO
    settings = [auto if setting == AUTO else setting for setting in options.settings]
    if not options.report:
        store.train(grid(tasks, settings, seeds), options.jobs)
    records = store.read(grid(tasks, [auto, *FIXED], seeds))
    print_comparison(records, auto)
    options.directory.mkdir(parents=True, exist_ok=True)
    draw(records, options.directory / "learning-rate.png")
    if options.keep:
        keep(records, auto, RESULTS)


if __name__ == "__main__":
    main()
