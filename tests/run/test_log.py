"""The records of a run directory: one line per iteration or step, those after a checkpoint anew."""

from __future__ import annotations

import io
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastppo.run.directory import check_no_run, holds_run
from fastppo.run.events import EventFile
from fastppo.run.log import RunLog, cut, read_jsonl, short_names
from fastppo.run.options import Options, option
from fastppo.run.progress import progress
from fastppo.run.report.report import write_report


@dataclass(kw_only=True, frozen=True)
class Config(Options):
    """Run."""

    seed: int = option(0, "Seed", minimum=0)


def _scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of a TensorBoard scalar."""
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


@pytest.mark.parametrize("index", ["iteration", "step"])
def test_a_record_is_numbered_by_what_the_run_counts(index: str, tmp_path: Path) -> None:
    log = RunLog(tmp_path, Config(seed=3), index=index)
    log.metrics(0, {"loss": 1.0, "kl": 0.5})
    log.metrics(5, {"loss": 2.0})
    log.samples(5, [{"prompt": "a"}, {"prompt": "b"}])
    assert read_jsonl(tmp_path / "metrics.jsonl") == [
        {index: 0, "loss": 1.0, "kl": 0.5},
        {index: 5, "loss": 2.0},
    ]
    assert read_jsonl(tmp_path / "samples.jsonl") == [
        {index: 5, "prompt": "a"},
        {index: 5, "prompt": "b"},
    ]
    assert _scalars(tmp_path, "loss") == [(0, 1.0), (5, 2.0)]


def test_a_directory_that_is_removed_between_two_records_stays_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    log = RunLog(run, Config())
    events = EventFile(run / "tensorboard", 0)
    shutil.rmtree(run)
    with pytest.raises(RuntimeError, match=r"metrics.jsonl could not be written: .* No such file"):
        log.metrics(0, {"loss": 1.0})
    with pytest.raises(RuntimeError, match=r"samples.jsonl could not be written: .* No such file"):
        log.samples(0, [{"prompt": "a"}])
    with pytest.raises(RuntimeError, match=r"tfevents.* could not be written: .* No such file"):
        events.add(0, {"loss": 1.0})
    assert not run.exists()


@pytest.mark.parametrize("index", ["iteration", "step"])
def test_after_a_resume_the_lines_past_the_checkpoint_are_written_anew(
    index: str, tmp_path: Path
) -> None:
    log = RunLog(tmp_path, Config(), index=index)
    for number in range(5):
        log.metrics(number, {"loss": float(number)})
        log.samples(number, [{"text": "old \u2028\x85 é"}] * 2)  # Python's ends of a line
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"it')  # the run was killed while it wrote
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(b'{"text": "' + "é".encode()[:1])
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 5
    resumed = RunLog(tmp_path, Config(), index=index, first=3)
    assert [note.split(": ")[0] for note in resumed.notes] == [
        str(tmp_path / name) for name in ("metrics.jsonl", "samples.jsonl")
    ]
    assert [record[index] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    resumed.metrics(3, {"loss": 30.0})
    resumed.samples(3, [{"text": "new"}])
    losses = [(r[index], r["loss"]) for r in read_jsonl(tmp_path / "metrics.jsonl")]
    assert losses == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    samples = [(r[index], r["text"]) for r in read_jsonl(tmp_path / "samples.jsonl")]
    assert samples == [(i, "old \u2028\x85 é") for i in range(3) for _ in range(2)] + [(3, "new")]
    assert _scalars(tmp_path, "loss") == losses
    assert not list(tmp_path.glob("*.tmp"))


def test_a_record_that_no_run_has_written_is_named_at_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 0}\n{"iteration": "1"}\n')
    with pytest.raises(ValueError, match=f"{path}, line 2: iteration must be a whole number"):
        cut(path, "iteration", 2)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=f"{path} is no file"):
        cut(path, "iteration", 2)


def test_the_log_keeps_warnings_beside_the_metrics(tmp_path: Path) -> None:
    log = RunLog(tmp_path, Config())
    log.metrics(0, {"reward": 1.0})
    log.metrics(1, {"reward": 2.0}, ["kl = 31.2 > 20"])
    first, second = read_jsonl(tmp_path / "metrics.jsonl")
    assert "warnings" not in first
    assert second == {"iteration": 1, "reward": 2.0, "warnings": ["kl = 31.2 > 20"]}
    assert "kl = 31.2 &gt; 20" in write_report(tmp_path).read_text()


def test_each_part_of_a_run_has_a_line_whatever_became_of_the_last(tmp_path: Path) -> None:
    RunLog(tmp_path, Config(), device="A GPU")
    with (tmp_path / "parts.jsonl").open("a") as file:
        file.write('{"fir')  # killed while it was written
    log = RunLog(tmp_path, Config(), first=3, device="Another")
    log.metrics(3, {"reward": 1.0})
    parts = read_jsonl(tmp_path / "parts.jsonl")
    assert [(part["first"], part["device"]) for part in parts] == [(0, "A GPU"), (3, "Another")]
    assert "torch" in parts[0]["versions"]
    assert f"{parts[0]['started']} · Another" in write_report(tmp_path).read_text()
    assert (tmp_path / "config.yaml").exists()


# ----------------------------------------------------------------------------------- the directory


def test_a_directory_is_free_until_a_run_has_left_records_or_a_checkpoint(tmp_path: Path) -> None:
    check_no_run(tmp_path / "absent")
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    (tmp_path / "metrics.jsonl").touch()  # it failed before its first record
    check_no_run(tmp_path)
    assert not holds_run(tmp_path)
    (tmp_path / "checkpoint-000001").mkdir()
    assert holds_run(tmp_path)
    (tmp_path / "checkpoint-000001").rmdir()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="holds a run already: resume it with `resume: true`"):
        check_no_run(tmp_path)


# ------------------------------------------------------------------------------------- the terminal


def test_no_time_is_estimated_before_it_is_worth_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first step of 100 s, in which kernels are compiled, and others of 10 s."""
    printed = io.StringIO()
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with progress("PPO", Console(file=printed, width=120), total=10) as show:
        for step in range(1, 11):
            clock[0] = 100.0 + 10 * (step - 1)
            show(completed=step)
    lines = printed.getvalue().splitlines()
    assert ["left" in line for line in lines] == [False] * 3 + [True] * 6 + [False]
    assert lines[3] == "PPO 4/10  130 s, 1 min 0 s left"


def test_runs_go_by_the_shortest_names_that_tell_them_apart() -> None:
    assert short_names(["runs/a/policy", "runs/b/policy"]) == ["a/policy", "b/policy"]
    assert short_names(["runs/sft", "org/model"]) == ["sft", "model"]
    assert short_names(["runs/sft", "runs/sft"]) == ["runs/sft (1)", "runs/sft (2)"]
