"""`fastppo recipe`: lays out the files of a recipe in a folder, makes what is missing, and trains.

The folder then holds a run that `fastppo train --config run.yaml` repeats. A file that already
exists is left as it is, so a config or reward that somebody has changed is the one that runs.
"""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fastppo.data.files import write_whole
from fastppo.ppo.options.config import PPOConfig
from fastppo.recipes.catalogue import RECIPES, Recipe
from fastppo.run.progress import say

OWNER = "recipe.txt"
"""In the folder, from the first file on: the name of its recipe."""

PREPARED = "prepared.json"
"""In the folder, once all is made: by which recipe, and from which seed."""

STAGES = ("model", "reward_model")
"""Folders of the models that a preparation trains."""

WIDE = 100
"""Columns of a terminal from which on the list of recipes says what they take."""


def lay_out(recipe: Recipe, out: Path) -> Path:
    """Writes run.yaml and the shipped files that are not there yet; returns the path of run.yaml.

    Raises:
        ImportError: a package is missing; nothing is written then.
        ValueError: the folder is another recipe's, or a file.
    """
    recipe.check_packages()
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file")
    out.mkdir(parents=True, exist_ok=True)
    owner = out / OWNER
    owner_name = owner.read_text("utf-8").strip() if owner.exists() else recipe.name
    if owner_name != recipe.name:
        raise ValueError(
            f"{out} holds the files of recipe {owner_name}, expected {recipe.name}: choose "
            "another --out"
        )
    contents = {OWNER: f"{recipe.name}\n", "run.yaml": recipe.config(out)}
    for shipped_name, name in recipe.shipped.items():
        contents[name] = files("fastppo.recipes").joinpath(shipped_name).read_text("utf-8")
    for name, text in contents.items():
        if not (out / name).exists():
            write_whole(out / name, text)
    return out / "run.yaml"


def prepare(recipe: Recipe, out: Path, seed: int, console: Console) -> None:
    """Makes what the config reads, once; what an interrupted preparation left is made anew.

    Raises:
        ImportError: a package is missing.
        ValueError: the folder is another recipe's, or of another seed.
    """
    from fastppo.run.lock import run_lock

    recipe.check_packages()
    wanted = {"recipe": recipe.name, "seed": seed if recipe.seeded else None}
    record = out / PREPARED
    if record.exists():
        prepared = json.loads(record.read_text())
        if prepared != wanted:
            raise ValueError(
                f"{out} was made for recipe {prepared['recipe']} with seed {prepared['seed']}, "
                f"expected {wanted['recipe']} with seed {wanted['seed']}: choose another --out"
            )
        return
    for stage in STAGES:
        if (out / stage).exists():
            with run_lock(out / stage):  # not that of a preparation at work
                shutil.rmtree(out / stage)
    recipe.prepare(out, seed, console)
    write_whole(record, json.dumps(wanted))


def run_recipe(
    recipe: Recipe,
    out: Path,
    config: PPOConfig,
    *,
    only_prepare: bool = False,
) -> None:
    """Makes what is missing, and trains.

    Args:
        out: the folder of `lay_out`.
        config: of its run.yaml, with a person's flags.
        only_prepare: make model and data, and train nothing.
    """
    from fastppo.ppo.setup.build import world_of
    from fastppo.ppo.trainer import PPOTrainer
    from fastppo.run.directory import check_no_run

    console = Console(stderr=True)
    world = world_of(config)
    if world.size > 1:
        raise ValueError(
            f"a recipe runs in one process, got {world.size}: torchrun -m fastppo train --config "
            f"{out / 'run.yaml'}, once it is prepared"
        )
    if not config.resume and not only_prepare:
        check_no_run(config.output_dir)
    time = recipe.minutes if recipe.minutes == "not run" else f"{recipe.minutes} minutes"
    say(console, f"{recipe.name}: {recipe.line}\n{recipe.takes}; {time}")
    prepare(recipe, out, config.seed, console)
    if only_prepare:
        say(console, f"model   {config.model}\nprompts {config.prompts}")
        say(console, f"train   fastppo train --config {out / 'run.yaml'}")
        return
    PPOTrainer(config, console=console, world=world).train()
    say(console, f"\nreport  {config.output_dir}/report.html\npolicy  {config.output_dir}/policy")
    say(console, f"again   fastppo train --config {out / 'run.yaml'} --output_dir …")


def show_recipes(console: Console) -> None:
    """The list of all recipes; on a narrow terminal without the machine that they take."""
    table = Table(title="fastppo recipe NAME", title_justify="left")
    table.add_column("name", no_wrap=True, min_width=max(len(recipe.name) for recipe in RECIPES))
    is_wide = console.width >= WIDE
    table.add_column("minutes", no_wrap=True)
    for title in ("what", "takes") if is_wide else ("what",):
        table.add_column(title)
    for recipe in RECIPES:
        cells = [recipe.name, recipe.minutes, recipe.line]
        if is_wide:
            cells.append(recipe.takes)
        table.add_row(*cells)
    console.print(table)
