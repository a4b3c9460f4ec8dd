"""Each provider of each case: right against fp64, then timed by pytest-benchmark.

The numbers of record come from `python -m benchmarks`, where providers take turns; these are for
watching one machine over time (`--benchmark-compare`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import cases, measure, run
from benchmarks.case import Case, Peer, Provider, UnsupportedError, is_installed
from benchmarks.shapes import SETS
from fastppo.models.device import device_name

ROUNDS = 5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Prepared = tuple[measure.Inputs, dict[str, Any]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    work = SETS[DEVICE.type, metafunc.config.getoption("--set")]
    parameters = []
    for case in cases.cases(work):
        makers: list[Provider | Peer] = [*case.providers, *case.compiled, *case.peers]
        for maker in makers:
            name = f"{case.name}, {case.shape}: {maker.name}".replace("=", " ")
            parameters.append(pytest.param(case, maker, id=name))
    metafunc.parametrize(("case", "maker"), parameters)


@pytest.fixture(scope="module")
def prepared() -> Iterator[dict[str, Any]]:
    """Inputs and truth of the case at hand; those of the last one are dropped."""
    current: dict[str, Any] = {}
    yield current
    if current:
        current["case"].release()


def _inputs(case: Case, current: dict[str, Any]) -> Prepared:
    if current.get("case") is not case:
        if current:
            current["case"].release()
        inputs = case.draw(0, DEVICE)
        current.update(case=case, inputs=inputs, truth=case.truth(inputs))
    return current["inputs"], current["truth"]


def _providers(maker: Provider | Peer) -> tuple[Provider, ...]:
    if isinstance(maker, Provider):
        return (maker,)
    if not is_installed(maker.distribution):
        pytest.skip(f"{maker.name} is absent: pip install {maker.distribution}")
    try:
        return maker.build(DEVICE)
    except (UnsupportedError, ImportError, AttributeError) as error:
        pytest.skip(f"{maker.name}: {error}")


@pytest.mark.filterwarnings("default")  # peers may warn
def test_speed(case: Case, maker: Provider | Peer, prepared: Any, benchmark: Any) -> None:
    inputs, truth = _inputs(case, prepared)
    (provider, *_) = _providers(maker)
    checked = run.check(case, provider, inputs, truth)
    if isinstance(checked, run.Row):
        pytest.fail(f"{provider.name} is {checked.status}: {checked.detail}", pytrace=False)
    rotation = [case.draw(seed, DEVICE) for seed in range(1, 1 + ROUNDS)]
    rounds = [x if provider.prepare is None else provider.prepare(x) for x in rotation]

    def call(one: measure.Inputs) -> None:
        provider.call(one)
        measure.synchronize(DEVICE)

    def fresh() -> tuple[tuple[measure.Inputs], dict[str, Any]]:
        # A provider that writes over its inputs gets a fresh set in each round.
        return (rounds.pop(),), {}

    benchmark.group = f"{case.name}, {case.shape}"
    benchmark.extra_info |= {
        "device": device_name(DEVICE),
        "threads": torch.get_num_threads(),
        "bytes": case.bytes_moved,
        "flop": case.flop,
        "error": checked,
    }
    benchmark.pedantic(call, setup=fresh, rounds=ROUNDS)
