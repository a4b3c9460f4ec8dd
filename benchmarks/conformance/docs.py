"""Write the tables of docs/conformance.md: `python -m benchmarks.conformance.docs`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.conformance import grid
from benchmarks.conformance.fixtures import fixtures

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"

MARKS = {
    grid.SAME: "=",
    grid.DIFFERENT: "**≠**",
    grid.NOT_OFFERED: "·",
    grid.NOT_INSTALLED: "",
    grid.NOT_RUN: "?",
}


def split(text: str, section: str) -> tuple[str, str, str]:
    """Split the page into the text up to a section, the section, and the text after it."""
    begin = f"<!-- python -m benchmarks.conformance.docs: {section} -->\n"
    end = f"<!-- end of {section} -->"
    before, found, rest = text.partition(begin)
    content, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{PAGE.name} must contain {begin.strip()} and {end}")
    return before + begin, content, end + after


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def sections(cells: grid.Cells) -> dict[str, str]:
    """Return the contents of the sections by name."""
    head = [name.replace("FastPPO, ", "ours, ") for name in grid.COLUMNS]
    rows = []
    for fixture in fixtures():
        marks = [MARKS[grid.status(cells, name, fixture)] for name in grid.COLUMNS]
        rows.append([f"`{fixture}`", *marks])
    versions = [
        f"{name} {cells[name].version}"
        for name in grid.COLUMNS
        if name in cells and not name.startswith("FastPPO")
    ]
    differences = [
        [name, f"`{fixture}`", cell.formula, f"`{cell.where}`"]
        for name in grid.COLUMNS
        if name in cells
        for fixture, cell in cells[name].cells.items()
        if cell.status == grid.DIFFERENT
    ]
    questions = [
        [f"`{fixture.name}`", fixture.question, fixture.source] for fixture in fixtures().values()
    ]
    return {
        "grid": _table(["fixture", *head], rows) + f"Versions: {', '.join(versions)}.\n\n",
        "differences": _table(["package", "fixture", "its definition", "where"], differences),
        "questions": _table(["fixture", "question", "source"], questions),
    }


def update() -> None:
    page = PAGE.read_text("utf-8")
    for section, content in sections(grid.load()).items():
        before, _, after = split(page, section)
        page = before + content + after
    PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    update()
