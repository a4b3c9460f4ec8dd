"""`fastppo recipe`: write a recipe's files to a folder, prepare its data and model, and train.

`fastppo train --config run.yaml` repeats the run of the folder. Existing files are kept, so a
changed config or reward is used.
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
"""File that names the folder's recipe and is written first."""

PREPARED = "prepared.json"
"""File that names the recipe and its seed and is written after the preparation."""

TRAINED = ("model", "reward_model")
"""Folders of the models that a preparation trains."""

WIDE = 100
"""Terminal width in columns from which the list of recipes shows the hardware requirements."""


def write_files(recipe: Recipe, out: Path) -> Path:
    """Write run.yaml and the shipped files unless they exist; return the path of run.yaml.

    Raises:
        ImportError: a package is missing. Nothing is written.
        ValueError: the folder belongs to another recipe.
    """
    recipe.check_packages()
    out.mkdir(parents=True, exist_ok=True)
    owner = out / OWNER
    owner_name = owner.read_text("utf-8").strip() if owner.exists() else recipe.name
    if owner_name != recipe.name:
        raise ValueError(
            f"{out} has the files of recipe {owner_name}, expected {recipe.name}: choose another "
            "--out"
        )
    contents = {OWNER: f"{recipe.name}\n", "run.yaml": recipe.config(out)}
    for shipped_name, name in recipe.shipped.items():
        contents[name] = files("fastppo.recipes").joinpath(shipped_name).read_text("utf-8")
    for name, text in contents.items():
        if not (out / name).exists():
            write_whole(out / name, text)
    return out / "run.yaml"


def prepare(recipe: Recipe, out: Path, seed: int, console: Console) -> None:
    """Make the data and models of a config once; start over after an interrupted preparation.

    Raises:
        ImportError: a package is missing.
        ValueError: the folder was prepared for another recipe or seed.
    """
    recipe.check_packages()
    wanted = {"recipe": recipe.name, "seed": seed if recipe.seeded else None}
    record = out / PREPARED
    if record.exists():
        prepared = json.loads(record.read_text())
        if prepared != wanted:
            raise ValueError(
                f"{out} was prepared for recipe {prepared['recipe']} with seed {prepared['seed']}, "
                f"expected {wanted['recipe']} with seed {wanted['seed']}: choose another --out"
            )
        return
    for name in TRAINED:
        shutil.rmtree(out / name, ignore_errors=True)
    recipe.prepare(out, seed, console)
    write_whole(record, json.dumps(wanted))


def run_recipe(
    recipe: Recipe,
    out: Path,
    config: PPOConfig,
    *,
    only_prepare: bool = False,
) -> None:
    """Prepare a recipe and train it.

    Args:
        out: the folder that `write_files` wrote to.
        config: the options of its run.yaml and of the flags.
        only_prepare: whether to stop before training.
    """
    console = Console(stderr=True)
    time = recipe.minutes if recipe.minutes == "not run" else f"{recipe.minutes} minutes"
    say(console, f"{recipe.name}: {recipe.description}\n{recipe.hardware}; {time}")

    from fastppo.ppo.setup.build import world_of
    from fastppo.ppo.trainer import PPOTrainer
    from fastppo.run.directory import check_no_run

    world = world_of(config)
    if world.size > 1:
        raise ValueError(
            f"a recipe runs in one process, got {world.size}: prepare it, then run torchrun -m "
            f"fastppo train --config {out / 'run.yaml'}"
        )
    if not config.resume and not only_prepare:
        check_no_run(config.output_dir)
    prepare(recipe, out, config.seed, console)
    if only_prepare:
        say(console, f"model   {config.model}\nprompts {config.prompts}")
        say(console, f"train   fastppo train --config {out / 'run.yaml'}")
        return
    PPOTrainer(config, console=console, world=world).train()
    say(console, f"\nreport  {config.output_dir}/report.html\npolicy  {config.output_dir}/policy")
    say(console, f"again   fastppo train --config {out / 'run.yaml'} --output_dir …")


def show_recipes(console: Console) -> None:
    """Print the list of recipes, with hardware requirements if the terminal is wide enough."""
    table = Table(title="fastppo recipe NAME", title_justify="left")
    table.add_column("name", no_wrap=True, min_width=max(len(recipe.name) for recipe in RECIPES))
    is_wide = console.width >= WIDE
    table.add_column("minutes", no_wrap=True)
    for title in ("task", "needs") if is_wide else ("task",):
        table.add_column(title)
    for recipe in RECIPES:
        cells = [recipe.name, recipe.minutes, recipe.description]
        if is_wide:
            cells.append(recipe.hardware)
        table.add_row(*cells)
    console.print(table)
