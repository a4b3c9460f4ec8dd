"""Tuning of the kernels' programs, with a fake clock instead of a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fastppo_kernels.triton import programs
from fastppo_kernels.triton.programs import TABLE, Program

from benchmarks import tune

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="these run in Triton's interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]

ROW = "longer rows, read twice"


def seconds_by(row: str, times: dict[int, float]) -> Callable[[Callable[[], object]], float]:
    """Return a clock by the warps of the current program. Missing times fail."""

    def seconds(call: Callable[[], object]) -> float:
        call()
        return times[TABLE[row].num_warps]

    return seconds


def tuned(times: dict[int, float], say: Callable[[str], None]) -> dict[str, Program]:
    candidates = tuple(Program(warps, loads=4, registers=128) for warps in (4, 8, 16))
    work = tune.Work(ROW, candidates, lambda: lambda: None)
    seconds = seconds_by(ROW, times)
    return tune.tune([work], seconds, source="H200", end=math.inf, say=say)


@pytest.mark.parametrize(
    ("times", "warps"),
    [
        ({4: 3.0, 8: 1.0, 16: 2.0}, 8),
        ({4: 3.0, 8: 1.99, 16: 2.0}, 16),  # within the margin
        ({4: 3.0, 16: 2.0}, 16),  # a failed launch
    ],
)
def test_the_fastest_program_wins_and_the_table_is_restored(
    times: dict[int, float], warps: int
) -> None:
    before = dict(TABLE)
    said: list[str] = []
    chosen = tuned(times, said.append)
    assert chosen == {ROW: Program(warps, loads=4, registers=128, source="H200")}
    assert before == TABLE
    assert sum("FAILED" in line for line in said) == (8 not in times)
    assert said[-1] == (f'    "{ROW}": Program({warps}, loads=4, registers=128, source="H200"),')


def test_only_tuned_rows_of_the_file_change() -> None:
    chosen = tuned({4: 3.0, 8: 1.0, 16: 2.0}, lambda line: None)
    module: dict[str, Any] = {"__name__": "rewritten"}
    exec(compile(tune.rewritten(tune.FILE.read_text(), chosen), "programs.py", "exec"), module)
    want = {name: tuple(program) for name, program in (TABLE | chosen).items()}
    assert {name: tuple(program) for name, program in module["TABLE"].items()} == want
    with pytest.raises(ValueError, match="'no such'"):
        tune.rewritten(tune.FILE.read_text(), {"no such": Program(1)})


def test_every_work_launches_the_program_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first candidate runs in Triton's interpreter."""
    looked_up: set[str] = set()

    class Watched(dict[str, Program]):
        def __getitem__(self, row: str) -> Program:
            looked_up.add(row)
            return super().__getitem__(row)

    monkeypatch.setattr(programs, "TABLE", Watched(TABLE))
    by_length = {4096: "rows to 16 KiB", 32000: "rows to 128 KiB", 151936: "longer rows"}
    for work in tune.works(torch.device("cpu"), tiny=True):
        assert work.candidates
        if "rows" in work.row:  # toy rows are short, and their length selects the row
            vocab = work.make.args[0]
            sweeps = 2 if work.row.endswith("twice") else 1
            assert programs.for_rows(2 * vocab, sweeps=sweeps) is TABLE[work.row]
            assert work.row.startswith(by_length[vocab])
            continue
        looked_up.clear()
        work.make()()
        assert work.row in looked_up


def test_tune_refuses_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(["--device", "cpu"])
    assert "tune needs a GPU" in capsys.readouterr().err
