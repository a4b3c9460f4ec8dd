"""PPO with a critic against REINFORCE, RLOO, GRPO and best of n: study B.

    python docs/study_estimators.py runs/estimators
    python docs/study_estimators.py runs/estimators-quick --quick     # a few minutes
    python docs/study_estimators.py runs/with-smollm2 --recipe smollm2-arithmetic --seeds 1 \\
        --seconds 300 --precision bf16 --param_dtype bfloat16

Trains the recipe `arithmetic` with each way to make advantages, from the same model per seed, with
the same β, learning rate, batch and epochs, for the same time, counted as processor time of one
thread. Prints the reward after equal compute, the reward where a run first reached equal KL, best
of n of the model at the start, and what the critics knew; draws estimators.png, with the limit. A
run that is there already is not run again. Other flags are options of the recipe.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from rich.console import Console

from fastppo.cli import parse
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from fastppo.recipes.catalogue import find
from fastppo.recipes.run import base_rewards, lay_out, prepare
from fastppo.rewards.limit import BestOf, best_of_several, curve, shows
from fastppo.run.lock import held
from fastppo.run.log import RunLog, read_jsonl

NO_CRITIC = {"vf_coef": 0.0, "lam": 0.95, "value_model": "shared"}
"""`lam` as it is by default: without a value function it has no effect and may not be given."""

SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "PPO": ({"advantage": "gae", "value_model": "shared"}, "#1f5fa8"),
    "PPO, detached head": (
        {"advantage": "gae", "value_model": "detached", "value_learning_rate": 1e-3},
        "#5fa8d3",
    ),
    "REINFORCE": (NO_CRITIC | {"advantage": "reinforce"}, "#8a5a9e"),
    "RLOO": (NO_CRITIC | {"advantage": "rloo", "samples_per_prompt": 8}, "#3a8d5d"),
    "GRPO": (
        NO_CRITIC | {"advantage": "group", "samples_per_prompt": 8, "whiten_advantages": "none"},
        "#c8553d",
    ),
}
OWN = {
    "config",
    "seed",
    "device",
    "iterations",
    "eval_interval",
    "lr_schedule",
    "output_dir",
    "advantage",
    "value_learning_rate",
    "value_model",
    "vf_coef",
    "lam",
    "samples_per_prompt",
    "whiten_advantages",
}
"""Options that the study sets."""

MOST_PROMPTS = 100
"""Held-out prompts of which the base is sampled."""

SMOOTH = 5
"""Iterations of which a point is the mean."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Where it lies and how much of it there is."""

    directory: Path
    recipe: str
    seeds: int
    seconds: float
    kls: tuple[float, ...]
    base_samples: int
    flags: tuple[str, ...] = ()
    """Options of the recipe, as `fastppo train` takes them."""

    def seed_dir(self, seed: int) -> Path:
        return self.directory / f"seed-{seed}"

    def configs(self, seed: int) -> dict[str, PPOConfig]:
        """Of each setting, by its name."""
        out = self.seed_dir(seed)
        recipe = parse("train", ["--config", str(out / "run.yaml"), *self.flags])
        # A rate that does not depend on the number of iterations, which differs by setting: the
        # mean of the recipe's.
        base = replace(
            recipe,
            seed=seed,
            device="cpu",
            iterations=100_000,
            eval_interval=100_000,
            lr_schedule="constant",
            learning_rate=recipe.learning_rate / (2 if recipe.lr_schedule == "linear" else 1),
        )
        return {
            label: replace(base, **options, output_dir=str(out / label))
            for label, (options, _) in SETTINGS.items()
        }

    @property
    def identity(self) -> str:
        """What the runs of one directory have in common."""
        return json.dumps([self.recipe, self.seconds, self.base_samples, *self.flags])

    def check_directory(self) -> None:
        """Raises SystemExit if it holds a study of another size or with other options."""
        kept = self.directory / "study.json"
        there = kept.read_text() if kept.exists() else None
        if there != self.identity and (there or any(self.directory.glob("seed-*/*/times.json"))):
            raise SystemExit(
                f"{self.directory} holds a study of {there or 'unknown options'}, expected "
                f"{self.identity}: name another directory"
            )


