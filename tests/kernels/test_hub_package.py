"""The kernels as a package of the Hub's form: the same results, beside FastPPO in one process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import hub_package
import pytest
import torch

import fastppo


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """What the Hub's library imports for a CPU, under the name that it imports it by. Once: the
    operators of a name can be registered once in a process."""
    folder = tmp_path_factory.mktemp("hub")
    hub_package.write(folder)
    build = folder / "build" / "torch-cpu"
    name = json.loads((build / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, build / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _loss(functions: Any, backend: str) -> list[torch.Tensor]:
    """The loss and its gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 40, generator=generator).requires_grad_()
    tokens = torch.randint(40, (3,), generator=generator)
    advantages = torch.randn(3, generator=generator)
    out = functions.ppo_loss(
        logits, tokens, torch.full((3,), -4.0), advantages, entropy_coef=0.1, backend=backend
    )
    out.loss.backward()
    assert logits.grad is not None
    return [out.loss.detach(), logits.grad]


@pytest.mark.parametrize(
    "backend", [pytest.param("cpu", marks=pytest.mark.slow), "torch", "triton"]
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy, of what is meant to overflow
def test_the_package_computes_what_fastppo_does_with_operators_of_its_own(
    backend: str, package: ModuleType
) -> None:
    for ours, theirs in zip(_loss(fastppo, backend), _loss(package, backend), strict=True):
        assert torch.equal(ours, theirs)
    operators = package.functional.operators.ppo_loss_op
    assert operators.name == f"{package.__name__}::ppo_loss"
    assert set(package.__all__) == set(fastppo.__all__) - {"PPOConfig", "PPOTrainer"}


def test_a_source_that_imports_the_trainer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not part of the package: from fastppo\.ppo import"):
        hub_package._with_relative_imports("from fastppo.ppo import config\n", Path("file.py"))


LOAD = """
import pathlib, sys, kernels, torch
package = kernels.get_local_kernel(pathlib.Path(sys.argv[1]))
logits = torch.zeros(2, 5)
old_logprobs = torch.zeros(2) - 1.6
tokens = torch.tensor([1, 2])
out = package.ppo_loss(logits, tokens, old_logprobs, torch.ones(2), backend="torch")
(loaded,) = kernels.get_loaded_kernels()
print(loaded.metadata.name, "fastppo" in sys.modules, f"{out.loss:.2f}")
"""


def test_the_library_of_the_hub_loads_the_package(tmp_path: Path) -> None:
    """`kernels/` of this tree would answer to `import kernels` where that library is not there."""
    pytest.importorskip("kernels.load", reason="pip install 'kernels>=0.17'")
    hub_package.write(tmp_path)
    printed = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.split()[-3:] == ["fastppo", "False", "-0.99"]
