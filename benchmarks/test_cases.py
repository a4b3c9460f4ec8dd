"""Compare each provider of each case with fp64, then time it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import measure
from benchmarks.case import Prepared, UnsupportedError, check
from benchmarks.cases import slug, suite_of
from benchmarks.measure import Ceilings, dtype_name
from benchmarks.units import seconds

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize by title and provider. All providers of a case share its inputs."""
    suite = suite_of(metafunc.config)
    names: tuple[str, ...]
    if metafunc.function is test_case:
        names = ("prepared", "provider")
        values = [
            pytest.param(case.title, provider, id=slug(case.title, provider))
            for case in suite.cases
            for provider in case.provider_names
        ]
    else:
        names = ("prepared", "variable", "size", "provider")
        values = [
            pytest.param(
                point.case.title,
                point.variable,
                point.size,
                provider,
                id=slug(point.case.name, f"{point.variable}={point.size}", provider),
            )
            for point in suite.points
            for provider in point.provider_names
        ]
    metafunc.parametrize(names, values, indirect=["prepared"])


def test_case(run: Callable[[str], None], provider: str) -> None:
    run(provider)


def test_growth(
    run: Callable[[str], None], variable: str, size: int, provider: str, benchmark: Any
) -> None:
    run(provider)
    benchmark.extra_info.update(variable=variable, size=size)


@pytest.fixture
def run(
    prepared: Prepared,
    benchmark: Any,
    record: Callable[[list[float]], None],
    ceilings: Ceilings,
    device: torch.device,
    pytestconfig: pytest.Config,
) -> Callable[[str], None]:
    """Return a function that checks the provider of a name, then measures its memory and time.

    `extra_info` gets bytes, FLOP, the floor in seconds, the share of the floor, peak memory above
    the inputs, and the error of the worst output in units of its scale.
    """
    case = prepared.case

    def measured(name: str) -> None:
        try:
            provider = case.provider(name, device)
        except UnsupportedError as reason:
            pytest.skip(str(reason))
        error = check(case, provider, prepared.rotation[0], prepared.truth)
        rotation = [provider.own_inputs(inputs) for inputs in prepared.rotation]
        peak = measure.peak_extra_memory(functools.partial(provider.call, rotation[0]), device)
        floor = ceilings.floor(case.bytes_moved, case.flop, case.dtype)
        benchmark.group = f"{case.title}, floor {seconds(floor)}"
        benchmark.extra_info.update(
            case=case.name,
            shape=case.shape,
            dtype=dtype_name(case.dtype),
            provider=name,
            is_bound=provider.is_bound,
            bytes=case.bytes_moved,
            flop=case.flop,
            counted=case.bytes_and_flop,
            floor_seconds=floor,
            peak_extra_bytes=peak,
            error=error,
        )
        turns = itertools.cycle(rotation)

        def call() -> object:
            return provider.call(next(turns))

        if device.type == "cuda":
            limit = float(pytestconfig.getoption("benchmark_max_time"))
            record(measure.call_times(call, device, limit))
        else:
            benchmark(call)
        if benchmark.enabled:
            benchmark.extra_info["percent_of_floor"] = 100 * floor / benchmark.stats["median"]

    return measured
