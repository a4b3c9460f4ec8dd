"""`fastppo recipe`: lays the files of a recipe out in a folder, makes what is missing, trains, and
says what came of it.

The folder then holds a run that `fastppo train --config run.yaml` repeats: nothing here does what
one's own run could not. A file that is there already stays as it is, so what a person has changed
is what runs.
"""

from __future__ import annotations

import json
import math
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fastppo.data.prompts import Prompts
from fastppo.ppo.build import world_of
from fastppo.ppo.checks import random_state_restored
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from fastppo.recipes.catalogue import RECIPES, Recipe
from fastppo.rewards.limit import (
    BaseRewards,
    base_reward,
    best_of_several,
    limit,
    most_of_gain,
    share_of_gain,
    shows,
)
from fastppo.run.lock import held
from fastppo.run.log import check_no_run, holds_run, say
from fastppo.run.report import BASE_REWARDS

OWNER = "recipe.txt"
"""In the folder, from the first file on: the recipe whose it is."""

MARK = "prepared.json"
"""In the folder, when all is made: by which recipe, and from which seed."""

STAGES = ("model", "reward_model")
"""Folders of what a preparation trains."""

LOOKED_AT = 192
"""Responses to held-out prompts, before and after; more than one to each where they are few."""

AT_ONCE = 256
"""Samples of the base that are generated at once."""

WIDE = 100
"""Columns of a terminal from which on the list of recipes says what they take, and how long."""

SHOWN = 3
"""Prompts whose responses before and after are printed."""


def lay_out(recipe: Recipe, out: Path) -> Path:
    """Writes run.yaml and the shipped files that are not there yet; the path of run.yaml.

    Raises:
        ImportError: a package is missing; nothing is written then.
        ValueError: the folder is another recipe's, or a file.
    """
    recipe.check_packages()
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file")
    out.mkdir(parents=True, exist_ok=True)
    owner = out / OWNER
    found = owner.read_text("utf-8").strip() if owner.exists() else recipe.name
    if found != recipe.name:
        raise ValueError(
            f"{out} holds the files of recipe {found}, expected {recipe.name}: choose another --out"
        )
    wanted = {OWNER: f"{recipe.name}\n", "run.yaml": recipe.config(out)}
    for name, copied in recipe.shipped.items():
        wanted[copied] = files("fastppo.recipes").joinpath(name).read_text("utf-8")
    for name, text in wanted.items():
        if not (out / name).exists():
            (out / name).write_text(text, encoding="utf-8")
    return out / "run.yaml"


def prepare(recipe: Recipe, out: Path, seed: int, console: Console) -> None:
    """Makes what the config reads, once. What an interrupted preparation left is made anew.

    Raises:
        ImportError: a package is missing.
        ValueError: the folder is another recipe's, or of another seed.
    """
    recipe.check_packages()
    made = {"recipe": recipe.name, "seed": seed if recipe.seeded else None}
    mark = out / MARK
    if not mark.exists():
        _discard_stages(out)
        recipe.prepare(out, seed, console)
        mark.write_text(json.dumps(made))
        return
    found = json.loads(mark.read_text())
    if found != made:
        raise ValueError(
            f"{out} was made for recipe {found['recipe']} with seed {found['seed']}, expected "
            f"{made['recipe']} with seed {made['seed']}: choose another --out"
        )


def _discard_stages(out: Path) -> None:
    """Deletes the stages that a preparation began, or ended without the others."""
    for stage in STAGES:
        if holds_run(out / stage):
            with held(out / stage):  # not that of a preparation at work
                shutil.rmtree(out / stage)


