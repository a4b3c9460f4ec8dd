"""The trainer, the stages and the drop-in functions on the simulated CUDA device; see README.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.simgpu.build import compiler
from tests.simgpu.cases import CASES
from tests.simgpu.limits import LIMITS, WAITS_IN_MICROBATCHES, WAITS_PER_STEP, Limit

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="the simulated device is compiled with g++"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="torch's CPU build is needed"),
]

QUICK = (("refusals", "default", "critic"), ("generate_llama", "step", "functions_bf16"))
"""Cases of the quick tests; those of a group share a process."""

LAYERS = 2
"""Layers of the model of the cases."""


def python(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run Python from the root, with the project and the helpers of its tests."""
    paths = [ROOT, ROOT / "kernels", ROOT / "tests" / "helpers"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, **more
    )


def results_of(*names: str) -> list[dict[str, Any]]:
    """Run cases in a process of their own, and return what each printed."""
    done = python("-m", "tests.simgpu.cases", *names)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert len(lines) == len(names), done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in lines]


def check(result: dict[str, Any]) -> None:
    """Assert that a case ran, and did not wait where it should not."""
    name = result["case"]
    assert not result["error"], f"{name}\n{result['error']}"
    calls = result["calls"]
    waits = result["waits"]
    for phase, each, per_call in (
        ("microbatches", "microbatch", WAITS_IN_MICROBATCHES.get(name, 0)),
        ("optimizer step", "optimizer step", WAITS_PER_STEP.get(name, 1)),
    ):
        most = per_call * calls.get(each, 0)
        assert waits.get(phase, 0) <= most, (name, phase, result["places"][phase])


def check_launches(phase: str, launches: float, limit: Limit, layers: int) -> None:
    most = limit.launches + limit.per_layer * layers
    assert launches <= most, f"{phase}: {launches:g} launches, at most {most:g}"


@pytest.mark.parametrize("names", QUICK, ids=" ".join)
def test_quick_cases(names: tuple[str, ...]) -> None:
    results = results_of(*names)
    for result in results:
        check(result)
        if result["case"] != "default":
            continue
        # The first optimizer steps also make AdamW's state, so the slow tests count them.
        launches = result["launches"]["microbatches"] / result["calls"]["microbatch"]
        check_launches("microbatch", launches, LIMITS["microbatch"], LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in sum(QUICK, ())])
def test_case(name: str) -> None:
    (result,) = results_of(name)
    check(result)


@pytest.mark.slow
def test_no_phase_takes_more_launches_or_waits_than_stated() -> None:
    done = python("-m", "tests.simgpu.measure", "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert rows.keys() == LIMITS.keys()
    for phase, (fixed, per_layer, waits) in rows.items():
        for layers in (1, 24):
            check_launches(phase, fixed + per_layer * layers, LIMITS[phase], layers)
        assert waits <= LIMITS[phase].waits, f"{phase}: {waits:g} waits"


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 2, 3])
def test_every_line_for_a_first_gpu_runs(part: int, tmp_path: Path) -> None:
    """`benchmarks/on_a_gpu.sh` at toy sizes, without limits on time."""
    tools = tmp_path / "tools"
    tools.mkdir()
    module = f'"{sys.executable}" -W ignore -m tests.simgpu.on_a_gpu'
    scripts = {
        "python": f'exec {module} "$@"',
        "timeout": 'while [ "${1#-}" != "$1" ]; do shift 2; done; shift; exec "$@"',
        "nvidia-smi": "echo a simulated device",
        "ncu": 'while [ "$1" != -m ]; do shift; done; echo dram__bytes; exec "$PYTHON" "$@"',
    }
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/bash\n{script}\n")
        (tools / name).chmod(0o755)
    out = tmp_path / "out"
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": str(tools / "python"),
        "PYTHONPATH": str(ROOT / "tests" / "helpers"),
        "OUT": str(out),
        "TINY": "cuda",
        "SECONDS": "-36000",  # of the script's clock: the suite has ten hours
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    command = ["bash", "benchmarks/on_a_gpu.sh", str(part)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-4000:]
    for wrong in ("FAILED", "Traceback", "no time left", "the time is up", " failed"):
        assert wrong not in printed, printed[-6000:]
    assert part != 3 or "exit 0" in printed  # the demo
    files = {1: ("smoke", "tests"), 2: ("rows", "programs", "head", "counters"), 3: ("trainer",)}
    for name in files[part]:
        assert (out / f"{name}.txt").stat().st_size > 0
    for name in {1: (), 2: ("suite",), 3: ("training",)}[part]:
        assert json.loads((out / f"{name}.json").read_text())["benchmarks"]
