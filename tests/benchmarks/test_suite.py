"""Runs of `pytest benchmarks`: a planted fault, the results file, promised ratios, commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import conftest, measure
from benchmarks.test_promises import Promise, keep
from fastppo import cli

ROOT = Path(__file__).parents[2]

FAULT = """
from benchmarks import sequences

right = sequences.loop_gae

def wrong(rewards, values, mask):
    advantages, returns = right(rewards, values, mask)
    return advantages, 1.001 * returns

sequences.loop_gae = wrong
"""


def run(
    *arguments: str, plugins: Path = ROOT, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{plugins}:{ROOT}:{ROOT / 'kernels'}"}
    environment.pop("PYTEST_XDIST_WORKER", None)  # pytest-benchmark would measure nothing
    command = [sys.executable, "-m", "pytest", str(ROOT / "benchmarks"), "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "-c", str(ROOT / "pyproject.toml"), "--device", "cpu", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=environment,
    )


def test_right_providers_are_timed_and_a_wrong_one_fails(tmp_path: Path) -> None:
    (tmp_path / "fault.py").write_text(FAULT)
    flags = ["--quick", "-k", "test_case and gae", "--benchmark-max-time", "0.01"]
    path = tmp_path / "results.json"
    done = run(*flags, "--benchmark-json", str(path), "-p", "fault", plugins=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Python loop: returns is off by 1.0e-03, allowed 1e-04" in done.stdout
    assert re.search(r"benchmark 'gae, B=64, T=1024, floor [\d.]+ µs'", done.stdout)
    record = json.loads(path.read_text())
    assert "node" not in record["machine_info"]
    assert record["machine_info"]["device"]["type"] == "cpu"
    assert record["ceilings"]["copy_bytes_per_second"] > 0
    ours = record["benchmarks"][0]
    names = {test["extra_info"]["provider"] for test in record["benchmarks"]}
    assert "Python loop" not in names
    info = ours["extra_info"]
    assert info["provider"] == "FastPPO"
    assert (info["case"], info["shape"]) == ("gae", "B=64, T=1024")
    assert 0 < info["error"] < 1e-6
    assert info["bytes"] > 0
    assert info["flop"] > 0
    assert info["peak_extra_bytes"] >= 2 * 64 * 1024 * 4
    share = info["floor_seconds"] / ours["stats"]["median"]
    assert info["percent_of_floor"] == pytest.approx(100 * share)


def test_results_of_another_machine_can_be_compared(tmp_path: Path) -> None:
    flags = ["--quick", "-k", "test_case and gae", "--benchmark-max-time", "0.01"]
    done = run(*flags, "--benchmark-save", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob(".benchmarks/*/0001_here.json")
    record = json.loads(path.read_text())
    record["machine_info"]["device"]["cores"] += 1
    path.write_text(json.dumps(record))
    done = run(*flags, "--benchmark-compare", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(0001_here)" in done.stdout
    assert "Benchmark machine_info is different" in done.stdout + done.stderr


def test_a_promised_ratio_is_measured_in_turns(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    done = run("-m", "promise", "-k", "gae and loop", "--benchmark-json", str(path))
    # A busy machine may be below the promise.
    assert done.returncode in (0, 1), done.stdout + done.stderr
    (test,) = json.loads(path.read_text())["benchmarks"]
    info = test["extra_info"]
    assert len(test["stats"]["data"]) == 9
    assert statistics.median(test["stats"]["data"]) == pytest.approx(info["our_seconds"])
    assert info["our_seconds"] < info["their_seconds"]
    low, high = info["quartiles"]
    assert low <= info["ratio"] <= high
    assert (done.returncode == 0) == (info["ratio"] >= info["promised"] == 60.0)


@pytest.mark.parametrize("load", [0.1, 7.9])
def test_a_busy_machine_is_reported(load: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    header = conftest.pytest_report_header()
    assert ("the machine is busy: load 7.9 on" in header) == (load > 1)


def test_a_ratio_below_the_promised_one_fails() -> None:
    promise = Promise("gae", "B=1, T=1", "faster", "a loop", 2.0)
    benchmark: Any = SimpleNamespace(extra_info={})
    keep(promise, 2.0, benchmark)
    assert benchmark.extra_info["ratio"] == 2.0
    with pytest.raises(AssertionError, match=r"1\.9 times, expected Promise"):
        keep(promise, 1.9, benchmark)


def test_replayed_times_are_the_differences_of_readings() -> None:
    replay = measure.Replay()
    replay.load([0.25, 2.0])
    assert [-replay() + replay() for _ in range(2)] == [0.25, 2.0]


def test_turns_alternate_in_going_first() -> None:
    calls: list[str] = []
    pairs = measure.in_turns(
        lambda turn: calls.append(f"a{turn}"), lambda turn: calls.append(f"b{turn}"), 3
    )
    assert calls == ["a0", "b0", "a0", "b0", "b1", "a1", "a2", "b2"]
    assert len(pairs) == 3


def test_fastppo_bench_is_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", "--help"])
    assert "usage: fastppo bench" in capsys.readouterr().out
    calls: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pytest, "main", lambda arguments: calls.append(arguments) or 5)
    assert cli.main(["bench", "--quick", "-k", "gae"]) == 5
    assert calls == [["benchmarks", "--quick", "-k", "gae"]]
    assert Path.cwd() == ROOT
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    assert cli.main(["bench", "--quick"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "clone the repository" in error


def test_commands_of_the_suites_readme_are_commands() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text("utf-8").replace("\\\n", "")
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 5
    known = run("--help").stdout
    selecting = []
    for line in "".join(blocks).splitlines():
        words = shlex.split(line, comments=True)
        if words[0] in ("pytest", "fastppo"):
            flags = [word for word in words if word.startswith("--")]
            assert all(f"\n  {flag}" in known for flag in flags), line
            if "-k" in words or "-m" in words:
                selecting.append(words[2:])
        elif words[0] == "pip":
            assert words[1] == "install"
        elif words[0] == "bash":
            assert f"\n{words[2]})" in (ROOT / words[1]).read_text("utf-8"), "no such part"
        else:
            assert words[:2] == ["python", "-m"]
            assert (ROOT / f"{words[2].replace('.', '/')}.py").exists()
    assert len(selecting) == 3
    for arguments in selecting:
        done = run("--collect-only", "-q", *arguments)
        assert done.returncode == 0, (arguments, done.stdout[-1000:])


@pytest.mark.parametrize(
    ("value", "arguments", "seconds"),
    [
        ("1.0", (), 0.5),
        (Decimal("1.0"), ("--benchmark-max-time=1",), 1.0),
        (Decimal("0.2"), (), 0.2),
    ],
    ids=["default", "argument", "PYTEST_ADDOPTS"],
)
def test_timing_takes_half_a_second_unless_given(
    value: Any, arguments: tuple[str, ...], seconds: float
) -> None:
    option = SimpleNamespace(benchmark_max_time=value, benchmark_columns=[])
    config = SimpleNamespace(
        option=option,
        invocation_params=SimpleNamespace(args=arguments),
        pluginmanager=SimpleNamespace(hasplugin=lambda name: True),
    )
    conftest.pytest_configure(config)  # type: ignore[arg-type]
    assert float(option.benchmark_max_time) == seconds
