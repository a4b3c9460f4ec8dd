"""Does `learning_rate: auto` need tuning? Compare it with fixed rates on nine tasks.

    python -m benchmarks.studies.learning_rate runs/learning-rate
    python -m benchmarks.studies.learning_rate runs/learning-rate --tasks demo guess --seeds 1

Tasks run at batch size 64, and most of them also at 256; `demo` also runs with LoRA. `auto` starts
from a tenth and from ten times its first rate; the fixed rates are 1e-6 to 1e-3. All other options
are the defaults, apart from the task's models, prompts, rewards, lengths and KL coefficient. The
settings of a task, batch size and seed start from the same weights and make the same number of
iterations on one thread, so they take about the same CPU time.

The result of a run is the mean reward of its last five batches; the responses of a batch were
generated before the policy was trained on its prompts' rewards. A run has collapsed if this is
below the reward of its first batch. `demo` reports the gold reward, which is not trained on. The
constants of `auto` were tuned on `demo` and `key-and-door`, `step_kl` on all tasks of TASKS down to
`smollm2-sentiment`, and the decrease of its target on other seeds of `calculator`.

    python -m benchmarks.studies.learning_rate runs/learning-rate --defaults

`--defaults` varies one default of the update at a time instead, with `auto`, on the two tasks on
which its constants were chosen, at equal CPU time.

Runs are kept as JSON, so an interrupted study continues where it stopped. `--jobs 2` uses two
cores.
"""

from __future__ import annotations

import json
import multiprocessing
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
    demo_stages,
    figure_of,
    kept,
    parser_of,
    print_table,
)
from benchmarks.studies.key_and_door import key_and_door
from benchmarks.studies.letters import letters
from benchmarks.training import iterate
from fastppo.demo.run import ppo_config
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.rate_control import FIRST_RATE
from fastppo.ppo.step_control import AutoStepControl
from fastppo.ppo.trainer import PPOTrainer
from fastppo.recipes.catalogue import find
from fastppo.recipes.run import prepare, write_files
from fastppo.run.options import read_yaml

FIXED = ("1e-06", "1e-05", "0.0001", "0.001")
AUTO = {"auto from 1e-6": FIRST_RATE / 10, "auto from 1e-4": 10 * FIRST_RATE}
"""Initial learning rates of `auto`, by setting."""

SETTINGS = (*AUTO, *FIXED)

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
    "step_kl: 0.02": {"step_kl": 0.02},
    "step_kl: 0.05": {"step_kl": 0.05},
    "step_kl: 0.1": {"step_kl": 0.1},
    "turn_gae, lam: 0.95": {"advantage": "turn_gae"},
    "turn_gae, lam: 0.6": {"advantage": "turn_gae", "lam": 0.6},
}
"""Variants of `--defaults`. `turn_gae` is for episodes of several turns."""

TUNED_ON = ("demo", "key-and-door")
SECONDS = 20.0
"""CPU seconds of a run of `--defaults`."""

LAST = 5
"""Number of last batches whose mean reward is the result of a run."""

KEPT = ("processor_seconds", "reward", "kl", "approx_kl", "update_kl", "learning_rate", "undone")
"""Metrics of an iteration to save."""

TASK_OPTIONS = (
    "model",
    "prompts",
    "rewards",
    "environment",
    "max_turns",
    "max_new_tokens",
    "stop_strings",
    "stop_token_ids",
    "kl_coef",
    "microbatch_size",
)
"""Options that a task sets; all others are the defaults."""

RESULTS = Path(__file__).parents[1] / "results" / "studies" / "learning-rate.json"


@dataclass(frozen=True, kw_only=True)
class Task:
    """Task of the study."""

    config: Callable[[Path, int, dict[str, Any]], PPOConfig]
    """Function of the study's directory, the seed and further options."""
    iterations: dict[int, int]
    """Number of iterations by batch size."""
    reward: str = "reward"
    """Metric to report."""
    first_seed: int = 0


