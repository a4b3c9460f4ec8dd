"""What a run survives, on the command line: kills, damaged checkpoints, a second run, signals, a
broken console, a full disk, another config. docs/survival.md describes the same."""

from __future__ import annotations

import html
import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import command_line
import kills
import pytest
import stage_runs
import tiny
import torch
from command_line import Folder

from fastppo import cli
from fastppo.run import manifest
from fastppo.run.log import read_jsonl

pytestmark = pytest.mark.usefixtures("default_signals")

KILLS = int(os.environ.get("FASTPPO_KILLS", "20"))


# -------------------------------------------------------------------------------------------- kills


def test_a_killed_run_resumes_to_the_bits_of_an_uninterrupted_one(folder: Folder, run) -> None:
    assert run(iterations=3)[0] == 0
    bits = folder.bits()
    shutil.rmtree(folder.run)
    text = folder.reward.read_text()
    folder.write_reward("calls == 3 and os.kill(os.getpid(), signal.SIGKILL)")
    log = folder.path / "log.txt"
    process = command_line.start(folder.flags(iterations=3), log)
    assert command_line.finish(process) == -signal.SIGKILL, log.read_text()
    assert folder.checkpoints() == ["checkpoint-000001", "checkpoint-000002"]
    folder.reward.write_text(text)
    assert run(resume="force", iterations=3)[0] == 0
    assert folder.bits() == bits


@pytest.mark.slow
def test_runs_killed_at_random_resume_to_the_same_bits(tmp_path: Path) -> None:
    """While loading, training and writing, and one process of two.

    `python tests/tools/kills.py` also ends consoles.
    """
    ways = kills.kill(KILLS, tmp_path, with_consoles=False)
    assert any("in a write" in way for way in ways)


# ------------------------------------------------------------------------------ damaged checkpoints


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(folder: Folder, run) -> None:
    """The run ends with the bits of a run without damage."""
    options = {"iterations": 2, "reference_refresh": 1, "kl_coef": 0, "kl_loss_coef": 0.1}
    assert run(**options)[0] == 0
    bits = folder.bits()
    newest = folder.run / "checkpoint-000002"
    _flip_a_bit(newest / "model.safetensors")
    code, said = run(**options, resume=True)
    assert code == 0
    assert re.search(rf"{newest}: model\.safetensors ", said)
    assert f"resuming from {folder.run / 'checkpoint-000001'}" in said
    assert (folder.run / "damaged-checkpoint-000002").is_dir()
    assert folder.bits() == bits
    assert folder.checkpoints() == ["checkpoint-000001", "checkpoint-000002"]


