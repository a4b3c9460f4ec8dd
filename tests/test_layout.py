"""Layout: modules loaded by an import, files of the wheel, `kernels/` as a plain folder.

The contracts of imports are in pyproject.toml; `lint-imports` checks them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from processes import ROOT, loaded_after, python

import fastppo

# ------------------------------------------------------------------------------------- the imports


def test_kernels_is_a_plain_folder() -> None:
    """With an __init__.py, transformers would mistake it for the package `kernels`."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_fastppo_imports_without_triton() -> None:
    """Without Triton there is the torch backend."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, fastppo\n"
        "loss = fastppo.ppo_loss(torch.zeros(2, 5), torch.tensor([1, 2]), torch.zeros(2) - 1.6,\n"
        "    torch.ones(2)).loss\n"
        "print(round(loss.item(), 2))"
    )
    assert python("-c", code).stdout.strip() == "-0.99"


def test_options_are_read_without_torch() -> None:
    """Importing torch takes seconds; a misspelt option is reported before."""
    modules = (
        "ppo.options.config",
        "stages.options",
        "generate_options",
        "run.paths",
        "run.signals",
    )
    imports = "; ".join(f"import fastppo.{module}" for module in modules)
    loaded = loaded_after(imports)
    assert "fastppo.ppo.options.config" in loaded
    assert not {"torch", "transformers", "numpy"} & loaded


@pytest.mark.parametrize("flags", ["--help", "--version", "bench --help", "plan --help"])
def test_help_needs_no_torch(flags: str) -> None:
    loaded = loaded_after(
        f"from fastppo import cli\ntry: cli.main({flags.split()})\nexcept SystemExit: pass"
    )
    assert "fastppo" in loaded
    assert not {"torch", "transformers", "numpy"} & loaded


# ------------------------------------------------------------------------------------ the contracts

PLANTED = {
    "layers": ("fastppo/data/text.py", "import fastppo.models.trunk"),
    "circles": ("fastppo/data/datasets.py", "import fastppo.data.prompts"),
    "kernels": ("kernels/fastppo_kernels/records.py", "import fastppo.data.text"),
    "adapters": ("fastppo/ppo/evaluation.py", "import fastppo.environments.agents"),
    "report": ("fastppo/ppo/training_run.py", "import fastppo.run.report.report"),
    "stages": ("fastppo/stages/sft.py", "import fastppo.ppo.state"),
    "plan": ("fastppo/ppo/evaluation.py", "import fastppo.ppo.plan.plan"),
}
"""An import that breaks each contract of pyproject.toml, and the file where it is planted."""


@pytest.fixture(scope="module")
def copied_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages and their contracts."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("fastppo", "kernels"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def _broken(tree: Path) -> list[str]:
    """Return the names of the contracts that `lint-imports` finds broken."""
    code = "import sys; from importlinter.cli import lint_imports_command as run; run()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "kernels")])},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert any(line.startswith("Contracts: ") for line in lines), done.stdout + done.stderr
    return [line.removesuffix(" BROKEN") for line in lines if line.endswith(" BROKEN")]


def _contracts() -> dict[str, str]:
    """Return the contracts' names by id."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return {one["id"]: one["name"] for one in project["tool"]["importlinter"]["contracts"]}


def test_no_contract_is_broken(copied_tree: Path) -> None:
    assert _broken(copied_tree) == []
    assert _contracts().keys() == PLANTED.keys()


@pytest.mark.parametrize("contract", PLANTED)
def test_each_contract_sees_a_planted_import(contract: str, copied_tree: Path) -> None:
    file, statement = PLANTED[contract]
    path = copied_tree / file
    before = path.read_text("utf-8")
    path.write_text(f"{before}\n{statement}\n", "utf-8")
    try:
        assert _contracts()[contract] in _broken(copied_tree)
    finally:
        path.write_text(before, "utf-8")


@pytest.mark.parametrize("adapter", ["agents", "gym", "mcp", "openenv", "textarena", "verifiers"])
def test_adapters_are_imported_without_their_packages(adapter: str) -> None:
    names = ("gymnasium", "mcp", "openenv", "starlette", "textarena", "uvicorn", "verifiers")
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in names)
    python("-c", f"import sys; {blocked}; import fastppo.environments.{adapter}")


# ---------------------------------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of this tree, since setuptools leaves files in the source."""
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


def test_the_wheel_contains_both_packages_and_no_top_level_kernels(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        path.relative_to(base).as_posix()
        for base, package in ((ROOT, "fastppo"), (ROOT / "kernels", "fastppo_kernels"))
        for path in (base / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"fastppo/run/report/page/report.html.jinja", "fastppo/demo/demo.yaml"} <= wanted
    assert names == wanted


def test_the_wheel_declares_the_entry_points(wheel: Path) -> None:
    """Without them no adapter, tracker or report is found."""
    archive = zipfile.ZipFile(wheel)
    (file,) = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
    declared = ConfigParser()
    declared.read_string(archive.read(file).decode())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for group, points in project["entry-points"].items():
        assert dict(declared[group]) == points


@pytest.mark.slow
def test_an_installed_wheel_imports_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    """This also holds if Hugging Face's package `kernels` is installed."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text("NAME = 'the package of that name'\n")
    code = (
        "import fastppo, fastppo_kernels, fastppo.ppo.trainer, fastppo.demo.run\n"
        "print(fastppo.__file__, fastppo_kernels.__file__)"
    )
    assert python("-c", code, cwd=tmp_path, PYTHONPATH=str(site)).stdout.count(str(site)) == 2


# ---------------------------------------------------------------------------------------- a release


def test_changelog_and_citation_have_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == fastppo.__version__
    heading = f"## [{fastppo.__version__}] - {citation['date-released']}"
    assert heading in (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()


def test_the_workflow_runs_the_script_that_contributors_run() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    commands = [step.get("run") for step in workflow["jobs"]["ci"]["steps"]]
    assert ".ci/run" in commands
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
