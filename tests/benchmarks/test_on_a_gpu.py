"""The commands for a first GPU, at toy size on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import on_a_gpu, tune
from fastppo.cli import main as fastppo_command

SCRIPT = Path(on_a_gpu.__file__).with_suffix(".sh")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="these run in Triton's interpreter"),
    # Entries far below a maximum are meant to overflow to −inf.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]


@pytest.mark.slow
@pytest.mark.parametrize("part", on_a_gpu.PARTS)
def test_each_part_runs_without_a_failure(part: str, capfd) -> None:
    on_a_gpu.main([part, "--tiny", "--device", "cpu", "--seconds", "3600"])
    printed = capfd.readouterr().out
    assert "FAILED" not in printed
    assert "skipped" not in printed
    if part == "smoke":
        assert printed.count("ok  ") == 11
    if part in ("rows", "head"):
        assert printed.count(" ms  best") >= 2


class ReachedError(Exception):
    """Raised when a command has parsed its arguments."""


def _commands(step: int, folder: Path) -> list[list[str]]:
    """Return the script's calls of Python, recorded by a replacement that does nothing."""
    written = folder / "commands"
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {written}; echo >> {written}\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "OUT": str(folder / "out")}
    environment.pop("TINY", None)
    root = SCRIPT.parents[1]
    subprocess.run(["bash", str(SCRIPT), str(step)], check=True, cwd=root, env=environment)
    return [command.splitlines() for command in written.read_text().split("\n\n") if command]


def _selected(arguments: list[str]) -> int:
    """Return the number of tests that these arguments of pytest select."""
    command = [sys.executable, "-m", "pytest", *arguments, "--collect-only"]
    # pytest-benchmark warns in a worker of pytest-xdist, and warnings are errors.
    environment = {key: value for key, value in os.environ.items() if "XDIST" not in key}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=SCRIPT.parents[1], env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sum("::" in line for line in done.stdout.splitlines())


@pytest.mark.parametrize("step", [1, 2, 3])
def test_every_command_of_the_script_parses(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def reached(*arguments: object, **options: object) -> None:
        raise ReachedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("benchmarks.tune.works", reached)
    monkeypatch.setattr("fastppo.demo.run.run_demo", reached)
    monkeypatch.setattr(on_a_gpu, "PARTS", dict.fromkeys(on_a_gpu.PARTS, reached))
    mains = {
        "benchmarks.on_a_gpu": on_a_gpu.main,
        "benchmarks.tune": tune.main,
        "fastppo": fastppo_command,
    }
    modules = []
    for flag, module, *arguments in _commands(step, tmp_path):
        assert flag == "-m"
        modules.append(module)
        if module == "pytest":
            assert arguments[0] != "benchmarks" or _selected(arguments) > 0
            continue
        with pytest.raises(ReachedError):
            mains[module](arguments)
    assert (
        modules
        == {
            1: ["benchmarks.on_a_gpu", "pytest"],
            2: ["benchmarks.on_a_gpu", "benchmarks.tune", "benchmarks.on_a_gpu", "pytest"],
            3: ["fastppo", "benchmarks.on_a_gpu", "pytest"],
        }[step]
    )
