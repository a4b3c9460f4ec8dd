"""Read, write and print the grid: what each package answers to each fixture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from benchmarks.conformance.fixtures import fixtures
from benchmarks.conformance.ours import BACKENDS
from benchmarks.conformance.peers import PEERS

RESULTS = Path(__file__).parents[1] / "results" / "conformance"

SAME = "same"
DIFFERENT = "different definition"
NOT_OFFERED = "not offered"
NOT_INSTALLED = "not installed"
NOT_RUN = "not run"
"""Status of a fixture that is newer than the kept results of the package."""
COLUMNS = [*(f"FastPPO, {backend}" for backend in BACKENDS), *(peer.name for peer in PEERS)]


class Cell(NamedTuple):
    status: str
    formula: str = ""
    """Formula of a different definition, or the closest one if the operation is not offered."""
    where: str = ""
    """File and line in the package."""


class Column(NamedTuple):
    version: str
    cells: dict[str, Cell]


Cells = dict[str, Column]
"""Columns by the name of the package."""


def write(cells: Cells, folder: str | Path) -> None:
    """Write one file per package, which replaces its earlier results."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, column in cells.items():
        record = {
            "name": name,
            "version": column.version,
            "cells": {fixture: cell._asdict() for fixture, cell in sorted(column.cells.items())},
        }
        file = Path(folder) / f"{re.sub(r'[^a-z0-9.]+', '-', name.lower()).strip('-')}.json"
        file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")


def load(folder: Path = RESULTS) -> Cells:
    """Return the kept results of all environments."""
    found: Cells = {}
    for file in sorted(folder.glob("*.json")):
        record = json.loads(file.read_text("utf-8"))
        cells = {fixture: Cell(**cell) for fixture, cell in record["cells"].items()}
        found[record["name"]] = Column(record["version"], cells)
    return found


def status(cells: Cells, name: str, fixture: str) -> str:
    column = cells.get(name)
    if column is None:
        return NOT_INSTALLED
    return column.cells[fixture].status if fixture in column.cells else NOT_RUN


def text(cells: Cells) -> str:
    """Format the grid for a terminal: a row per fixture that was run, a line per difference."""
    run = {fixture for column in cells.values() for fixture in column.cells}
    letters = {SAME: "=", DIFFERENT: "x", NOT_OFFERED: ".", NOT_INSTALLED: " ", NOT_RUN: "?"}
    width = max(map(len, fixtures()))
    lines = [
        f"{' ' * width}   {i + 1:2}: {name} {cells[name].version if name in cells else '(absent)'}"
        for i, name in enumerate(COLUMNS)
    ]
    lines.append(" " * width + "".join(f"{i + 1:3}" for i in range(len(COLUMNS))))
    for fixture in filter(run.__contains__, fixtures()):
        marks = "".join(f"  {letters[status(cells, name, fixture)]}" for name in COLUMNS)
        lines.append(f"{fixture:{width}}{marks}")
    lines.append("= same, x different definition, . not offered, ? not run, blank: not installed")
    for name, column in cells.items():
        for fixture, cell in column.cells.items():
            if cell.status == DIFFERENT:
                lines.append(f"{name}, {fixture}: {cell.formula} ({cell.where})")
    return "\n".join(lines)