def run(study: Study) -> None:
    """All that is not there yet."""
    console = Console(stderr=True)
    recipe = find(study.recipe)
    study.check_directory()
    for seed in range(study.seeds):
        out = study.seed_dir(seed)
        with held(out):
            lay_out(recipe, out)
            configs = study.configs(seed)  # errors before anything is made
            (study.directory / "study.json").write_text(study.identity)
            prepare(recipe, out, seed, console)
            for label, config in configs.items():
                if not (out / label / "times.json").exists():
                    run_setting(study, config, console)


def run_setting(study: Study, config: PPOConfig, console: Console) -> None:
    """One setting with one seed, for its time; and the samples of the base, if nobody drew them."""
    output = Path(config.output_dir)
    shutil.rmtree(output, ignore_errors=True)  # what an interrupted run left
    trainer = PPOTrainer(config, console=console)
    rewards = output.parent / "base_rewards.json"
    if not rewards.exists():
        held_out = trainer.evaluation.prompts
        assert held_out is not None
        few = held_out.select(range(min(MOST_PROMPTS, len(held_out))))
        rewards.write_text(json.dumps(base_rewards(trainer, few, study.base_samples)))
    times: list[float] = []
    log, start = RunLog(output, config), time.process_time()
    while not times or times[-1] < study.seconds:
        metrics = trainer.iterate(log)
        times.append(time.process_time() - start)
    log.close()
    (output / "times.json").write_text(json.dumps(times))
    console.print(f"{output}: {len(times)} iterations, reward {metrics['reward']:.3f}")