def of_recipe(name: str, **changes: Any) -> Callable[[Path, int, dict[str, Any]], PPOConfig]:
    """Return a function that makes the config of a recipe's task."""

    def config(directory: Path, seed: int, options: dict[str, Any]) -> PPOConfig:
        recipe = find(name)
        model_seed = seed if recipe.seeded else 0
        folder = directory / "models" / f"{name}-{model_seed}"
        written = read_yaml(write_files(recipe, folder), PPOConfig)
        prepare(recipe, folder, model_seed, CONSOLE)
        task = {key: written[key] for key in TASK_OPTIONS if key in written}
        return PPOConfig(**task | changes | options)

    return config


def demo(directory: Path, seed: int, options: dict[str, Any]) -> PPOConfig:
    stages = demo_stages(directory / "models" / "demo", seed)
    written = ppo_config(stages, stages / "unused")
    task = {key: getattr(written, key) for key in (*TASK_OPTIONS, "monitor_rewards")}
    return PPOConfig(**task | options)


def demo_lora(directory: Path, seed: int, options: dict[str, Any]) -> PPOConfig:
    return demo(directory, seed, {"lora_rank": 8, **options})


def of_letters(name: str) -> Callable[[Path, int, dict[str, Any]], PPOConfig]:
    """Return a function that makes the config of a task of `letters`."""
    return lambda directory, _seed, options: letters(name, directory, options)


def rooms(directory: Path, seed: int, options: dict[str, Any]) -> PPOConfig:
    written = key_and_door(directory / "models" / "rooms", seed, Path("unused"))
    task = {key: getattr(written, key) for key in TASK_OPTIONS}
    return PPOConfig(**task | options)


TASKS = {
    "demo": Task(config=demo, iterations={64: 40, 256: 25}, reward="monitor/gold_reward"),
    "demo-lora": Task(config=demo_lora, iterations={64: 40, 256: 25}, reward="monitor/gold_reward"),
    "key-and-door": Task(config=rooms, iterations={64: 80, 256: 30}),
    "arithmetic": Task(config=of_recipe("arithmetic"), iterations={64: 80, 256: 40}),
    "guess": Task(config=of_recipe("guess"), iterations={64: 50, 256: 25}),
    "smollm2-sentiment": Task(
        config=of_recipe(
            "smollm2-sentiment", precision="bf16", param_dtype="bfloat16", ppo_epochs=1
        ),
        iterations={64: 16},
    ),
    "reverse": Task(config=of_letters("reverse"), iterations={64: 60, 256: 30}, first_seed=10),
    "sort": Task(config=of_letters("sort"), iterations={64: 60, 256: 30}, first_seed=10),
    "next-letter": Task(config=of_letters("next-letter"), iterations={64: 60}, first_seed=20),
    "calculator": Task(config=of_recipe("calculator"), iterations={64: 30}, first_seed=20),
}


