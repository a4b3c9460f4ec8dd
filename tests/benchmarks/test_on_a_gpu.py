"""The commands for a first GPU: their parts run at toy size, where there is none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import on_a_gpu

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
        assert said.count("ok  ") == 11
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
