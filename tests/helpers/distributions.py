"""Metadata of installed packages, for entry points."""

from __future__ import annotations

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
