"""The house: imports point down and in no circle, every module has its tests, wheels are complete.

The rules are functions of a tree's root, so that they are tried on copies of the tree in which
something wrong was planted.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FLOORS = (
    ("fastppo_kernels",),
    ("functional",),
    ("data",),
    ("models",),
    ("rollout", "integrations"),  # side by side
    ("rewards",),
    ("run",),
    ("ppo", "stages"),  # as are these: neither imports the other
    ("demo", "recipes"),
    ("top",),
)
"""Folders of `fastppo/` from the ground up. A module may import from its own folder, where no
circle leads back to it, and from the floors below."""

NOT_IN_A_FOLDER = dict.fromkeys(("__init__", "__main__", "cli", "generate"), "top")

IMPORTS_BY_NAME = {
    "fastppo",  # public names, at their first use
    "fastppo.cli",  # the benchmark suite, where it is there
    "fastppo.functional.operators",  # Triton's kernels, where they are used
    "fastppo.rewards.loading",  # a user's module
}
"""Modules that import a module whose name is no part of an import statement."""

MOST_LINES = {
    "": 720,
    "fastppo.ppo.trainer": 500,
}
"""By module; "" is any other of `fastppo/`."""

TESTED_ELSEWHERE = {
    "fastppo.__main__": "tests/test_cli.py",
}
"""Modules whose tests are not at the place that follows from their name."""

# ------------------------------------------------------------------------------------ the imports


def modules(root: Path) -> dict[str, Path]:
    """File by dotted name; a package is its __init__.py."""
    found = {}
    for base, package in ((root, "fastppo"), (root / "kernels", "fastppo_kernels")):
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def folder(path: Path, root: Path) -> str:
    """The folder of FLOORS that a module is in.

    Raises:
        AssertionError: it is on no floor.
    """
    if path.is_relative_to(root / "kernels"):
        return "fastppo_kernels"
    first, *rest = path.relative_to(root / "fastppo").parts
    name = first if rest else NOT_IN_A_FOLDER.get(path.stem, "")
    assert any(name in floor for floor in FLOORS), f"{path} is on no floor: add it to FLOORS"
    return name


@functools.cache  # the copies of the tree below differ in one file each
def _statements(source: str) -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    """(leading dots, module, names) of all imports, in functions and under TYPE_CHECKING too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(0, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            found.append((node.level, node.module or "", names))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__", "importorskip"):
                found.append((0, str(node.args[0].value), ()))
    return tuple(found)


def imports(module: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules among `known` that a module imports."""
    found = set()
    for level, name, names in _statements(path.read_text(encoding="utf-8")):
        if level:
            above = module.split(".")
            above = above[: len(above) - level + (path.name == "__init__.py")]
            name = ".".join([*above, name] if name else above)
        # A name is a submodule if there is one, else something that the module defines.
        for each in {f"{name}.{each}" for each in names} or {name}:
            parts = each.split(".")
            prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
            found |= {next((prefix for prefix in prefixes if prefix in known), "")}
    return found - {""}


def graph(root: Path) -> dict[str, set[str]]:
    """What each module imports, of the two packages."""
    known = modules(root)
    found = {module: imports(module, path, known) for module, path in known.items()}
    for module, imported in found.items():
        package = module.rpartition(".")[0]
        if package in known and package != "fastppo":  # whose __init__.py holds nothing heavy
            imported.add(package)
    return found


def hidden_imports(root: Path) -> list[str]:
    """Imports that the graph cannot follow.

    `import fastppo.x` binds `fastppo`, whose attributes are all that there is; and an imported name
    that is computed may be anything.
    """
    found = []
    for module, path in modules(root).items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    whole = alias.name.startswith("fastppo.") and alias.asname is None
                    if whole or _by_name(alias.name, module):
                        found.append(f"{module}: import {alias.name}")
            elif isinstance(node, ast.ImportFrom) and _by_name(node.module or "", module):
                found.append(f"{module}: from {node.module} import")
            elif isinstance(node, ast.Name) and node.id in ("__import__", "exec", "eval"):
                found.append(f"{module}: {node.id}")
            elif isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules":
                if module in IMPORTS_BY_NAME:
                    continue
                found.append(f"{module}: sys.modules")
    return found


def _by_name(imported: str, module: str) -> bool:
    loaders = ("importlib", "pkgutil", "runpy")
    return imported in loaders and module not in IMPORTS_BY_NAME


def upward_imports(root: Path) -> list[str]:
    """Imports of a floor above, or of another folder on the same floor."""
    known = modules(root)
    folders = {module: folder(path, root) for module, path in known.items()}
    floors = {name: level for level, names in enumerate(FLOORS) for name in names}
    return [
        f"{module} imports {imported}"
        for module, found in graph(root).items()
        for imported in sorted(found)
        if folders[module] != folders[imported]
        and floors[folders[imported]] >= floors[folders[module]]
    ]


def circles(root: Path) -> list[str]:
    """One circle of imports for each folder that has one."""
    known = modules(root)
    folders = {module: folder(path, root) for module, path in known.items()}
    found = []
    for name in itertools.chain(*FLOORS):
        inside = {
            module: {each for each in imported if folders[each] == name}
            for module, imported in graph(root).items()
            if folders[module] == name
        }
        try:
            TopologicalSorter(inside).prepare()
        except CycleError as error:
            found.append(" imports ".join(reversed(error.args[1])))
    return found


def test_imports_only_ever_point_down() -> None:
    assert upward_imports(ROOT) == []


def test_no_folder_has_a_circle_of_imports() -> None:
    assert circles(ROOT) == []


def test_every_import_can_be_followed() -> None:
    assert hidden_imports(ROOT) == []


def test_the_kernels_depend_on_torch_and_triton_alone() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "triton", "fastppo_kernels"}
    for path in (ROOT / "kernels" / "fastppo_kernels").rglob("*.py"):
        for level, name, _ in _statements(path.read_text(encoding="utf-8")):
            assert level or name.split(".")[0] in allowed, f"{path.name} imports {name}"


# ------------------------------------------------------------------------- the rules find something


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the tree's Python files, to plant an import in."""
    for path in modules(ROOT).values():
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return tmp_path


def _in_folder(name: str) -> list[str]:
    """The modules of a folder, those that are no package first."""
    known = modules(ROOT)
    inside = [module for module, path in known.items() if folder(path, ROOT) == name]
    return sorted(inside, key=lambda module: (known[module].name == "__init__.py", module))


def _plant(root: Path, module: str, line: str) -> None:
    with modules(root)[module].open("a", encoding="utf-8") as file:
        file.write(f"\n\n{line}\n")


FOLDERS = [name for floor in FLOORS for name in floor]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_circle_is_found_in_every_folder(name: str, copied: Path) -> None:
    inside = _in_folder(name)[:3]
    assert len(inside) > 1, "a folder of one module needs no folder"
    for module, imported in zip(inside, [*inside[1:], inside[0]], strict=True):
        _plant(copied, module, f"import {imported}")
    (found,) = circles(copied)
    assert any(f"{module} imports " in found for module in inside)
    assert upward_imports(copied) == []


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        (module, imported)
        for module, imported in itertools.permutations(FOLDERS, 2)
        if (module, imported) == ("stages", "ppo")
        or FOLDERS.index(module) < FOLDERS.index(imported)
    ],
)
def test_an_upward_import_is_found_between_any_two_folders(
    module: str, imported: str, copied: Path
) -> None:
    importer, target = _in_folder(module)[0], _in_folder(imported)[0]
    _plant(copied, importer, f"import {target}")
    assert upward_imports(copied) == [f"{importer} imports {target}"]


