"""The commands for a first GPU: their parts run at toy size, where there is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch

import fastppo
from benchmarks import __main__ as suite
from benchmarks import on_a_gpu
from fastppo.cli import main as fastppo_command

SCRIPT = Path(on_a_gpu.__file__).with_suffix(".sh")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="these run in Triton's interpreter"),
    # NumPy announces what is meant to happen: what lies under a maximum overflows to −inf.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]


@pytest.mark.parametrize("part", on_a_gpu.PARTS)
def test_each_part_runs_and_nothing_in_it_fails(part: str, capfd) -> None:
    on_a_gpu.main([part, "--tiny", "--device", "cpu"])
    said = capfd.readouterr().out
    assert "FAILED" not in said
    assert "skipped" not in said
    if part == "smoke":
        assert said.count("ok  ") == 13
    if part in ("rows", "head"):
        assert said.count(" ms  best") >= 3


def test_a_launch_parameter_is_put_back() -> None:
    from fastppo_kernels import triton_rows

    before = triton_rows.TILES
    with on_a_gpu.launched_with(8, 2):
        assert triton_rows.tile(2**20, 2, singles=False).num_warps == 8
    assert triton_rows.TILES is before


def test_a_line_that_fails_says_so_and_the_time_ends(capsys) -> None:
    def fails() -> None:
        raise ValueError("no such kernel")

    on_a_gpu.Bench(torch.device("cpu"), 60).line("first", fails)
    on_a_gpu.Bench(torch.device("cpu"), -1).line("second", fails)
    first, second = capsys.readouterr().out.splitlines()
    assert "FAILED ValueError: no such kernel" in first
    assert "second" in second
    assert "skipped" in second


def test_the_script_is_one_that_bash_reads_and_names_parts_that_are_there() -> None:
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n", str(SCRIPT)], check=True)
    text = SCRIPT.read_text(encoding="utf-8")
    named = {line.split()[2] for line in text.splitlines() if line.strip().startswith("part ")}
    assert named == {"smoke", "rows", "head", "trainer"}
    assert named <= on_a_gpu.PARTS.keys()


class ReachedError(Exception):
    """A command has taken its arguments and would begin."""


def _commands(step: int, folder: Path) -> list[list[str]]:
    """What the script gives to Python, which here writes it down and does nothing."""
    said = folder / "said"
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {said}; echo >> {said}\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "OUT": str(folder / "out")}
    environment.pop("TINY", None)
    root = SCRIPT.parents[1]
    subprocess.run(["bash", str(SCRIPT), str(step)], check=True, cwd=root, env=environment)
    return [each.splitlines() for each in said.read_text().split("\n\n") if each]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_every_command_of_the_script_takes_its_arguments(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite refused them once, and nothing of it would have been measured."""

    def reached(*arguments: object, **options: object) -> None:
        raise ReachedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(suite, "run", reached)
    monkeypatch.setattr("fastppo.demo.run.run_demo", reached)
    monkeypatch.setattr(on_a_gpu, "PARTS", dict.fromkeys(on_a_gpu.PARTS, reached))
    found = []
    for flag, module, *arguments in _commands(step, tmp_path):
        assert flag == "-m"
        found.append(module)
        if module == "pytest":
            chosen = [each for each in arguments if each.startswith("tests/")]
            assert all((SCRIPT.parents[1] / each).exists() for each in chosen)
            continue
        main = {
            "benchmarks": suite.main,
            "benchmarks.on_a_gpu": on_a_gpu.main,
            "fastppo": fastppo_command,
        }[module]
        with pytest.raises(ReachedError):
            main(arguments)
    assert (
        found
        == {
            1: ["benchmarks.on_a_gpu", "pytest"],
            2: ["benchmarks.on_a_gpu"] * 2 + ["benchmarks"],
            3: ["fastppo", "benchmarks.on_a_gpu", "benchmarks"],
        }[step]
    )


def test_the_script_runs_every_test_that_needs_a_gpu(tmp_path: Path) -> None:
    """But those of vLLM, which is not on that machine."""
    tests = SCRIPT.parents[1] / "tests"
    (words,) = (each for each in _commands(1, tmp_path) if each[1] == "pytest")
    named = [SCRIPT.parents[1] / word for word in words if word.startswith("tests/")]
    marked = [path for path in tests.rglob("test_*.py") if "mark.gpu" in path.read_text()]
    left = {path.name for path in marked if not any(map(path.is_relative_to, named))}
    assert left == {"test_vllm.py", Path(__file__).name}, "this file only speaks of the mark"


def test_waits_are_counted_by_the_line_of_ours_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the folder is called that the project lies in; what torch says of its own mode is
    no wait."""
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    place = Path(fastppo.__file__).parent / "ppo" / "made_up.py"
    line = "import warnings\nwarnings.warn('called a synchronizing CUDA operation')\n"
    waits = compile(line, str(place), "exec")

    def call() -> None:
        warnings.warn("does not yet detect all synchronizing operations", stacklevel=1)
        for _ in range(3):
            exec(waits)

    assert on_a_gpu._host_waits(call) == [("made_up.py:2", 3)]


def test_results_of_parts_make_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second part has a case anew and another one, and a third that its time did not reach."""
    monkeypatch.setattr("benchmarks.report.RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()

    def part(name: str, date: str, **milliseconds: float | None) -> str:
        cases = [
            {
                "case": case,
                "shape": "N=2",
                "dtype": "float32",
                "rows": [{"status": "timed" if time else "skipped", "median_seconds": time}],
            }
            for case, time in milliseconds.items()
        ]
        record = {"format": 2, "set": "default", "packages": {"torch": "2"}, "date": date}
        record |= {"device": {"name": "GPU 1"}, "cases": cases, "sweeps": []}
        (tmp_path / name).write_text(json.dumps(record))
        return str(tmp_path / name)

    assert suite.main(["keep", part("a.json", "2026-01-02T10", loss=1.0, gae=2.0)]) == 0
    assert (
        suite.main(["keep", part("b.json", "2026-01-02T11", gae=3.0, whiten=4.0, loss=None)]) == 0
    )
    kept = json.loads((tmp_path / "results" / "gpu-1.json").read_text())
    found = {case["case"]: case["rows"][0]["median_seconds"] for case in kept["cases"]}
    assert found == {"loss": 1.0, "gae": 3.0, "whiten": 4.0}
    for other, says in (
        ({"date": "2026-01-03T11"}, "the new results are of 2026-01-03"),
        ({"packages": {"torch": "3"}}, "its packages: {'torch': '2'}"),
        ({"set": "quick"}, "only results of the default set are kept, got the quick set"),
    ):
        path = Path(part("c.json", "2026-01-02T12", gae=5.0))
        path.write_text(json.dumps(json.loads(path.read_text()) | other))
        with pytest.raises(SystemExit):
            suite.main(["keep", str(path)])
        assert says in " ".join(capsys.readouterr().err.split())
    assert json.loads((tmp_path / "results" / "gpu-1.json").read_text()) == kept
