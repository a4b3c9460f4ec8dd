"""The trainer, the stages and the drop-in functions on the simulated CUDA device; see README.md."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import many_ranks
import pytest
import torch

from tests.simgpu.build import compiler
from tests.simgpu.cases import CASES
from tests.simgpu.limits import LIMITS, Limit
from tests.simgpu.ranks import VARIANTS

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="the simulated device is compiled with g++"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch's CPU build is needed"),
]

QUICK = (("refusals", "default", "critic"), ("generate_llama", "step"))
"""Cases of the quick tests; those of a group share a process."""

LAYERS = 2
"""Layers of the model of the cases."""


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python from the root, with the project, the helpers of its tests, and variables."""
    paths = [ROOT, ROOT / "kernels", ROOT / "tests" / "helpers"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= variables
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


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
    places = result["places"].get("microbatches", [])
    if name.startswith("function_"):  # of an example, which may wait, as a user's may
        assert all(" at examples/" in place for place in places), (name, places)
    else:
        assert not waits.get("microbatches"), (name, places)
    steps = calls.get("optimizer step", 0)
    assert waits.get("optimizer step", 0) <= steps, (name, result["places"]["optimizer step"])


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
    if name == "trl_grpo.py":
        pytest.importorskip("trl", reason="TRL is not installed")
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


def run_ranks(count: int, *arguments: str) -> list[str]:
    """Run `tests.simgpu.ranks` in several processes; return what each printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    with ThreadPoolExecutor(count) as pool:
        started = [
            pool.submit(python, "-m", "tests.simgpu.ranks", *arguments, RANK=str(rank), **address)
            for rank in range(count)
        ]
        ended = [each.result() for each in started]
    for done in ended:
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [done.stdout for done in ended]


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_train_as_one_does_without_waits_in_a_microbatch(
    name: str, tmp_path: Path
) -> None:
    """FSDP2 over two devices."""
    results = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        for printed in run_ranks(count, name, str(folder)):
            result = json.loads(printed.splitlines()[-1])
            check({"case": f"{count} ranks", "error": "", **result})
            assert result["waits"]["experience"] == result["calls"]["experience"]
        results.append(torch.load(folder / "result.pt", weights_only=False))
    differences = many_ranks.difference(*results)
    # The rounding of reordered sums, as in tests/test_many_ranks.py.
    assert max(differences.values()) <= (1e-6 if name == "fp32" else 2**-8), differences


@pytest.mark.slow
def test_the_fsdp_example_has_one_gradient_on_two_ranks() -> None:
    printed, _ = run_ranks(2, "example")
    norms = re.search(r"norm of the gradient (\S+), of one process with all rows (\S+)\n", printed)
    assert norms is not None, printed
    assert float(norms[1]) == pytest.approx(float(norms[2]), rel=1e-5)
    assert "outside the forward: weight" in printed


PARTS = {
    1: ("smoke.txt", "tests.txt"),
    2: ("rows.txt", "programs.txt", "head.txt", "counters.txt", "suite.json"),
    3: ("demo.txt", "trainer.txt", "training.json"),
}
"""Files that each part of `benchmarks/on_a_gpu.sh` writes."""


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_for_a_first_gpu_runs(part: int, tmp_path: Path) -> None:
    """`benchmarks/on_a_gpu.sh` at toy sizes, without limits on time."""
    tools = tmp_path / "tools"
    tools.mkdir()
    module = f'"{sys.executable}" -W ignore -m tests.simgpu.on_a_gpu'
    scripts = {
        "python": f'exec {module} "$@"',
        "timeout": 'while [ "${1#-}" != "$1" ]; do shift 2; done; shift; exec "$@"',
        "nvidia-smi": "echo a simulated device",
        "ncu": 'while [ "$1" != "$PYTHON" ]; do shift; done; "$@" && echo gpu__time_duration.sum',
    }
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/bash\n{script}\n")
        (tools / name).chmod(0o755)
    out = tmp_path / "out"
    environment = {
        **{name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")},
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
    for wrong in ("FAILED", "Traceback", "no time left", "the time is up", " failed", "exit 1"):
        assert wrong not in printed, printed[-6000:]
    for name in PARTS[part]:
        assert (out / name).stat().st_size > 0, name
