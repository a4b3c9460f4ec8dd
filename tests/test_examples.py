"""The files in examples/ run as a reader would run them, and learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 150


@pytest.mark.parametrize("name", ["ppo.py", "grpo.py"])
def test_an_example_learns(name: str) -> None:
    """Chance is 1/16."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), "--iterations", "31"],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rewards = [float(each) for each in re.findall(r" reward (\d\.\d{3}) ", done.stdout)]
    assert len(rewards) == 4
    assert rewards[0] < 0.12
    assert rewards[-1] > 0.3


def test_the_example_of_a_task_learns_to_call_and_to_answer(tmp_path: Path) -> None:
    """On sums that it was not trained on. A policy at random calls in 1 of 23 first turns."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "tasks.py"), "--iterations", "20"],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    numbers = re.findall(r"left out (\S+)  held-out (\S+)  greedy (\S+)", done.stdout)
    (_, (left_out, held_out, greedy)) = [tuple(map(float, row)) for row in numbers]
    assert held_out > 0.35, "the call alone earns 0.2"
    assert greedy > 0.35
    assert left_out > 0
    report = tmp_path / "runs" / "adding" / "report.html"
    assert "Held-out prompts" in report.read_text("utf-8")


def test_examples_can_be_read_at_a_sitting() -> None:
    assert {each.name for each in EXAMPLES} == {"ppo.py", "grpo.py", "tasks.py"}
    for path in EXAMPLES:
        assert len(path.read_text("utf-8").splitlines()) <= MOST_LINES, path
