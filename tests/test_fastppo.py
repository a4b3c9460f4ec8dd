"""The public names of `fastppo`, imported on first use."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

from processes import python

import fastppo


def test_public_names_come_from_their_modules() -> None:
    for name in fastppo.__all__:
        home = importlib.import_module(fastppo._HOME_OF[name])
        assert getattr(fastppo, name) is getattr(home, name), name
        assert getattr(home, name).__module__.split(".")[0] in ("fastppo", "fastppo_kernels"), name


def test_type_checkers_see_all_public_names() -> None:
    source = ast.parse(Path(fastppo.__file__).read_text(encoding="utf-8"))
    seen = {
        (node.module, alias.name)
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastppo")
        for alias in node.names
    }
    assert seen == {(home, name) for name, home in fastppo._HOME_OF.items()}
    assert sorted(fastppo._HOME_OF) == fastppo.__all__ == sorted(fastppo.__all__)
    assert {*fastppo.__all__} <= {*dir(fastppo)}


def test_modules_are_loaded_on_first_use() -> None:
    uses = (
        "import fastppo",
        "fastppo.ppo_loss, fastppo.gae",
        "import torch; fastppo.gae(torch.zeros(1, 2), torch.zeros(1, 2))",
        "fastppo.PPOTrainer",
    )
    source = "\n".join(f"{use}\nprint(*sys.modules)" for use in uses)
    lines = python("-c", f"import sys\n{source}").stdout.splitlines()
    imported, losses, called, trainer = (set(line.split()) for line in lines)
    assert not {"torch", "transformers"} & imported
    assert "torch" in losses
    assert not {"transformers", "numba", "fastppo.ppo.trainer"} & losses
    assert "numba" in called
    assert "fastppo.ppo.trainer" not in called
    assert "fastppo.ppo.trainer" in trainer