def run_recipe(
    recipe: Recipe, out: str | Path, config: PPOConfig, console: Console | None = None
) -> dict[str, Any]:
    """Makes what is missing, trains, and prints held-out prompts before and after.

    Args:
        out: the folder of `lay_out`.
        config: of its run.yaml, with a person's flags.

    Returns:
        dict: `after`, as `look` gives it, and `before`, unless the run is resumed; `limit`, what
        `beside_the_limit` gives, where the recipe has samples of the base.
    """
    out, console = Path(out), console or Console(stderr=True)
    world = world_of(config)
    if world.size > 1:
        raise ValueError(
            f"a recipe runs in one process, got {world.size}: torchrun -m fastppo train --config "
            f"{out / 'run.yaml'}, once it is prepared"
        )
    recipe.check_packages()
    if not config.resume:
        check_no_run(config.output_dir)
    say(console, f"{recipe.name}: {recipe.line}\n{recipe.takes}; {_minutes(recipe)}")
    prepare(recipe, out, config.seed, console)
    trainer = PPOTrainer(config, console=console, world=world)
    held_out = trainer.evaluation.prompts or trainer.prompts
    assert held_out is not None
    result: dict[str, Any] = {}
    rewards = _base_rewards(recipe, trainer, held_out)
    if not config.resume:
        result["before"] = look(trainer, held_out)
    trainer.train()
    result["after"] = look(trainer, held_out)
    _print(console, result)
    if rewards is not None:
        try:
            result["limit"] = beside_the_limit(rewards, result["after"])
        except ValueError as error:  # the training is done: no reason to fail
            say(console, f"no limit beside the result: {error}", "yellow")
        else:
            path = Path(config.output_dir) / "limit.json"
            path.write_text(json.dumps(result["limit"], indent=2, allow_nan=False))
            _print_limit(console, result["limit"])
    say(console, f"\nreport  {config.output_dir}/report.html\npolicy  {config.output_dir}/policy")
    say(console, f"again   fastppo train --config {out / 'run.yaml'} --output_dir …")
    return result


def _minutes(recipe: Recipe) -> str:
    return recipe.minutes if recipe.minutes.startswith("not ") else f"{recipe.minutes} minutes"


# ----------------------------------------------------------------------------------- looking at it


