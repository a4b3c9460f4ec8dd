"""Metadata of installed packages, for entry points."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def write_metadata(folder: Path, name: str, entry_points: Mapping[str, Mapping[str, str]]) -> None:
    """Write the metadata of a package that is installed in a folder.

    Args:
        entry_points: by group and name.
    """
    directory = folder / f"{name}-1.0.dist-info"
    directory.mkdir(parents=True)
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (directory / "entry_points.txt").write_text("\n".join(lines) + "\n")


@functools.cache
def tree_metadata() -> str:
    """Return a folder with the metadata of this tree.

    The tests import the packages from the tree, and may run while an older one is installed.
    """
    folder = Path(tempfile.mkdtemp(prefix="fastppo-metadata-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    write_metadata(folder, project["name"], project["entry-points"])
    return str(folder)


def install_tree() -> None:
    """Let this process and those that it starts find the tree's entry points."""
    sys.path.insert(0, tree_metadata())
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [tree_metadata(), others]))
