"""Reward against KL, gold against proxy, and the limit that the base sets: study A.

    python docs/study_reward_kl.py runs/reward-kl
    python docs/study_reward_kl.py runs/reward-kl-quick --quick     # a few minutes
    python docs/study_reward_kl.py runs/reward-kl-bf16 --precision bf16 --param_dtype bfloat16

Trains a recipe (SmolLM2 and sentiment, unless another is named) with several β and seeds. Every few
iterations the policy answers the held-out prompts, several times each, and the trained reward, the
monitored one and the KL to the base are written down. Beside the curves stand what samples of the
base say of the same prompts: the most that any policy earns at a KL (`fastppo.rewards.limit`), and
best of n. Draws reward-kl.png from what was run, and prints the table and samples of each β; a run
that is there already is not run again. Other flags are options of the recipe.

Processes may share a directory, each with β of its own (`--betas`), if they begin one by one, when
base_rewards.json is there; a last run with all β draws the picture.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console

from fastppo.cli import parse_train
from fastppo.data.rows import load_rows, write_rows
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from fastppo.recipes.catalogue import Recipe, find
from fastppo.recipes.run import base_rewards, lay_out, look, prepare
from fastppo.rewards.limit import (
    base_reward,
    best_of_several,
    curve,
    limit,
    most_of_gain,
    share_of_gain,
    shows,
)
from fastppo.rewards.loading import reward_name
from fastppo.run.lock import held
from fastppo.run.log import read_jsonl

COLOURS = ("#c8553d", "#d99a2b", "#1f5fa8", "#3a8d5d", "#8a5a9e")
SHOWN = 3
"""Prompts whose responses are printed for each β."""

OWN = {
    "config",
    "kl_coef",
    "seed",
    "iterations",
    "reference_model",
    "output_dir",
    "resume",
    "eval_prompts",
    "eval_interval",
    "eval_rewards",
    "eval_sampling",
    "eval_patience",
    "rewards",
    "reward_weights",
    "reward_ensemble",
    "missing_eos_penalty",
    "length_penalty",
    "length_normalized_score",
}
"""Options that the study sets, or whose rewards were not those of the limit."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Where it lies and how much of it there is."""

    directory: Path
    recipe: str
    betas: tuple[float, ...]
    seeds: int
    iterations: int
    samples: int
    """Responses to each held-out prompt in an evaluation."""
    base_samples: int
    interval: int
    """Iterations between evaluations."""
    flags: tuple[str, ...] = ()
    """Options of the recipe, as `fastppo train` takes them."""

    @property
    def base(self) -> Path:
        return self.directory / "base"

    def run_dir(self, beta: float, seed: int) -> Path:
        return self.directory / f"beta-{beta:g}-seed-{seed}"

    def config(self, **options: Any) -> PPOConfig:
        """The recipe's, with every held-out prompt answered several times."""
        recipe = parse_train(["--config", str(self.base / "run.yaml"), *self.flags])
        shown: dict[str, Any] = {
            "eval_prompts": str(self.base / f"held_out_{self.samples}.jsonl"),
            "eval_interval": self.interval,
            "eval_rewards": [*recipe.rewards, *recipe.monitor_rewards],
            "eval_sampling": "sampled",
            "reference_model": recipe.model,  # without a penalty too: it is the x axis
            "iterations": self.iterations,
        }
        return replace(recipe, **shown | options)

    @property
    def identity(self) -> str:
        """What the runs of one directory have in common."""
        sizes = [self.recipe, self.iterations, self.samples, self.interval]
        return json.dumps([*sizes, *self.flags])

    def check_directory(self) -> None:
        """Raises SystemExit if it holds a study of another size or with other options."""
        kept = self.directory / "study.json"
        there = kept.read_text() if kept.exists() else None
        if there != self.identity and (there or any(self.directory.glob("beta-*/look.json"))):
            raise SystemExit(
                f"{self.directory} holds a study of {there or 'unknown options'}, expected "
                f"{self.identity}: name another directory"
            )


def run(study: Study) -> None:
    """All that is not there yet."""
    console = Console(stderr=True)
    recipe = find(study.recipe)
    study.check_directory()
    with held(study.base):
        lay_out(recipe, study.base)
        for beta in study.betas:
            study.config(kl_coef=beta)  # errors before anything is made
        (study.directory / "study.json").write_text(study.identity)
        make_base(study, recipe, console)
    for seed in range(study.seeds):
        for beta in study.betas:
            output = study.run_dir(beta, seed)
            if not (output / "look.json").exists():
                run_one(study, beta, seed, console)
            for checkpoint in output.glob("checkpoint-*"):  # gigabytes each, and of no more use
                shutil.rmtree(checkpoint)


