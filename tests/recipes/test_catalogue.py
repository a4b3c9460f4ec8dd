"""The list of recipes and their configs."""

from __future__ import annotations

from importlib.resources import files

import pytest
import yaml

from fastppo.plugins.adapters import is_address
from fastppo.ppo.options.config import PPOConfig
from fastppo.recipes.catalogue import RECIPES, Recipe, find

NAMES = [recipe.name for recipe in RECIPES]


def _options(recipe: Recipe, out: str = "runs/x") -> PPOConfig:
    return PPOConfig(**yaml.safe_load(recipe.config(out)))


def test_the_list_has_every_config_of_the_folder_once() -> None:
    configs = [
        item.name.removesuffix(".yaml")
        for item in files("fastppo.recipes").iterdir()
        if item.name.endswith(".yaml")
    ]
    assert sorted(configs) == sorted(NAMES)


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_a_config_is_valid_and_reads_the_shipped_files(recipe: Recipe) -> None:
    config = _options(recipe)
    assert config.model
    assert config.prompts.startswith("runs/x/prompts.") or is_address(config.prompts)
    assert config.output_dir == "runs/x/ppo"
    paid_by = [*config.rewards, *config.monitor_rewards, config.environment]
    of_files = {spec.partition(".py:")[0] + ".py" for spec in paid_by if ".py:" in spec}
    assert of_files == {f"runs/x/{name}" for name in recipe.shipped.values()}


def test_the_name_of_the_folder_is_quoted() -> None:
    out = 'köln # "1": x'
    assert _options(find("arithmetic"), out).prompts == f"{out}/prompts.jsonl"


def test_an_unknown_recipe_raises_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"'aritmetic'.* arithmetic"):
        find("aritmetic")
    with pytest.raises(ValueError, match="'zzz'"):
        find("zzz")
    assert find("calculator").name == "calculator"
