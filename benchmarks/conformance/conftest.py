"""Collect the cells of the grid, print it, and write it with `--conformance-json FOLDER`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.conformance import grid

CELLS = pytest.StashKey[grid.Cells]()


@pytest.fixture(scope="session")
def cells(request: pytest.FixtureRequest) -> Iterator[grid.Cells]:
    """Return the cells of this run by package and fixture."""
    found: grid.Cells = {}
    request.config.stash[CELLS] = found
    yield found
    folder = request.config.getoption("conformance_json", None)
    if folder:
        grid.write(found, folder)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    found = config.stash.get(CELLS, None)
    if found:
        terminalreporter.section("conformance")
        terminalreporter.write_line(grid.text(found))
