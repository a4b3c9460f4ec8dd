"""The house: imports point down, `kernels/` stays a plain folder, wheels are complete."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (
    {"fastppo_kernels"},
    {"fastppo.ops", "fastppo.validation"},
    {"fastppo", "fastppo.losses", "fastppo.advantages"},
    {
        *("fastppo.batch", "fastppo.model", "fastppo.rollout", "fastppo.rollout.hf"),
        *("fastppo.rewards", "fastppo.data", "fastppo.checkpoint", "fastppo.config"),
        *("fastppo.reward_processing", "fastppo.monitor"),
        *("fastppo.metrics", "fastppo.optimizer", "fastppo.run_log", "fastppo.report"),
        *("fastppo.trainer", "fastppo.sft", "fastppo.reward_model", "fastppo.options"),
        *(
            "fastppo.value_function",
            "fastppo.reference_policy",
            "fastppo.pretrained",
            "fastppo.pretraining",
            "fastppo.parts",
            "fastppo.supervised",
            "fastppo.generate",
        ),
    },
    {
        *("fastppo.cli", "fastppo.__main__", "fastppo.bench", "fastppo.demo"),
        *("fastppo.demo_task", "fastppo.recipes"),
    },
)
"""From the ground up. A module may import from its own floor and those below."""


def _modules() -> dict[str, Path]:
    found = {}
    for base, package in ((ROOT, "fastppo"), (ROOT / "kernels", "fastppo_kernels")):
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def _floor(module: str) -> int:
    if module.split(".")[0] == "fastppo_kernels":
        return 0
    for level, names in enumerate(FLOORS):
        if module in names:
            return level
    raise AssertionError(f"{module} is on no floor: add it to FLOORS")


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if name in _modules()} or {node.module}
    return {name for name in found if name.split(".")[0] in ("fastppo", "fastppo_kernels")}


def test_imports_only_ever_point_down() -> None:
    for module, path in _modules().items():
        for imported in _imports(path):
            if (module, imported) == ("fastppo.cli", "fastppo"):
                continue  # the version
            assert _floor(imported) <= _floor(module), f"{module} imports {imported}"


def test_the_kernels_depend_on_torch_and_triton_alone() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "triton", "fastppo_kernels"}
    for path in (ROOT / "kernels" / "fastppo_kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            assert {name.split(".")[0] for name in names} <= allowed, path.name


def test_kernels_is_a_plain_folder_and_transformers_is_not_misled() -> None:
    """With an __init__.py there, transformers would take it for Hugging Face's package."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = (
        "import transformers.integrations.hub_kernels as hub, transformers\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8,\n"
        "    num_hidden_layers=1, num_attention_heads=1))\n"
        "print('fine')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip().endswith("fine"), done.stderr


def test_fastppo_imports_without_triton() -> None:
    """A machine without Triton still has the reference path."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, fastppo\n"
        "loss = fastppo.ppo_loss(torch.zeros(2, 5), torch.tensor([1, 2]), torch.zeros(2) - 1.6,\n"
        "    torch.ones(2)).loss\n"
        "print(round(loss.item(), 2))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "-0.99", done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built from a copy: setuptools leaves files in the source."""
    import shutil

    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("fastppo", "kernels", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        item = ROOT / name
        (shutil.copytree if item.is_dir() else shutil.copy)(item, source / name)
    pytest.importorskip("setuptools", "77", reason="a wheel built offline needs setuptools >= 77")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "-q", "-w", str(out), str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return next(out.glob("fastppo-*.whl"))


def test_a_wheel_holds_both_packages_and_no_top_level_kernels(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert top == {"fastppo", "fastppo_kernels"}
    for expected in (
        "fastppo/report.html.jinja",
        "fastppo/recipes/demo.yaml",
        "fastppo_kernels/reference.py",
    ):
        assert expected in names


@pytest.mark.parametrize("hub_package", [False, True], ids=["alone", "beside-hf-kernels"])
def test_an_installed_wheel_imports_from_any_folder(
    wheel: Path, hub_package: bool, tmp_path: Path
) -> None:
    """Also beside a package `kernels` as Hugging Face publishes it."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    if hub_package:
        (site / "kernels").mkdir()
        (site / "kernels" / "__init__.py").write_text("NAME = 'the package of that name'\n")
    code = (
        "import fastppo, fastppo_kernels.reference, fastppo.trainer\n"
        "print(fastppo.__file__, fastppo_kernels.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.count(str(site)) == 2, done.stderr