@pytest.mark.parametrize(
    "line",
    [
        "from fastppo.ppo import trainer",
        "from fastppo.ppo.trainer import PPOTrainer",
        "from fastppo.ppo.trainer import *",
        "import fastppo.ppo.trainer",
        "import fastppo.ppo.trainer as algorithm",
        "from ..ppo import trainer",
        "from ..ppo.trainer import PPOTrainer",
        "from .. import ppo",
        "from fastppo import ppo",
        "import fastppo",
        "from fastppo import PPOTrainer",
        "def late():\n    from fastppo.ppo import trainer",
        "if TYPE_CHECKING:\n    from fastppo.ppo.trainer import PPOTrainer",
        "importlib.import_module('fastppo.ppo.trainer')",
    ],
)
def test_an_import_is_seen_in_whatever_form_it_is_written(line: str, copied: Path) -> None:
    _plant(copied, "fastppo.data.rows", line)
    (found,) = upward_imports(copied)
    assert found.startswith("fastppo.data.rows imports fastppo")


@pytest.mark.parametrize(
    "line",
    [
        "from . import trunk",
        "from .trunk import context_length",
        "from fastppo.data import batch",
        "from ..data.batch import Batch",
        "import fastppo.data.batch as rows",
        "import fastppo_kernels",
    ],
)
def test_an_import_of_the_own_folder_or_from_below_is_none_upward(line: str, copied: Path) -> None:
    _plant(copied, "fastppo.models.device", line)
    assert upward_imports(copied) == circles(copied) == []


