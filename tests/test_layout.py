"""Layout: modules loaded by an import, files of the wheel, `kernels/` as a plain folder.

The layers are checked by `lint-imports`, with the contracts in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
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