def make_base(study: Study, recipe: Recipe, console: Console) -> None:
    """What the runs begin with, and samples of the base, if there are not as many yet."""
    prepare(recipe, study.base, 0, console)
    held_out = load_rows(str(study.base / "held_out.jsonl"))
    several = study.base / f"held_out_{study.samples}.jsonl"
    if not several.exists():
        write_rows(several, [row for row in held_out for _ in range(study.samples)])
    kept = study.directory / "base_rewards.json"
    if kept.exists() and len(json.loads(kept.read_text())[0]) >= study.base_samples:
        return
    options = {
        "eval_prompts": str(study.base / "held_out.jsonl"),
        "output_dir": str(study.base),
    }
    trainer = PPOTrainer(study.config(**options), console=console)
    assert trainer.evaluation.prompts is not None
    found = base_rewards(trainer, trainer.evaluation.prompts, study.base_samples)
    kept.write_text(json.dumps(found))


def run_one(study: Study, beta: float, seed: int, console: Console) -> None:
    """One run with its samples, from its checkpoint if an interrupted one left any."""
    output = study.run_dir(beta, seed)
    resume = any(output.glob("checkpoint-*"))
    if not resume and output.exists():
        with held(output):  # not that of another process
            shutil.rmtree(output)  # what an interrupted run left
    config = study.config(kl_coef=beta, seed=seed, output_dir=str(output), resume=resume)
    trainer = PPOTrainer(config, console=console)
    trainer.train()
    assert trainer.evaluation.prompts is not None
    seen = look(trainer, trainer.evaluation.prompts)
    kept = {name: seen[name] for name in ("reward", "kl", "prompts", "completions")}
    (output / "look.json").write_text(json.dumps(kept))


