"""Every installed package answers every fixture.

FastPPO's cells must equal the answer. A peer's cell must equal the answer or the formula recorded
in `differences.py`. Anything else fails, so that a new version cannot change its definition
unnoticed.
"""

from __future__ import annotations

import functools

import pytest

from benchmarks.conformance import grid
from benchmarks.conformance.adapter import Adapter, Answer, NotOfferedError
from benchmarks.conformance.differences import DIFFERENCES
from benchmarks.conformance.fixtures import Fixture, difference, fixtures
from benchmarks.conformance.grid import Cell
from benchmarks.conformance.ours import backends
from benchmarks.conformance.peers import PEERS

pytestmark = pytest.mark.filterwarnings("default")  # of the peers

OURS = backends()
ADAPTERS = {adapter.name: adapter for adapter in [*OURS, *PEERS] if adapter.version}


@functools.cache
def calls(name: str) -> dict[str, Answer]:
    return ADAPTERS[name].build()


def cell_of(adapter: Adapter, fixture: Fixture) -> Cell:
    """Return the cell.

    Raises:
        AssertionError: the outputs are neither the answer nor those of the recorded formula.
    """
    call = calls(adapter.name).get(fixture.operation)
    if call is None:
        return Cell(grid.NOT_OFFERED)
    try:
        outputs = call(fixture.tensors(adapter.device), **fixture.options)
    except NotOfferedError as error:
        return Cell(grid.NOT_OFFERED, str(error))
    recorded = DIFFERENCES.get(adapter.name, {}).get(fixture.name)
    wrong = difference(fixture, outputs)
    if recorded is None:
        assert not wrong, wrong
        return Cell(grid.SAME)
    assert wrong, f"{adapter.name} no longer differs: remove it from differences.py"
    expected = fixture.variant(**recorded.variant)
    changed = difference(fixture, outputs, expected)
    assert not changed, f"not the recorded formula, {recorded.formula}: {changed}"
    return Cell(grid.DIFFERENT, recorded.formula, recorded.where)


@pytest.mark.parametrize("fixture", list(fixtures().values()), ids=lambda fixture: fixture.name)
@pytest.mark.parametrize("name", list(ADAPTERS))
def test_conformance(name: str, fixture: Fixture, cells: grid.Cells) -> None:
    adapter = ADAPTERS[name]
    cell = cell_of(adapter, fixture)
    column = cells.setdefault(name, grid.Column(str(adapter.version), {}))
    column.cells[fixture.name] = cell
