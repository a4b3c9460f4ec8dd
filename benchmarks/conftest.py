"""`pytest benchmarks`: the suite's cases under pytest-benchmark. `pytest` alone does not come here.

pytest benchmarks --set quick --benchmark-autosave
pytest benchmarks --set quick --benchmark-compare
pytest benchmarks --set default -k "gae and FastPPO" --benchmark-json out.json
"""

from __future__ import annotations

import importlib.util

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--set",
        choices=("quick", "default"),
        default="quick",
        help="which set of shapes of benchmarks/shapes.py; default: quick",
    )


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("pytest_benchmark") is None:
        raise pytest.UsageError(
            "pytest benchmarks needs pytest-benchmark: pip install -e '.[bench]'"
        )