def smooth(values: Sequence[float]) -> np.ndarray:
    """Each the mean of it and those before it, `SMOOTH` at most."""
    return np.array([np.mean(values[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(values))])


def at_kl(kl: np.ndarray, reward: np.ndarray, wanted: float) -> float:
    """The reward where the KL first reached `wanted`, on the line between two iterations; NaN if it
    never did."""
    beyond = np.flatnonzero(kl >= wanted)
    if len(beyond) == 0:
        return float("nan")
    i = int(beyond[0])
    if i == 0:
        return float(reward[0])
    share = (wanted - kl[i - 1]) / (kl[i] - kl[i - 1])
    return float(reward[i - 1] + share * (reward[i] - reward[i - 1]))


def runs(study: Study, label: str) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(seconds, reward, KL) of each seed, smoothed."""
    found = []
    for seed in range(study.seeds):
        output = study.seed_dir(seed) / label
        records = read_jsonl(output / "metrics.jsonl")
        times = np.array(json.loads((output / "times.json").read_text()))
        curves = (smooth([record[name] for record in records]) for name in ("reward", "kl"))
        found.append((times, *curves))
    return found


def table(study: Study) -> list[str]:
    """Mean ± deviation over the seeds, as Markdown."""
    seconds = [study.seconds / 3, 2 * study.seconds / 3, study.seconds]
    heads = [f"{point:.0f} s" for point in seconds] + [f"{kl:g} nats" for kl in study.kls]
    lines = [f"| reward | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for label in SETTINGS:
        cells = []
        found = runs(study, label)
        for point in seconds:
            cells.append([float(np.interp(point, t, reward)) for t, reward, _ in found])
        for kl in study.kls:
            cells.append([at_kl(kls, reward, kl) for _, reward, kls in found])
        lines.append(f"| {label} | " + " | ".join(map(_cell, cells)) + " |")
    for best in best_of_seeds(study):
        reward, kl = _cell([each.reward for each in best]), _cell([each.kl for each in best], 2)
        lines.append(f"| best of {best[0].n} | {reward} at {kl} nats |")
    return lines


def best_of_seeds(study: Study) -> list[list[BestOf]]:
    """For each n, of each seed."""
    found = []
    for seed in range(study.seeds):
        rewards = json.loads((study.seed_dir(seed) / "base_rewards.json").read_text())
        found.append(best_of_several(rewards))
    return [list(each) for each in zip(*found, strict=False)]  # the n that all seeds have


def _cell(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± deviation of the runs that have a value, and how many they are where some have not."""
    there = np.array([value for value in values if value == value])
    if len(there) == 0:
        return "not reached"
    spread = f" ± {there.std(ddof=1):.{digits}f}" if len(there) > 1 else ""
    of = "" if len(there) == len(values) else f" ({len(there)} of {len(values)})"
    return f"{there.mean():.{digits}f}{spread}{of}"


def known(study: Study) -> list[str]:
    """What the critics explained of the returns' variance: the mean of a run's later half."""
    lines = []
    for label, (options, _) in SETTINGS.items():
        if options["advantage"] != "gae":
            continue
        found = []
        for seed in range(study.seeds):
            records = read_jsonl(study.seed_dir(seed) / label / "metrics.jsonl")
            explained = [record["explained_variance"] for record in records]
            found.append(float(np.mean(explained[len(explained) // 2 :])))
        lines.append(f"{label}: the critic explains {_cell(found, 2)} of the returns' variance")
    return lines


def limits(study: Study, farthest: float) -> list[tuple[float, float]]:
    """(KL, reward) of the limit, the mean of the seeds, as far as the samples of all show it."""
    kls = list(np.linspace(0.0, farthest, 100))
    found = []
    for seed in range(study.seeds):
        base = json.loads((study.seed_dir(seed) / "base_rewards.json").read_text())
        at = zip(curve(base, kls), kls, strict=True)
        found.append([one.reward for one, _ in takewhile(lambda each: shows(*each), at)])
    last = min(map(len, found))
    mean = np.mean([rewards[:last] for rewards in found], 0)
    return list(zip(kls[:last], mean.tolist(), strict=True))


def draw(study: Study, path: Path) -> None:
    """Left the reward against compute, mean and deviation of the seeds; right against the KL, each
    seed."""
    plt.rcParams.update({"font.size": 10, "font.family": "sans-serif"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    x = np.linspace(0, study.seconds, 80)
    for label, (_, colour) in SETTINGS.items():
        found = runs(study, label)
        lines = np.array([np.interp(x, times, reward) for times, reward, _ in found])
        left.plot(x, lines.mean(0), color=colour, linewidth=1.8, label=label)
        mean, spread = lines.mean(0), lines.std(0, ddof=min(1, len(lines) - 1))
        left.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.12, linewidth=0)
        for _, reward, kl in found:
            right.plot(kl, reward, color=colour, linewidth=0.9, alpha=0.5)
    seen = limits(study, float(right.dataLim.x1))
    if seen:
        right.plot(*zip(*seen, strict=True), color="black", linewidth=1.4, label="the limit")
        right.legend(frameon=False, loc="lower right", fontsize=9)
    several = best_of_seeds(study)
    for best in several:
        kl, reward = np.mean([(each.kl, each.reward) for each in best], 0)
        place = float(kl), float(reward)
        right.scatter(*place, color="black", s=18, zorder=3)
        left_of_it = best is not several[-1]
        right.annotate(
            f"best of {best[0].n}",
            place,
            xytext=(-5, 3) if left_of_it else (5, 3),
            ha="right" if left_of_it else "left",
            fontsize=8,
            textcoords="offset points",
        )
    for axis, title, label in (
        (left, "Reward against compute", "seconds, one thread"),
        (right, "Reward against the distance", "KL to the start, nats per response"),
    ):
        axis.set_title(title, loc="left", fontweight="bold", fontsize=11)
        axis.set_xlabel(label)
        axis.set_ylabel("reward: share that is right")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
    left.legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("directory", type=Path, help="where the runs go; before other flags")
    parser.add_argument("--recipe", default="arithmetic")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each run")
    parser.add_argument("--kls", type=float, nargs="+", default=[0.1, 0.25, 0.5])
    parser.add_argument("--quick", action="store_true", help="two seeds of 10 seconds each")
    given, flags = parser.parse_known_args(arguments)
    if given.seeds < 1:
        parser.error(f"--seeds must be >= 1, got {given.seeds}")
    for flag in flags:
        name = flag.partition("=")[0]
        if name.startswith("--") and name[2:].replace("-", "_") in OWN:
            parser.error(f"{name} is set by the study; name other options of the recipe")
    torch.set_num_threads(1)
    study = Study(
        directory=given.directory,
        recipe=given.recipe,
        seeds=2 if given.quick else given.seeds,
        seconds=10.0 if given.quick else given.seconds,
        kls=tuple(given.kls),
        base_samples=16 if given.quick else 64,
        flags=tuple(flags),
    )
    run(study)
    draw(study, study.directory / "estimators.png")
    print("\n".join([*table(study), "", *known(study)]))


if __name__ == "__main__":
    main()
