"""What the catalogue says of the recipes is so."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, Qwen2Config

from fastppo.ppo.config import PPOConfig
from fastppo.recipes.catalogue import RECIPES, Recipe, find

ROOT = Path(__file__).parents[2]
NAMES = [recipe.name for recipe in RECIPES]
NOT_RUN = [recipe for recipe in RECIPES if recipe.minutes == "not run"]

SHAPES = {  # of the models' config.json
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064, False),
}
SIZES = {"qwen2.5-0.5b": 0.49, "qwen2.5-7b": 7.62}
"""Parameters, billions, as the models' cards have them."""


def _options(recipe: Recipe, out: str = "runs/x") -> PPOConfig:
    return PPOConfig(**yaml.safe_load(recipe.config(out)))


def test_every_config_of_the_folder_is_in_the_catalogue_once() -> None:
    configs = [
        item.name.removesuffix(".yaml")
        for item in files("fastppo.recipes").iterdir()
        if item.name.endswith(".yaml")
    ]
    assert sorted(configs) == sorted(NAMES)


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_a_config_is_one_of_fastppo_train(recipe: Recipe) -> None:
    config = _options(recipe)
    assert config.model
    assert config.prompts == "runs/x/prompts.jsonl"
    assert config.output_dir == "runs/x/ppo"
    paid_by = [*config.rewards, *config.monitor_rewards, config.environment]
    of_files = {spec.partition(".py:")[0] + ".py" for spec in paid_by if ".py:" in spec}
    assert of_files == {f"runs/x/{name}" for name in recipe.shipped.values()}
    assert recipe.config("x").startswith("# "), "the first line says what it is"


@pytest.mark.parametrize("out", ['a "b" c', "back\\slash", "köln # 1: x"])
def test_a_folder_of_any_name_stands_in_the_config(out: str) -> None:
    assert _options(find("arithmetic"), out).prompts == f"{out}/prompts.jsonl"


def test_a_name_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no recipe 'aritmetic'; did you mean arithmetic\?"):
        find("aritmetic")
    with pytest.raises(ValueError, match="no recipe 'zzz'; `fastppo recipe` lists them"):
        find("zzz")
    assert find("calculator").name == "calculator"


def _shape(name: str) -> Qwen2Config:
    """The config of a public model."""
    hidden, mlp, layers, heads, kv, vocabulary, tied = SHAPES[name]
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        architectures=["Qwen2ForCausalLM"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", NOT_RUN, ids=lambda recipe: recipe.name)
def test_a_public_model_is_planned_to_fit_its_gpu(recipe: Recipe, tmp_path: Path) -> None:
    """From a config.json with the model's shape, in a process where no memory is filled."""
    shape = _shape(recipe.name)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(shape).num_parameters()
    assert parameters / 1e9 == pytest.approx(SIZES[recipe.name], abs=0.005)
    shape.save_pretrained(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(recipe.config(tmp_path))
    flags = ["--config", str(tmp_path / "run.yaml"), "--model", str(tmp_path / "model")]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "fastppo",
            "plan",
            *flags,
            "--memory",
            "80",
            "--prompt_tokens",
            "64",
        ],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "fits 80 GB" in done.stdout