def curves(study: Study, beta: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(KL, proxy, gold) [seeds, evaluations] on the held-out prompts. The gold reward is the first
    that is monitored, the proxy itself where there is none."""
    config = study.config()
    names = [reward_name(spec) for spec in (*config.rewards, *config.monitor_rewards)]
    proxy, gold = names[0], names[len(config.rewards) :][:1] or names[:1]
    found = []
    for seed in range(study.seeds):
        records = read_jsonl(study.run_dir(beta, seed) / "metrics.jsonl")
        evaluated = [record for record in records if "eval/reward" in record]
        keys = ("eval/kl", f"eval/reward/{proxy}", f"eval/reward/{gold[0]}")
        found.append([[record[key] for record in evaluated] for key in keys])
    kl, first, second = np.array(found).transpose(1, 0, 2)
    return kl, first, second


def table(study: Study) -> list[str]:
    """The last evaluation of each β, mean ± deviation of the seeds, as Markdown; then best of n."""
    rewards = json.loads((study.directory / "base_rewards.json").read_text())
    lines = [
        "| policy | KL, nats | proxy | gold | r − β·KL | limit at that KL | share of its gain |",
        "|---|---|---|---|---|---|---|",
        f"| the base | 0 | {base_reward(rewards):.3f} | | | | |",
    ]
    for beta in study.betas:
        kl, proxy, gold = (values[:, -1] for values in curves(study, beta))
        lines.append(
            f"| β = {beta:g} | {_spread(kl, 2)} | {_spread(proxy)} | {_spread(gold)} | "
            f"{_spread(proxy - beta * kl)} | {_limit_cells(rewards, proxy, kl)} |"
        )
    for best in best_of_several(rewards):
        cells = _limit_cells(rewards, np.array([best.reward]), np.array([best.kl]))
        lines.append(f"| best of {best.n} | {best.kl:.2f} | {best.reward:.3f} | | | {cells} |")
    return lines


def along(study: Study) -> list[str]:
    """Every evaluation of each β, means over the seeds, as Markdown."""
    rewards = json.loads((study.directory / "base_rewards.json").read_text())
    evaluated = range(study.interval, study.iterations + 1, study.interval)
    lines = [
        f"| after {', '.join(map(str, evaluated))} iterations | KL, nats | proxy | gold | "
        "share of the limit's gain |",
        "|---|---|---|---|---|",
    ]
    for beta in study.betas:
        kl, proxy, gold = curves(study, beta)
        cells = [", ".join(f"{x:.2f}" for x in kl.mean(0))]
        cells += [", ".join(f"{x:.3f}" for x in values.mean(0)) for values in (proxy, gold)]
        shares = [
            _limit_cells(rewards, *at).split(" | ")[1] for at in zip(proxy.T, kl.T, strict=True)
        ]
        lines.append(f"| β = {beta:g} | {' | '.join([*cells, ', '.join(shares)])} |")
    return lines


def _spread(values: np.ndarray, digits: int = 3) -> str:
    """Mean ± deviation of the seeds; of one seed its value."""
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {values.std(ddof=1):.{digits}f}"


def _limit_cells(rewards: Any, reward: np.ndarray, kl: np.ndarray) -> str:
    """The limit at those KLs and the share of its gain, means over the seeds; or what the share is
    at most, where samples of the base do not show the limit of every seed."""
    at = [limit(rewards, max(each, 0.0)) for each in kl]
    seeds = list(zip(at, reward, kl, strict=True))
    all_shown = all(shows(one, k) for one, _, k in seeds)
    shares = [
        share_of_gain(rewards, r, k) if shows(one, k) else most_of_gain(rewards, r, k)
        for one, r, k in seeds
    ]
    mean = float(np.mean(shares))
    if all_shown:
        share = "" if math.isnan(mean) else f"{mean:.2f}"
        return f"{np.mean([one.reward for one in at]):.3f} | {share}"
    return f"not shown | {'no bound' if math.isnan(mean) else f'≤ {mean:.2f}'}"


def samples(study: Study) -> list[str]:
    """Responses of each β, seed 0, to the same prompts."""
    lines = []
    for beta in study.betas:
        seen = json.loads((study.run_dir(beta, 0) / "look.json").read_text())
        step = max(1, len(seen["prompts"]) // SHOWN)
        lines += [f"β = {beta:g}: KL {seen['kl']:.2f}, reward {seen['reward']:.3f}"]
        lines += [
            f"    {seen['prompts'][row]} …{seen['completions'][row]}"
            for row in range(0, step * SHOWN, step)
            if row < len(seen["prompts"])
        ]
    return lines


def draw(study: Study, path: Path) -> None:
    """Left the reward against the KL, with the limit; right gold against proxy."""
    rewards = json.loads((study.directory / "base_rewards.json").read_text())
    plt.rcParams.update({"font.size": 10, "font.family": "sans-serif"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    farthest = 0.0
    for beta, colour in zip(study.betas, itertools.cycle(COLOURS), strict=False):
        kl, proxy, gold = curves(study, beta)
        farthest = max(farthest, float(kl.max()))
        for axis, x, y in ((left, kl, proxy), (right, proxy, gold)):
            for one_x, one_y in zip(x, y, strict=True):  # the band: every seed
                axis.plot(one_x, one_y, color=colour, linewidth=0.7, alpha=0.4)
            axis.plot(x.mean(0), y.mean(0), color=colour, linewidth=2, label=f"β = {beta:g}")
    kls = list(np.linspace(0.0, max(farthest, 1.0), 100))
    at = curve(rewards, kls)
    shown = itertools.takewhile(lambda each: shows(*each), zip(at, kls, strict=True))
    seen = [(one.kl, one.reward) for one, _ in shown]
    if seen:
        left.plot(*zip(*seen, strict=True), color="black", linewidth=1.4, label="the limit")
    best = best_of_several(rewards)
    left.scatter([b.kl for b in best], [b.reward for b in best], color="black", s=18, zorder=3)
    for each in best:
        left.annotate(
            f"best of {each.n}",
            (each.kl, each.reward),
            xytext=(4, -9),
            fontsize=8,
            textcoords="offset points",
        )
    for axis, title, x_label, y_label in (
        (left, "Reward against the distance", "KL to the base, nats per response", "reward"),
        (right, "Gold against proxy", "reward, trained on", "gold reward, never trained on"),
    ):
        axis.set_title(title, loc="left", fontweight="bold", fontsize=11)
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
    left.legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("directory", type=Path, help="where the runs go; before other flags")
    parser.add_argument("--recipe", default="smollm2-sentiment")
    parser.add_argument("--betas", type=float, nargs="+", default=[0.0, 0.02, 0.05, 0.1])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="one seed, two β, few iterations")
    given, flags = parser.parse_known_args(arguments)
    if given.seeds < 1:
        parser.error(f"--seeds must be >= 1, got {given.seeds}")
    for flag in flags:
        name = flag.partition("=")[0]
        if name.startswith("--") and name[2:].replace("-", "_") in OWN:
            parser.error(f"{name} is set by the study; name other options of the recipe")
    quick = given.quick
    interval = 2 if quick else 5
    if not quick and given.iterations < interval:
        parser.error(f"--iterations must be >= {interval}, the interval of the evaluations")
    study = Study(
        directory=given.directory,
        recipe=given.recipe,
        betas=(0.0, 0.05) if quick else tuple(given.betas),
        seeds=1 if quick else given.seeds,
        iterations=6 if quick else given.iterations,
        samples=2 if quick else 8,
        base_samples=16 if quick else 320,
        interval=interval,
        flags=tuple(flags),
    )
    run(study)
    draw(study, study.directory / "reward-kl.png")
    print("\n".join([*table(study), "", *along(study), "", *samples(study)]))


if __name__ == "__main__":
    main()