class Run(NamedTuple):
    """One run of the study."""

    task: str
    batch: int
    seed: int
    setting: str

    def folder(self, directory: Path) -> Path:
        return directory / self.task / f"batch-{self.batch}" / f"seed-{self.seed}" / self.setting

    def records(self, directory: Path) -> Records:
        """Return the run's metrics per iteration; train first if necessary."""
        return kept(self.folder(directory) / "records.json", lambda: self._train(directory))

    def _train(self, directory: Path) -> Records:
        torch.set_num_threads(1)
        task = TASKS[self.task]
        changes = DEFAULTS.get(self.setting)
        iterations = task.iterations[self.batch] if changes is None else 100_000
        options: dict[str, Any] = {
            "rollout_batch_size": self.batch,
            "iterations": iterations,
            "output_dir": str(self.folder(directory)),
            "warn_if": [],
            "device": "cpu",
            "seed": self.seed,
        }
        if self.setting in FIXED:
            options["learning_rate"] = float(self.setting)
        options |= changes or {}
        trainer = PPOTrainer(task.config(directory, self.seed, options), console=CONSOLE)
        if isinstance(trainer.step_control, AutoStepControl):
            adaptive = trainer.step_control.adaptive
            adaptive.rate = AUTO.get(self.setting, adaptive.rate)
        records: Records = []
        start = time.process_time()
        while len(records) < iterations and (changes is None or _spent(records) < SECONDS):
            metrics = iterate(trainer)
            metrics["processor_seconds"] = time.process_time() - start
            names = [name for name in (*KEPT, task.reward) if name in metrics]
            records.append({name: float(f"{metrics[name]:.5g}") for name in names})
        CONSOLE.print(f"{self}: {self.result(records):.3f}", soft_wrap=True)
        return records

    def result(self, records: Records) -> float:
        """Return the mean reward of the last batches."""
        return float(np.mean([record[TASKS[self.task].reward] for record in records[-LAST:]]))

    def has_collapsed(self, records: Records) -> bool:
        return self.result(records) < records[0][TASKS[self.task].reward]


def _spent(records: Records) -> float:
    return records[-1]["processor_seconds"] if records else 0.0


def train(run: Run, directory: Path) -> None:
    run.records(directory)


def collected(directory: Path, runs: Sequence[Run], jobs: int) -> dict[Run, Records]:
    """Return the records of the runs; train those that are missing, in `jobs` processes."""
    for task, seed in dict.fromkeys((run.task, run.seed) for run in runs):
        TASKS[task].config(directory, seed, {})  # prepares data and model
    missing = [run for run in runs if not (run.folder(directory) / "records.json").exists()]
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        pool.starmap(train, [(run, directory) for run in missing], chunksize=1)
    return {run: run.records(directory) for run in runs}


def grid(tasks: Sequence[str], batches: Sequence[int], seeds: int) -> list[Run]:
    """Return the runs of the comparison with fixed rates."""
    return [
        Run(task, batch, TASKS[task].first_seed + i, setting)
        for i in range(seeds)
        for task in tasks
        for batch in TASKS[task].iterations
        if batch in batches
        for setting in SETTINGS
    ]


def variants(seeds: int) -> list[Run]:
    """Return the runs of `--defaults`."""
    return [
        Run(task, 64, seed, setting)
        for seed in range(seeds)
        for setting in DEFAULTS
        for task in TUNED_ON
        if task == "key-and-door" or "turn_gae" not in setting
    ]


def by_case(records: dict[Run, Records]) -> dict[str, dict[str, list[Run]]]:
    """Return the runs by "task, batch" and setting."""
    cases: dict[str, dict[str, list[Run]]] = {}
    for run in records:
        case = cases.setdefault(f"{run.task}, {run.batch}", {})
        case.setdefault(run.setting, []).append(run)
    return cases


def at_equal_time(records: dict[Run, Records]) -> dict[Run, Records]:
    """Cut the runs of each task, batch size and seed to the CPU time of the shortest."""
    seconds: dict[tuple[str, int, int], float] = {}
    for run, rows in records.items():
        total = rows[-1]["processor_seconds"]
        seconds[run[:3]] = min(total, seconds.get(run[:3], total))
    return {
        run: [row for row in rows if row["processor_seconds"] <= seconds[run[:3]]]
        for run, rows in records.items()
    }


def shares_of_best(settings: dict[str, list[Run]], records: dict[Run, Records]) -> list[str]:
    """Return the best fixed rate, and the means of `auto` as shares of the best rate's mean."""
    means = {
        name: float(np.mean([run.result(records[run]) for run in runs]))
        for name, runs in settings.items()
    }
    best = max(FIXED, key=means.__getitem__)
    return [best, *(f"{means[name] / means[best]:.3f}" for name in AUTO)]


