"""Options, fixtures and hooks of `pytest benchmarks`."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
import torch

from benchmarks import case as case_module
from benchmarks import measure
from benchmarks.case import Prepared
from benchmarks.cases import device_of, suite_of
from benchmarks.measure import REPLAY, Ceilings
from fastppo.models.device import device_name

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "liger-kernel",
    "trl",
    "verl",
    "cut-cross-entropy",
    "quack-kernels",
    "rl-triton",
)

BUSY = 0.5
"""Load average above which the machine counts as busy: one process that uses half a core."""

PYTEST_BENCHMARKS_SECONDS = 1
"""pytest-benchmark's default of `--benchmark-max-time`. PYTEST_ADDOPTS may set another value."""

SECONDS = Decimal("0.5")
"""This suite's default, for a full run of about ten minutes. Slow calls still get five rounds."""

CEILINGS = pytest.StashKey[Ceilings]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("FastPPO's suite")
    group.addoption("--quick", action="store_true", help="small shapes, without promised ratios")
    group.addoption(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="default: the GPU if there is one",
    )
    group.addoption(
        "--conformance-json",
        metavar="FOLDER",
        help="write the results of benchmarks/conformance, a file per package",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError("the suite needs pytest-benchmark: pip install -e '.[bench]'")
    arguments = config.invocation_params.args
    is_given = any(argument.startswith("--benchmark-max-time") for argument in arguments)
    is_default = float(config.option.benchmark_max_time) == PYTEST_BENCHMARKS_SECONDS
    if is_default and not is_given:
        config.option.benchmark_max_time = SECONDS
    if config.option.benchmark_columns is None:
        config.option.benchmark_columns = ["median", "iqr", "min", "max", "rounds"]


def pytest_report_header() -> str:
    """Warn if other processes have used the machine in the last minute."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load < BUSY:
        return ""
    return (
        f"the machine is busy: load {load:.1f} on {os.cpu_count()} cores over the last minute; "
        "times and floors may be off by several times"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests unless requested, and promises for other shapes or devices."""
    on_gpu = device_of(config).type == "cuda"
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        is_slow = item.get_closest_marker("slow") and "slow" not in config.option.markexpr
        is_promise = item.get_closest_marker("promise") is not None
        unwanted = is_slow or (is_promise and (on_gpu or config.getoption("quick")))
        (left_out if unwanted else kept).append(item)
        if on_gpu:
            item.add_marker(pytest.mark.benchmark(timer=REPLAY))
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


# ---------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return device_of(request.config)


@pytest.fixture(scope="session")
def ceilings(request: pytest.FixtureRequest, device: torch.device) -> Ceilings:
    dtypes = {case.dtype for case in suite_of(request.config).titled.values()}
    measured = measure.measure_ceilings(device, sorted(dtypes, key=str))
    request.config.stash[CEILINGS] = measured
    return measured


@pytest.fixture(scope="session")
def latest() -> Iterator[dict[str, Prepared]]:
    """Keep the case of the latest test, by its title, for the next provider."""
    kept: dict[str, Prepared] = {}
    yield kept
    release(kept)


def release(kept: dict[str, Prepared]) -> None:
    while kept:
        kept.popitem()[1].case.release()
    torch.compiler.reset()
    case_module.compiled.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def prepared(
    request: pytest.FixtureRequest, device: torch.device, latest: dict[str, Prepared]
) -> Prepared:
    """Return the case whose title is `request.param`."""
    title = request.param
    if title not in latest:
        release(latest)
        case = suite_of(request.config).titled[title]
        inputs = case.draw(0, device)
        length = measure.rotation_length(sum(x.nbytes for x in inputs.values()), device)
        rotation = [inputs, *(case.draw(seed, device) for seed in range(1, length))]
        latest[title] = Prepared(case, rotation, case.truth(inputs))
    return latest[title]


@pytest.fixture
def record(benchmark: Any) -> Callable[[list[float]], None]:
    """Return a function that records measured seconds as rounds. The test's timer is `REPLAY`."""

    def recorded(times: list[float]) -> None:
        REPLAY.load(times)
        benchmark.pedantic(lambda: None, rounds=len(times))

    return recorded


# ------------------------------------------------------------------------- pytest-benchmark's JSON


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    del machine_info["node"]
    device = device_of(config)
    described = {
        "name": device_name(device),
        "type": device.type,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
    }
    if device.type == "cuda":
        described["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
        described["cuda"] = torch.version.cuda
    machine_info["device"] = described
    versions = {name: case_module.version(name) for name in PACKAGES}
    # torch's own version includes the build: 2.11.0+cu130
    machine_info["packages"] = versions | {"torch": torch.__version__}


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(
    config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]
) -> None:
    if hasattr(os, "getloadavg"):
        output_json["load_average"] = [round(x, 2) for x in os.getloadavg()]
    ceilings = config.stash.get(CEILINGS, None)
    if ceilings is not None:
        output_json["ceilings"] = {
            "copy_bytes_per_second": ceilings.copy,
            "matmul_flop_per_second": dict(ceilings.matmul),
        }
