"""The records of a run directory: one line per iteration or step."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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
def test_records_have_the_number_of_the_iteration_or_step(index: str, tmp_path: Path) -> None:
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


def test_a_resume_deletes_the_lines_past_the_checkpoint(tmp_path: Path) -> None:
    log = RunLog(tmp_path, Config(), index="step")
    for number in range(5):
        log.metrics(number, {"loss": float(number)})
        log.samples(number, [{"text": "old \u2028\x85 é"}] * 2)  # line ends for Python
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"it')  # the run was killed while it wrote
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(b'{"text": "' + "é".encode()[:1])
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 5
    log.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.rename(events.with_name("events.out.tfevents.1.a"))  # names have only whole seconds
    resumed = RunLog(tmp_path, Config(), index="step", first=3)
    assert [note.split(": ")[0] for note in resumed.notes] == [
        str(tmp_path / name) for name in ("metrics.jsonl", "samples.jsonl")
    ]
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    resumed.metrics(3, {"loss": 30.0})
    resumed.samples(3, [{"text": "new"}])
    losses = [(r["step"], r["loss"]) for r in read_jsonl(tmp_path / "metrics.jsonl")]
    assert losses == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    samples = [(r["step"], r["text"]) for r in read_jsonl(tmp_path / "samples.jsonl")]
    assert samples == [(i, "old \u2028\x85 é") for i in range(3) for _ in range(2)] + [(3, "new")]
    assert _scalars(tmp_path, "loss") == losses
    assert not list(tmp_path.glob("*.tmp"))


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 0}\n{"iter\n')
    with pytest.raises(ValueError, match=f"{path}, line 2: "):
        cut(path, "iteration", 2)


def test_warnings_are_recorded_with_the_metrics(tmp_path: Path) -> None:
    log = RunLog(tmp_path, Config())
    log.metrics(0, {"reward": 1.0})
    log.metrics(1, {"reward": 2.0}, ["kl = 31.2 > 20"])
    first, second = read_jsonl(tmp_path / "metrics.jsonl")
    assert "warnings" not in first
    assert second == {"iteration": 1, "reward": 2.0, "warnings": ["kl = 31.2 > 20"]}
    assert "kl = 31.2 &gt; 20" in write_report(tmp_path).read_text()


def test_every_start_of_a_run_has_a_line(tmp_path: Path) -> None:
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


# ------------------------------------------------------------------------------------- the terminal


def test_the_remaining_time_leaves_out_the_first_step() -> None:
    """A first step of 100 s, in which kernels are compiled, and others of 10 s."""
    printed = io.StringIO()
    clock = [0.0]
    console = Console(file=printed, width=120, get_time=lambda: clock[0])
    with progress("PPO", console, total=10) as show:
        for step in range(1, 11):
            clock[0] = 100.0 + 10 * (step - 1)
            show(completed=step)
    lines = printed.getvalue().splitlines()
    assert ["left" in line for line in lines] == [False] + [True] * 8 + [False]
    assert lines[3] == "PPO 4/10  130 s, 0:01:00 left"


def test_short_names_are_the_shortest_distinct_ends() -> None:
    assert short_names(["runs/a/policy", "runs/b/policy"]) == ["a/policy", "b/policy"]
    assert short_names(["runs/sft", "org/model"]) == ["sft", "model"]
    assert short_names(["runs/sft", "runs/sft"]) == ["runs/sft (1)", "runs/sft (2)"]