def test_a_package_that_imports_its_own_module_is_a_circle(copied: Path) -> None:
    _plant(copied, "fastppo.models", "from fastppo.models.policy import ActorCritic")
    (found,) = circles(copied)
    assert "fastppo.models imports" in found


@pytest.mark.parametrize(
    "line",
    [
        "import fastppo.data.text\nfastppo.PPOTrainer",
        "import importlib\nimportlib.import_module(name='fastppo.ppo.trainer')",
        "from importlib import import_module as load\nload('fastppo.ppo.trainer')",
        "import pkgutil\npkgutil.resolve_name('fastppo.ppo.trainer:PPOTrainer')",
        "__import__(name='fastppo.ppo.trainer')",
        "import sys\nsys.modules['fastppo.ppo.trainer']",
        "exec('import fastppo.ppo.trainer')",
    ],
)
def test_an_import_that_cannot_be_followed_is_refused(line: str, copied: Path) -> None:
    _plant(copied, "fastppo.data.rows", line)
    assert any(found.startswith("fastppo.data.rows: ") for found in hidden_imports(copied))


@pytest.mark.parametrize("name", ["top", "demo", "helpers"])
def test_a_file_beside_the_folders_is_refused(name: str, copied: Path) -> None:
    (copied / "fastppo" / f"{name}.py").write_text("import fastppo.ppo.trainer\n")
    with pytest.raises(AssertionError, match=rf"{name}\.py is on no floor"):
        upward_imports(copied)


def test_a_folder_that_is_on_no_floor_is_refused(copied: Path) -> None:
    (copied / "fastppo" / "attic").mkdir()
    (copied / "fastppo" / "attic" / "things.py").write_text("import fastppo.ppo.trainer\n")
    with pytest.raises(AssertionError, match=r"things\.py is on no floor: add it to FLOORS"):
        upward_imports(copied)


# ---------------------------------------------------------------------------------- files and tests