def look(trainer: PPOTrainer, prompts: Prompts) -> dict[str, Any]:
    """What `PPOTrainer.evaluate` says of `LOOKED_AT` responses to the prompts, and `fluency`: the
    mean logprob of their tokens under the reference, nats.

    A policy's own tokens have the mean logprob −H under it and −H − KL under the reference.
    """
    count = min(len(prompts), LOOKED_AT)
    rows = [row for row in range(count) for _ in range(max(1, LOOKED_AT // count))]
    found = trainer.evaluate(prompts.select(rows))
    if trainer.reference is not None:
        found["fluency"] = -(found["entropy"] + found["kl"] / found["response_length"])
    return found | {"prompts": [prompts.prompts[row] for row in rows]}


def _base_rewards(recipe: Recipe, trainer: PPOTrainer, prompts: Prompts) -> BaseRewards | None:
    """Rewards of the base; those that a resumed run has, or None."""
    path = Path(trainer.config.output_dir) / BASE_REWARDS
    if recipe.base_samples == 0:
        return None
    if trainer.config.resume:
        return json.loads(path.read_text()) if path.exists() else None
    say(trainer.console, f"{recipe.base_samples} samples of the base to each held-out prompt …")
    found = base_rewards(trainer, prompts, recipe.base_samples)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    return found


def base_rewards(trainer: PPOTrainer, prompts: Prompts, samples: int) -> BaseRewards:
    """What responses of the policy as it is earn, for `fastppo.rewards.limit`.

    Few prompts at a time, with all their samples: each part has the same draws.
    """
    at_once = max(1, AT_ONCE // samples)
    found: BaseRewards = []
    for begin in range(0, len(prompts), at_once):
        end = min(begin + at_once, len(prompts))
        part = prompts.select([row for row in range(begin, end) for _ in range(samples)])
        with random_state_restored(trainer.config.seed):
            part, rollout = trainer.turns.play(part, trainer.engine, trainer.sampling)
            total = trainer.score(part, rollout, trainer.config).total
        found += [
            [None if math.isnan(reward) else reward for reward in earned]
            for earned in total.view(end - begin, samples).tolist()
        ]
    return found


def beside_the_limit(rewards: BaseRewards, after: dict[str, Any]) -> dict[str, Any]:
    """A policy beside the base, the limit at its KL, and the best of n.

    Args:
        rewards: [prompts, samples] of the base.
        after: `reward` and `kl` of the policy, nats per response.

    Returns:
        dict: of numbers that JSON has: None in the place of one that is not finite. `shown` is
        whether the samples show the limit at that KL. If they do not, `share_of_gain` is None, and
        `most_of_gain` what it is at most, where they tell.

    Raises:
        ValueError: the KL is not finite, or too few of the samples have a reward.
    """
    reward, kl = after["reward"], after["kl"]
    if not math.isfinite(kl):
        raise ValueError(f"the KL must be finite, got {kl}")
    best = limit(rewards, max(kl, 0.0))
    shown = shows(best, kl)
    return {
        "base_reward": base_reward(rewards),
        "reward": _finite(reward),
        "kl": kl,
        "limit": {name: _finite(value) for name, value in best._asdict().items()},
        "shown": shown,
        "share_of_gain": _finite(share_of_gain(rewards, reward, kl)) if shown else None,
        "most_of_gain": None if shown else _finite(most_of_gain(rewards, reward, kl)),
        "samples": len(rewards[0]),
        "best_of": [each._asdict() for each in best_of_several(rewards)],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ----------------------------------------------------------------------------------------- printing

ROWS = (
    ("reward (trained on)", "reward", "{:.3f}"),
    ("KL to the start (nats per response)", "kl", "{:.2f}"),
    ("entropy (nats per token)", "entropy", "{:.2f}"),
    ("fluency (logprob under the start, nats per token)", "fluency", "{:.2f}"),
    ("response length (tokens)", "response_length", "{:.1f}"),
)


def _print(console: Console, result: dict[str, Any]) -> None:
    looks = {"before PPO": result.get("before"), "after PPO": result["after"]}
    shown = {title: found for title, found in looks.items() if found is not None}
    after = result["after"]
    count = len(after["prompts"])
    table = Table(title=f"{count} responses to held-out prompts", title_justify="left")
    table.add_column("")
    for title in shown:
        table.add_column(title, justify="right")
    monitors = [
        (f"{name.removeprefix('monitor/')} (never trained on)", name, "{:.3f}")
        for name in after
        if name.startswith("monitor/")
    ]
    for title, key, form in (ROWS[0], *monitors, *ROWS[1:]):
        if key in after:
            table.add_row(title, *(form.format(found[key]) for found in shown.values()))
    console.print(table)
    step = count // SHOWN or 1
    for row in range(0, min(count, step * SHOWN), step):
        say(console, f"\n{_as_text(after['prompts'][row])}", "bold")
        for title, found in shown.items():
            say(console, f"  {title:10}  {found['completions'][row].strip()}")


def _as_text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def _print_limit(console: Console, found: dict[str, Any]) -> None:
    best, share = found["limit"], found["share_of_gain"]
    samples = f"{found['samples']} samples of the base to a prompt"
    lines = [f"The base earns {found['base_reward']:.3f}."]
    if found["shown"]:
        lines.append(
            f"At {found['kl']:.2f} nats no policy earns more than about {best['reward']:.3f}, by "
            f"{samples}, {best['effective_samples']:.1f} of them effective."
        )
    else:
        lines.append(
            f"What a policy can earn at {found['kl']:.2f} nats is beyond what {samples} show."
        )
    if found["reward"] is not None:
        of_gain = "" if share is None else f": about {share:.0%} of the gain"
        if found["most_of_gain"] is not None:
            of_gain = f": at most about {found['most_of_gain']:.0%} of the gain there"
        lines.append(f"This one earns {found['reward']:.3f}{of_gain}.")
    lines += [
        f"Best of {each['n']}: {each['reward']:.3f} at {each['kl']:.2f} nats."
        for each in found["best_of"]
    ]
    say(console, "\n" + " ".join(lines))


def show_recipes(console: Console) -> None:
    """The list of all recipes; on a narrow terminal their names and what they are."""
    table = Table(title="fastppo recipe NAME", title_justify="left")
    table.add_column("name", no_wrap=True, min_width=max(len(recipe.name) for recipe in RECIPES))
    others = ("what", "takes", "minutes") if console.width >= WIDE else ("what",)
    for title in others:
        table.add_column(title)
    for recipe in RECIPES:
        cells = {"what": recipe.line, "takes": recipe.takes, "minutes": recipe.minutes}
        table.add_row(recipe.name, *(cells[title] for title in others))
    console.print(table)