def print_grid(records: dict[Run, Records]) -> None:
    """Print the results of each setting, and those of `auto` as shares of the best fixed rate's."""
    rows = {}
    shares = {}
    cut = at_equal_time(records)
    for case, settings in by_case(records).items():
        results = {
            name: [run.result(records[run]) for run in runs] for name, runs in settings.items()
        }
        rows[case] = [cell(results[name]) for name in SETTINGS]
        for place, name in enumerate(SETTINGS):
            lost = sum(run.has_collapsed(records[run]) for run in settings[name])
            if lost:
                rows[case][place] += f", {lost} below the start"
        shares[case] = [*shares_of_best(settings, records), *shares_of_best(settings, cut)[1:]]
    print_table(["task, batch", *SETTINGS], rows)
    print()
    at_equal_cpu_time = [f"{name}, CPU time" for name in AUTO]
    print_table(["task, batch", "best fixed rate", *AUTO, *at_equal_cpu_time], shares)


def print_variants(records: dict[Run, Records]) -> None:
    """Print the results of `--defaults`."""
    rows: dict[str, list[str]] = {setting: [] for setting in DEFAULTS}
    cases = by_case(records)
    for setting, cells in rows.items():
        for settings in cases.values():
            results = [run.result(records[run]) for run in settings.get(setting, [])]
            cells.append(cell(results) if results else "")
    print_table(["", *cases], rows)


def draw(records: dict[Run, Records], path: Path) -> None:
    """Draw the mean reward of each setting over the iterations, one panel per case."""
    cases = by_case(records)
    figure = figure_of([(case, "iteration", "reward") for case in cases])
    for axis, settings in zip(figure.axes, cases.values(), strict=True):
        for setting, runs in settings.items():
            curves = [column(records[run], TASKS[run.task].reward, LAST) for run in runs]
            style = {"linewidth": 2.2} if setting in AUTO else {"linewidth": 1.2, "alpha": 0.8}
            axis.plot(np.mean(curves, axis=0), label=setting, **style)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def keep(records: dict[Run, Records], path: Path) -> None:
    """Write the trained and the reported rewards and the CPU seconds; for `auto` also the rates."""
    curves: dict[str, Any] = {}
    for run, kept_records in records.items():
        names = list(dict.fromkeys([TASKS[run.task].reward, "reward", "processor_seconds"]))
        names += ["learning_rate"] if run.setting in AUTO else []
        case = curves.setdefault(f"{run.task}, {run.batch}", {}).setdefault(run.setting, {})
        case[str(run.seed)] = {name: [record[name] for record in kept_records] for name in names}
    path.write_text(json.dumps(curves), encoding="utf-8")


def read(path: Path) -> dict[Run, Records]:
    """Return the records that `keep` wrote."""
    records = {}
    for case, settings in json.loads(path.read_text("utf-8")).items():
        task, batch = case.split(", ")
        for setting, seeds in settings.items():
            for seed, curves in seeds.items():
                rows = zip(*curves.values(), strict=True)
                run = Run(task, int(batch), int(seed), setting)
                records[run] = [dict(zip(curves, row, strict=True)) for row in rows]
    return records


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, seeds=3, jobs=1)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--defaults", action="store_true", help="vary the defaults of the update")
    parser.add_argument("--keep", action="store_true", help=f"also write {RESULTS.name}")
    options = parser.parse_args(arguments)
    if options.defaults:
        print_variants(
            collected(
                options.directory, variants(1 if options.quick else options.seeds), options.jobs
            )
        )
        return
    seeds = 1 if options.quick else options.seeds
    tasks = ["key-and-door"] if options.quick else options.tasks
    batches = [64] if options.quick else options.batches
    records = collected(options.directory, grid(tasks, batches, seeds), options.jobs)
    print_grid(records)
    draw(records, options.directory / "learning-rate.png")
    if options.keep:
        keep(records, RESULTS)


if __name__ == "__main__":
    main()
