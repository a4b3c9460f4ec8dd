"""Read the kept results: pytest-benchmark's files in benchmarks/results, merged by device.

    pytest benchmarks --benchmark-storage=benchmarks/results --benchmark-save=NAME

A device can have several files, such as one of `-m slow`. A newer measurement of a test replaces an
older one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.units import digits

FOLDER = Path(__file__).parent / "results"
OTHERS = ("studies", "conformance")
"""Folders of results that the suite did not measure."""


class Run(NamedTuple):
    """One file: what was measured, when, and with which packages."""

    time: str
    device: dict[str, Any]
    packages: dict[str, str | None]
    ceilings: dict[str, Any] | None
    note: str
    """How the file differs from pytest-benchmark's output, if it does."""
    tests: dict[str, dict[str, Any]]
    """Measurements by the test's full name."""

    @property
    def date(self) -> str:
        return self.time[:10]


def read(path: Path) -> Run:
    """Read a file of pytest-benchmark.

    Raises:
        ValueError: it is not from this suite.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or "device" not in content.get("machine_info", {}):
        raise ValueError(f"{path} is not a results file of `pytest benchmarks`")
    machine = content["machine_info"]
    return Run(
        content["datetime"],
        machine["device"],
        machine.get("packages", {}),
        content.get("ceilings"),
        content.get("note", ""),
        {test["fullname"]: test for test in content["benchmarks"]},
    )


class Results(NamedTuple):
    """All kept measurements on a device."""

    runs: list[Run]
    """Runs, oldest first."""

    @property
    def device(self) -> dict[str, Any]:
        return self.runs[-1].device

    @property
    def is_on_gpu(self) -> bool:
        return self.device["type"] == "cuda"

    def having(self, field: str) -> list[tuple[Run, dict[str, Any]]]:
        """Return (run, test) for the tests with this field in their `extra_info`."""
        newest = {name: (run, test) for run in self.runs for name, test in run.tests.items()}
        return [pair for pair in newest.values() if field in pair[1]["extra_info"]]

    def time_of(self, field: str) -> str:
        """Return the newest time of the tests with this field, or "" if there are none."""
        return max((run.time for run, _ in self.having(field)), default="")


def load() -> list[Results]:
    """Return the results by device: GPUs first, then by date, newest first."""
    paths = [path for path in FOLDER.rglob("*.json") if path.parent.name not in OTHERS]
    by_device: dict[str, list[Run]] = {}
    for run in sorted(map(read, paths), key=lambda run: run.time):
        by_device.setdefault(run.device["name"], []).append(run)
    devices = [Results(of_device) for of_device in by_device.values()]
    devices.sort(key=lambda results: results.runs[-1].time, reverse=True)
    return sorted(devices, key=lambda results: not results.is_on_gpu)


def is_ours(provider: str) -> bool:
    return provider.split(",")[0] == "FastPPO"


def device_title(device: dict[str, Any]) -> str:
    """Return "NVIDIA H200" or "AMD EPYC, 2 threads"."""
    if device["type"] != "cpu":
        return device["name"]
    threads = device["threads"]
    return f"{device['name']}, {threads} thread{'s' if threads > 1 else ''}"


def ceilings_line(ceilings: dict[str, Any]) -> str:
    matmul = ", ".join(
        f"{digits(value / 1e12)} TFLOP/s {dtype}"
        for dtype, value in ceilings["matmul_flop_per_second"].items()
    )
    copy = digits(ceilings["copy_bytes_per_second"] / 1e9)
    return f"copy {copy} GB/s · matrix product {matmul}"