def _defines_something(path: Path) -> bool:
    """Whether a module is more than its docstring."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(not isinstance(node, (ast.Expr, ast.ImportFrom)) for node in body)


def _test_file(module: str, path: Path) -> Path:
    """fastppo/data/rows.py is tested by tests/data/test_rows.py; what a folder's __init__.py
    defines by tests/data/test_data.py."""
    name = f"test_{module.rsplit('.', 1)[-1]}.py"
    if path.is_relative_to(ROOT / "kernels"):
        return Path("tests", "kernels", name)
    return Path("tests", *path.relative_to(ROOT / "fastppo").parts[:-1], name)


@pytest.mark.parametrize("module", [m for m, p in modules(ROOT).items() if _defines_something(p)])
def test_every_module_has_its_test_file(module: str) -> None:
    known = modules(ROOT)
    by_name = _test_file(module, known[module])
    place = Path(TESTED_ELSEWHERE.get(module, by_name))
    assert (ROOT / place).is_file(), f"{module} has no {place}"
    assert module not in TESTED_ELSEWHERE or not (ROOT / by_name).exists(), by_name
    tested = imports("", ROOT / place, known)
    if "fastppo" in tested:  # by their public names
        tested |= graph(ROOT)["fastppo"]
    assert module in tested or module in TESTED_ELSEWHERE, f"{place} does not import {module}"


def test_the_exceptions_are_of_modules_that_there_are() -> None:
    assert {*TESTED_ELSEWHERE, *MOST_LINES} - {""} <= modules(ROOT).keys()


def test_no_test_module_imports_another() -> None:
    """What two of them need is in a helper module."""
    for path in (ROOT / "tests").rglob("*.py"):
        found = {
            each
            for _, name, names in _statements(path.read_text(encoding="utf-8"))
            for each in (*name.split("."), *names)
            if each.startswith("test_")
        }
        assert not found, path


def _too_long(root: Path) -> Iterator[str]:
    for module, path in modules(root).items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if path.is_relative_to(root / "fastppo") and lines > MOST_LINES.get(module, MOST_LINES[""]):
            yield f"{module} has {lines} lines"


def test_no_file_is_too_long_to_be_read() -> None:
    assert list(_too_long(ROOT)) == []


def test_a_long_file_is_found(copied: Path) -> None:
    for module, limit in (("fastppo.data.rows", 720), ("fastppo.ppo.trainer", 500)):
        path = modules(copied)[module]
        path.write_text("x = 1\n" * limit)
        assert list(_too_long(copied)) == []
        path.write_text("x = 1\n" * (limit + 1))
        assert list(_too_long(copied)) == [f"{module} has {limit + 1} lines"]
        path.unlink()


# ----------------------------------------------------------------------------- what an import loads


def _python(code: str, *arguments: str, cwd: Path = ROOT, path: str = "") -> str:
    """What Python prints of `code`, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path or f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    assert _python(code).strip().endswith("fine")


def test_fastppo_imports_without_triton() -> None:
    """A machine without Triton still has the torch backend."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, fastppo\n"
        "loss = fastppo.ppo_loss(torch.zeros(2, 5), torch.tensor([1, 2]), torch.zeros(2) - 1.6,\n"
        "    torch.ones(2)).loss\n"
        "print(round(loss.item(), 2))"
    )
    assert _python(code).strip() == "-0.99"


@pytest.mark.parametrize("stage", ["sft", "reward_model"])
def test_a_stage_before_ppo_loads_no_module_of_ppo(stage: str) -> None:
    code = f"import sys, fastppo.stages.{stage}\nprint(*(m for m in sys.modules if 'fastppo' in m))"
    loaded = _python(code).split()
    assert f"fastppo.stages.{stage}" in loaded
    assert [module for module in loaded if module.startswith("fastppo.ppo")] == []


def test_options_are_read_without_the_library_of_models() -> None:
    """Its models take as long to import as torch does, and a misspelt option should not wait."""
    code = "import sys, fastppo.ppo.config\nprint(*sys.modules)"
    loaded = _python(code).split()
    assert "fastppo.ppo.config" in loaded
    assert "transformers" not in loaded


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_the_top_level_answers_without_torch(flag: str) -> None:
    code = (
        "import sys; from fastppo import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit: print(*sys.modules)"
    )
    loaded = {name.split(".")[0] for name in _python(code, flag).splitlines()[-1].split()}
    assert "fastppo" in loaded
    assert not {"torch", "transformers", "numpy"} & loaded


# ---------------------------------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built from a copy: setuptools leaves files in the source."""
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


def test_a_wheel_holds_every_file_of_both_packages_and_no_top_level_kernels(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        path.relative_to(base).as_posix()
        for base, package in ((ROOT, "fastppo"), (ROOT / "kernels", "fastppo_kernels"))
        for path in (base / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"fastppo/run/page/report.html.jinja", "fastppo/demo/demo.yaml"} <= wanted
    assert names == wanted


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
        "import fastppo, fastppo_kernels, fastppo.ppo.trainer, fastppo.demo.run\n"
        "print(fastppo.__file__, fastppo_kernels.__file__)"
    )
    assert _python(code, cwd=tmp_path, path=str(site)).count(str(site)) == 2