class Calls:
    """Its pickle makes a directory when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_in_a_checkpoint_is_not_executed(folder: Folder, run) -> None:
    assert run(iterations=1)[0] == 0
    checkpoint = folder.run / "checkpoint-000001"
    owner = manifest.read(checkpoint)
    torch.save(Calls(folder.run / "called"), checkpoint / "optimizer.pt")
    manifest.write(checkpoint, owner)
    code, said = run(iterations=2, resume=True)
    assert code == 2
    assert re.search(f"{checkpoint} .*Weights only load failed", said)
    assert not (folder.run / "called").exists()


# -------------------------------------------------------------------------- two runs, one directory


def test_a_second_run_in_a_directory_is_refused_before_it_loads_a_model(
    folder: Folder, run
) -> None:
    ready, go_on = folder.path / "ready", folder.path / "go_on"
    folder.write_reward(
        f"import pathlib, time; calls == 1 and pathlib.Path({str(ready)!r}).touch()\n"
        f"    while calls == 1 and not pathlib.Path({str(go_on)!r}).exists(): time.sleep(0.01)"
    )
    log = folder.path / "log.txt"
    first = command_line.start(folder.flags(iterations=1), log)
    assert command_line.wait_for(ready.exists, first), log.read_text()
    hollow = folder.path / "hollow"
    shutil.copytree(folder.model, hollow)
    (hollow / "model.safetensors").write_bytes(b"")
    # Weights that do not load would be complained of, were they read.
    code, said = run(iterations=1, model=hollow, resume=True)
    assert code == 2
    assert re.search(f"{folder.run}: .*{first.pid} ", said)
    go_on.touch()
    assert command_line.finish(first) == 0, log.read_text()
    assert len(read_jsonl(folder.run / "metrics.jsonl")) == 1


# ------------------------------------------------------------------------------------------ signals


def test_a_signal_ends_the_current_phase_with_a_checkpoint(folder: Folder, run) -> None:
    """The reward sends it: the iteration is repeated after the resume, in the same bits."""
    options = {"iterations": 3, "checkpoint_interval": 0}
    assert run(**options)[0] == 0
    bits = folder.bits()
    shutil.rmtree(folder.run)
    folder.write_reward("calls == 2 and os.kill(os.getpid(), signal.SIGTERM)")
    code, said = run(**options)
    assert code == 143
    where = folder.run / "checkpoint-000001"
    assert re.search(f"SIGTERM after 1 of 3 iterations.*--resume true.* {where}\n", said)
    assert folder.checkpoints() == ["checkpoint-000001"]
    assert len(read_jsonl(folder.run / "metrics.jsonl")) == 1
    folder.write_reward("calls == 0")
    code, said = run(**options, resume="force")
    assert code == 0
    assert re.search(f"resuming from {where}.* SIGTERM", said)
    assert folder.bits() == bits


ENDS = {
    "stopped by SIGINT": ({}, "os.kill(os.getpid(), signal.SIGINT)", 130),
    "kl = ": ({"stop_if": "kl > -1000"}, "", 1),
    "every prompt is solved (solved_reward)": ({"solved_reward": -1}, "", 0),
    "reward 'count' raised ZeroDivisionError": ({}, "1 / 0", 1),
}
"""By the reason: options, statement of the reward in the second iteration, exit code."""


@pytest.mark.parametrize("reason", ENDS)
def test_a_run_that_ends_early_says_why(reason: str, folder: Folder, run) -> None:
    """The console, the records, the report and the resumed run give the reason."""
    options, act, expected = ENDS[reason]
    if act:
        folder.write_reward(f"calls == 2 and {act}")
    folder.prompts.write_text('{"prompt": "w1"}\n')
    code, said = run(iterations=3, **options)
    assert code == expected
    assert reason in said
    assert "callback" not in said
    assert reason in read_jsonl(folder.run / "parts.jsonl")[0]["ended"]
    report = html.unescape((folder.run / "report.html").read_text())
    assert f"Ended after 1 of 3 iterations: {reason}" in report
    assert ("--resume force" in said) == reason.startswith("reward "), "its file will change"
    _, said = run(iterations=3, **options, resume="force")
    assert f"checkpoint-000001; the run had ended: {reason}" in said


@pytest.mark.parametrize("cause", ["Ctrl-C", "an error"])
def test_a_reward_that_raises_costs_no_iteration(cause: str, folder: Folder, run) -> None:
    """Ctrl-C in a terminal also ends the processes of a reward, so that it raises."""
    options = {"iterations": 3, "checkpoint_interval": 0}
    assert run(**options)[0] == 0
    bits = folder.bits()
    shutil.rmtree(folder.run)
    signals = "os.kill(os.getpid(), signal.SIGINT);" if cause == "Ctrl-C" else ""
    folder.write_reward(f"if calls == 2: {signals} raise OSError('gone')")
    code, said = run(**options)
    assert code == (130 if signals else 1)
    assert ("OSError('gone')" in said) == (not signals)
    assert re.search(f"1 of 3 iterations.*--resume true.* {folder.run}", said)
    assert folder.checkpoints() == ["checkpoint-000001"]
    folder.write_reward("calls == 0")
    assert run(**options, resume="force")[0] == 0
    assert folder.bits() == bits


def test_a_reward_that_raises_at_first_leaves_no_run(folder: Folder, run) -> None:
    folder.write_reward("calls == 1 and 1 / 0")
    assert run(iterations=1)[0] == 1
    assert folder.checkpoints() == []
    folder.write_reward()
    assert run(iterations=1)[0] == 0


def test_a_finished_run_has_nothing_to_resume(folder: Folder, run) -> None:
    assert run(iterations=2)[0] == 0
    code, said = run(iterations=2, resume=True)
    assert code == 0
    assert "--iterations" in said
    assert "2 iterations" in said


def test_a_second_signal_ends_a_run_at_once(folder: Folder) -> None:
    folder.write_reward("import time; calls and time.sleep(1000)")
    log = folder.path / "log.txt"
    process = command_line.start(folder.flags(iterations=2), log)
    assert command_line.wait_for((folder.run / "config.yaml").exists, process), log.read_text()
    process.join(0.2)
    process.terminate()
    assert command_line.wait_for(lambda: "SIGTERM" in log.read_text(), process)
    assert process.is_alive()
    process.terminate()
    assert command_line.finish(process) == -signal.SIGTERM


def test_sigusr1_writes_a_checkpoint_without_stopping(folder: Folder, run) -> None:
    folder.write_reward("calls == 2 and os.kill(os.getpid(), signal.SIGUSR1)")
    code, said = run(iterations=3, checkpoint_interval=0)
    assert code == 0
    assert f"checkpoint {folder.run / 'checkpoint-000002'}\n" in said
    assert folder.checkpoints() == ["checkpoint-000002", "checkpoint-000003"]


# ------------------------------------------------------------------------------ broken consoles


def test_ctrl_c_under_tee_loses_no_iteration(folder: Folder) -> None:
    # The second call waits for the signal, after the first iteration.
    called = folder.path / "called"
    folder.write_reward(
        "import pathlib, time\n"
        f"    calls == 2 and pathlib.Path({str(called)!r}).touch()\n"
        "    while calls == 2 and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:\n"
        "        time.sleep(0.01)\n"
        "    calls == 2 and time.sleep(0.5)"
    )
    place, reader = kills.pipe(folder.path / "console")
    process = command_line.start(folder.flags(iterations=4, checkpoint_interval=0), place)
    assert command_line.wait_for(called.exists, process)
    os.close(reader)
    os.kill(process.pid, signal.SIGINT)
    assert command_line.finish(process) == 130
    assert folder.checkpoints() == ["checkpoint-000001"]


def test_a_run_ends_as_usual_without_a_working_console(folder: Folder) -> None:
    folder.write_reward("print('to stdout')")
    process = command_line.start(folder.flags(iterations=2), Path("/dev/full"))
    assert command_line.finish(process) == 0
    assert len(read_jsonl(folder.run / "metrics.jsonl")) == 2


# -------------------------------------------------------------------------------------- a full disk


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Limit the size of files, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The bytecode of a module imported under the limit would be kept incomplete.
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_the_older_checkpoint(folder: Folder, run, small_files) -> None:
    assert run(iterations=1)[0] == 0
    before = {path: path.read_bytes() for path in (folder.run / "checkpoint-000001").iterdir()}
    small_files(60_000)  # less than the model's file, more than the records
    code, said = run(iterations=4, resume=True)
    assert code == 1
    place = folder.run / "checkpoint-000002"
    assert re.search(f"{place} .*{folder.run / 'checkpoint-000001'}", said)
    assert {path: path.read_bytes() for path in before} == before
    assert folder.checkpoints() == ["checkpoint-000001"]
    assert not list(folder.run.glob(".checkpoint-*"))


# ----------------------------------------------------------------------------------- another config


def test_another_run_is_resumed_only_if_allowed(folder: Folder, run) -> None:
    """The differences are printed in both cases."""
    assert run(iterations=1)[0] == 0
    config = folder.run / "config.yaml"
    written = config.read_bytes()
    other = folder.path / "other"
    tiny.model("llama", seed=5).save_pretrained(other)
    tiny.tokenizer().save_pretrained(other)
    folder.prompts.write_text(folder.prompts.read_text().replace("w3", "w2"))
    options = {"iterations": 2, "resume": True, "model": other, "seed": 3, "learning_rate": 1e-5}
    code, said = run(**options)
    assert code == 2
    assert f"{folder.run / 'checkpoint-000001'} belongs to another run: " in said
    for difference in ("content of model was '", "content of prompts was '", "seed was 0 and is 3"):
        assert difference in said
    assert "`--resume force` resumes it anyway" in said
    assert config.read_bytes() == written
    code, said = run(**options | {"resume": "force"})
    assert code == 0
    assert "since checkpoint-000001: seed was 0 and is 3" in said
    assert "since checkpoint-000001: learning_rate was 0.001 and is 1e-05" in said
    assert "seed: 3" in config.read_text()


# ----------------------------------------------------------------------------- the best checkpoint


def test_the_best_checkpoint_is_kept_besides_the_newest(folder: Folder, run) -> None:
    folder.write_reward("return [float(calls == 2) + i % 2 / 8 for i in range(len(completions))]")
    options = {"checkpoint_best": "reward"}
    code, _ = run(iterations=5, **options)
    assert code == 0
    assert folder.checkpoints() == [f"checkpoint-00000{i}" for i in (2, 4, 5)]
    assert run(iterations=6, **options, resume=True)[0] == 0
    assert folder.checkpoints()[0] == "checkpoint-000002", "it stays the best after a resume"
    shutil.rmtree(folder.run)
    code, said = run(iterations=3, checkpoint_best="min:rewards")
    assert folder.checkpoints() == ["checkpoint-000002", "checkpoint-000003"]
    assert "checkpoint_best=min:rewards" in said


# ---------------------------------------------------------------------------- SFT and reward model


@pytest.fixture
def stage(folder: Folder) -> Callable[..., int]:
    """A function that runs `fastppo sft` on 24 rows, 8 steps per epoch."""
    rows = folder.path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in kills.ROWS))

    def run(**options: object) -> int:
        chosen: dict[str, object] = {
            "model": folder.model,
            "data": rows,
            "device": "cpu",
            "batch_size": 3,
            "gradient_accumulation": 1,
            "epochs": 1,
            "eval_share": 0.1,
            "checkpoint_interval": 2,
            "output_dir": folder.run,
        }
        texts = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in (chosen | options).items()
        }
        return cli.main(["sft", *(f"--{name}={text}" for name, text in texts.items())])

    return run


def test_a_stopped_stage_resumes_to_the_same_bits(stage, folder: Folder, capsys) -> None:
    """SIGUSR1 asks for a checkpoint, and SIGTERM ends the run with one."""
    options = {"epochs": 2, "checkpoint_interval": 0}
    assert stage(**options) == 0
    weights = (folder.run / "model.safetensors").read_bytes()
    records = (folder.run / "metrics.jsonl").read_bytes()
    shutil.rmtree(folder.run)
    signals = {2: signal.SIGUSR1, 4: signal.SIGTERM}

    def send(steps: int) -> None:
        if steps in signals:
            os.kill(os.getpid(), signals[steps])

    capsys.readouterr()
    with stage_runs.before_steps(send):
        assert stage(**options) == 143
    said = capsys.readouterr().err
    where = f"`--resume true` continues from {folder.run / 'checkpoint-000005'}\n"
    assert f"stopped by SIGTERM after 5 of 16 steps; {where}" in said
    assert folder.checkpoints() == ["checkpoint-000003", "checkpoint-000005"]
    for _ in range(2):  # the second time, nothing is left to do
        assert stage(**options, resume=True) == 0
        assert (folder.run / "model.safetensors").read_bytes() == weights
        assert (folder.run / "metrics.jsonl").read_bytes() == records


def test_a_stage_resumes_from_the_newest_intact_checkpoint(stage, folder: Folder, capsys) -> None:
    assert stage() == 0
    assert folder.checkpoints() == ["checkpoint-000006", "checkpoint-000008"]
    weights = (folder.run / "model.safetensors").read_bytes()
    records = (folder.run / "metrics.jsonl").read_bytes()
    newest = folder.run / "checkpoint-000008"
    _flip_a_bit(newest / "optimizer.pt")
    capsys.readouterr()
    assert stage(resume=True) == 0
    said = capsys.readouterr().err
    assert f"passed over {newest}: optimizer.pt has changed since it was written" in said
    assert f"resuming from {folder.run / 'checkpoint-000006'}" in said
    assert (folder.run / "model.safetensors").read_bytes() == weights
    assert (folder.run / "metrics.jsonl").read_bytes() == records


def test_a_stage_with_another_seed_or_tokenizer_is_another_run(
    stage, folder: Folder, capsys
) -> None:
    assert stage() == 0
    tokenizer = Path(folder.model, "tokenizer.json")
    written = json.loads(tokenizer.read_text())
    vocabulary = written["model"]["vocab"]
    vocabulary["w7"], vocabulary["w8"] = vocabulary["w8"], vocabulary["w7"]
    tokenizer.write_text(json.dumps(written))
    assert stage(resume=True, seed=5) == 2
    said = capsys.readouterr().err
    assert "seed was 0 and is 5" in said
    assert "content of tokens" in said


@pytest.mark.parametrize("checkpoint_interval", [0, 2])
def test_a_stage_on_a_full_disk_names_what_was_not_written(
    checkpoint_interval: int, stage, folder: Folder, capsys, small_files
) -> None:
    small_files(60_000)
    assert stage(checkpoint_interval=checkpoint_interval) == 1
    said = capsys.readouterr().err
    what = f"checkpoint {folder.run / 'checkpoint-000002'}" if checkpoint_interval else folder.run
    assert f"fastppo: {what} could not be written: " in said
    assert "Traceback" not in said
    assert folder.checkpoints() == []
    assert not (folder.run / "config.json").exists()
