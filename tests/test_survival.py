"""What a run survives, on the command line: kills, damaged checkpoints, a second run, signals, a
full disk, another config. docs/survival.md says the same in words."""

from __future__ import annotations

import html
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import command_line
import kills
import pytest
import tiny
import torch
from command_line import Folder
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastppo import cli
from fastppo.ppo.trainer import PPOTrainer
from fastppo.run import manifest
from fastppo.run.events import NAME
from fastppo.run.log import read_jsonl

KILLS = int(os.environ.get("FASTPPO_KILLS", "20"))
"""Of the test that kills a run again and again; more of them for a long run."""


# -------------------------------------------------------------------------------------------- kills


@pytest.mark.parametrize("checkpoint_interval", [0, 1])
def test_a_run_that_is_killed_ends_in_the_bits_of_one_that_was_not(
    checkpoint_interval: int, folder: Folder, run
) -> None:
    options = {"iterations": 3, "checkpoint_interval": checkpoint_interval}
    assert run(**options)[0] == 0
    bits = folder.bits()
    shutil.rmtree(folder.run)
    text = folder.reward.read_text()
    folder.write_reward("calls == 3 and os.kill(os.getpid(), signal.SIGKILL)")
    log = folder.path / "log.txt"
    process = command_line.start(folder.flags(**options), log)
    assert command_line.finish(process) == -signal.SIGKILL, log.read_text()
    assert (
        folder.checkpoints()
        == ["checkpoint-000001", "checkpoint-000002"][: 2 * checkpoint_interval]
    )
    folder.reward.write_text(text)
    assert run(resume=True, allow_config_change=True, **options)[0] == 0
    assert folder.bits() == bits


@pytest.mark.slow
def test_what_is_killed_again_and_again_ends_in_the_bits_of_what_was_not(tmp_path: Path) -> None:
    """While it loads, trains, and writes, and one process of two. Consoles that end are below, and
    `python tests/tools/kills.py` has both."""
    ways = kills.kill(KILLS, tmp_path, with_consoles=False)
    assert any("in a write" in way for way in ways)


# ------------------------------------------------------------------------------ damaged checkpoints


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_passed_over(folder: Folder, run) -> None:
    """The run goes on from the one before and ends in the bits of a run without damage."""
    options = {"iterations": 2, "reference_refresh": 1, "kl_coef": 0, "kl_loss_coef": 0.1}
    assert run(**options)[0] == 0
    bits = folder.bits()
    newest = folder.run / "checkpoint-000002"
    _flip_a_bit(newest / "model.safetensors")
    code, said = run(**options, resume=True)
    assert code == 0
    reason = "model.safetensors has changed since it was written"
    assert f"passed over {newest}: {reason}" in said
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


def _put_a_pickle_that_calls(file: Path) -> None:
    """Replaces a file of a checkpoint, and its entry in the manifest."""
    torch.save(Calls(file.parent.parent / "called"), file)
    owner = json.loads((file.parent / "manifest.json").read_bytes())["about"]
    manifest.write(file.parent, owner)


def test_a_pickle_in_a_checkpoint_is_not_executed(folder: Folder, run) -> None:
    assert run(iterations=1)[0] == 0
    checkpoint = folder.run / "checkpoint-000001"
    _put_a_pickle_that_calls(checkpoint / "optimizer.pt")
    code, said = run(iterations=2, resume=True)
    assert code == 2
    assert f"{checkpoint} cannot be read: Weights only load failed" in said
    assert not (folder.run / "called").exists()


# -------------------------------------------------------------------------- two runs, one directory


def _pause(folder: Folder, call: int) -> tuple[Path, Path]:
    """Of a reward that stands still in that call: the file that it makes there, and the one that it
    waits for."""
    ready, go_on = folder.path / f"ready_{call}", folder.path / f"go_on_{call}"
    folder.write_reward(
        f"import pathlib, time; calls == {call} and pathlib.Path({str(ready)!r}).touch()\n"
        f"    while calls == {call} and not pathlib.Path({str(go_on)!r}).exists(): time.sleep(0.01)"
    )
    return ready, go_on


def test_a_second_run_in_a_directory_is_refused_before_it_loads_a_model(
    folder: Folder, run
) -> None:
    ready, go_on = _pause(folder, 1)
    log = folder.path / "log.txt"
    first = command_line.start(folder.flags(iterations=1), log)
    assert command_line.wait_for(ready.exists, first), log.read_text()
    hollow = folder.path / "hollow"
    shutil.copytree(folder.model, hollow)
    (hollow / "model.safetensors").write_bytes(b"")
    for options in ({}, {"resume": True}):
        # Weights that do not load would be complained of, were they read.
        code, said = run(iterations=1, model=hollow, **options)
        assert code == 2
        assert f"another run is using {folder.run}: process {first.pid} on " in said
    go_on.touch()
    assert command_line.finish(first) == 0, log.read_text()
    assert len(read_jsonl(folder.run / "metrics.jsonl")) == 1


# -------------------------------------------------------------------------------------- the signals


SIGNALS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}


def test_a_signal_ends_the_phase_at_hand_writes_a_checkpoint_and_says_so(
    folder: Folder, run
) -> None:
    """Sent by the reward: the iteration is left before its update, and made again in its bits."""
    options = {"iterations": 3, "checkpoint_interval": 0}
    assert run(**options)[0] == 0
    bits = folder.bits()
    shutil.rmtree(folder.run)
    folder.write_reward("calls == 2 and os.kill(os.getpid(), signal.SIGTERM)")
    code, said = run(**options)
    assert code == SIGNALS[signal.SIGTERM]
    where = folder.run / "checkpoint-000001"
    expected = "fastppo: stopped by SIGTERM after 1 of 3 iterations; `--resume true` goes on from"
    assert f"{expected} {where}\n" in said
    assert folder.checkpoints() == ["checkpoint-000001"]
    assert len(read_jsonl(folder.run / "metrics.jsonl")) == 1
    folder.write_reward("calls == 0")
    code, said = run(**options, resume=True, allow_config_change=True)
    assert code == 0
    assert f"resuming from {where}, whose run had ended: stopped by SIGTERM" in said
    assert folder.bits() == bits


ENDS = {
    "stopped by SIGINT": ({}, "os.kill(os.getpid(), signal.SIGINT)", 130),
    "kl = ": ({"stop_if": "kl > -1000"}, "", 1),
    "every prompt is solved (solved_reward)": ({"solved_reward": -1}, "", 0),
    "reward 'count' raised ZeroDivisionError": ({}, "1 / 0", 1),
    "out of memory in score: the process has no more": ({}, "", 1),
}
"""By the reason: options, what the reward does in the second iteration, and the exit code."""


@pytest.mark.parametrize("reason", ENDS)
def test_a_run_that_ends_early_says_why(reason: str, folder: Folder, run, monkeypatch) -> None:
    """On the console, in its records and its report, and where it goes on."""
    options, act, expected = ENDS[reason]
    if act:
        folder.write_reward(f"calls == 2 and {act}")
    if "memory" in reason:
        score = PPOTrainer.score

        def score_once(trainer: PPOTrainer, *args: Any) -> Any:
            if trainer.state.iteration == 1:
                raise MemoryError
            return score(trainer, *args)

        monkeypatch.setattr(PPOTrainer, "score", score_once)
    folder.prompts.write_text('{"prompt": "w1"}\n')
    code, said = run(iterations=3, **options)
    assert code == expected
    assert reason in said
    assert "callback" not in said
    assert reason in read_jsonl(folder.run / "parts.jsonl")[0]["ended"]
    report = html.unescape((folder.run / "report.html").read_text())
    assert f"Ended after 1 of 3 iterations: {reason}" in report
    _, said = run(iterations=3, **options, resume=True, allow_config_change=True)
    assert f"checkpoint-000001, whose run had ended: {reason}" in said


def test_a_run_that_is_done_has_no_iterations_to_come(folder: Folder, run) -> None:
    assert run(iterations=2)[0] == 0
    code, said = run(iterations=2, resume=True)
    assert code == 0
    assert "whose run is at its end: a larger --iterations goes on" in said
    assert "run      all 2 iterations are done" in said


def test_a_second_signal_ends_a_run_at_once(folder: Folder) -> None:
    folder.write_reward("import time; calls and time.sleep(1000)")
    log = folder.path / "log.txt"
    process = command_line.start(folder.flags(iterations=2), log)
    assert command_line.wait_for((folder.run / "config.yaml").exists, process), log.read_text()
    process.join(0.2)
    process.terminate()
    said = "SIGTERM: stopping with a checkpoint after the phase at hand"
    assert command_line.wait_for(lambda: said in log.read_text(), process)
    assert process.is_alive()
    process.terminate()
    assert command_line.finish(process) == -signal.SIGTERM


def test_a_handler_that_a_reward_installs_does_not_stay(folder: Folder, run) -> None:
    """Of SIGTERM, say, whose first one would then end the run without a checkpoint."""
    log = folder.path / "log.txt"
    folder.write_reward(
        "calls == 1 and signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "    calls == 2 and os.kill(os.getpid(), signal.SIGTERM)"
    )
    process = command_line.start(folder.flags(iterations=3, checkpoint_interval=0), log)
    assert command_line.finish(process) == SIGNALS[signal.SIGTERM], log.read_text()
    assert folder.checkpoints() == ["checkpoint-000001"]


def test_sigusr1_writes_a_checkpoint_and_the_run_goes_on(folder: Folder, run) -> None:
    folder.write_reward("calls == 2 and os.kill(os.getpid(), signal.SIGUSR1)")
    code, said = run(iterations=3, checkpoint_interval=0)
    assert code == 0
    assert f"checkpoint {folder.run / 'checkpoint-000002'}\n" in said
    assert folder.checkpoints() == ["checkpoint-000002", "checkpoint-000003"]


# ---------------------------------------------------------------------------- a console that dies


@pytest.mark.parametrize(
    ("console", "signals"),
    [
        pytest.param(kills.pipe, [signal.SIGINT], id="Ctrl-C under tee"),
        pytest.param(kills.pipe, [signal.SIGTERM], id="SIGTERM under tee", marks=pytest.mark.slow),
        # The shell sends the first one, and the kernel the second.
        pytest.param(kills.terminal, [signal.SIGHUP] * 2, id="closed", marks=pytest.mark.slow),
    ],
)
def test_a_console_that_ends_with_a_signal_costs_no_iteration(
    console: Callable[[Path], tuple[Path, int]], signals: list[signal.Signals], folder: Folder
) -> None:
    # The second call waits for the signal: the first iteration is done by then.
    called = folder.path / "called"
    folder.write_reward(
        "import pathlib, time\n"
        f"    calls == 2 and pathlib.Path({str(called)!r}).touch()\n"
        "    while calls == 2 and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:\n"
        "        time.sleep(0.01)\n"
        "    calls == 2 and time.sleep(0.5)"
    )
    place, reader = console(folder.path / "console")
    process = command_line.start(folder.flags(iterations=4, checkpoint_interval=0), place)
    assert command_line.wait_for(called.exists, process)
    os.close(reader)
    for signum in signals:
        os.kill(process.pid, signum)
        process.join(0.2)
    assert command_line.finish(process) == SIGNALS[signals[0]]
    assert folder.checkpoints() == ["checkpoint-000001"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "sft"])
@pytest.mark.parametrize("console", ["/dev/full", "a pipe whose reader ends"])
def test_a_console_that_cannot_be_written_to_is_given_up(
    console: str, command: str, folder: Folder
) -> None:
    """And the run ends as it would have."""
    place, reader = Path(console), None
    if console != "/dev/full":
        place, reader = kills.pipe(folder.path / "console")
    folder.write_reward("print('to stdout')")
    arguments = folder.flags(iterations=2)
    if command == "sft":
        rows = folder.path / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in kills.ROWS))
        arguments = ["sft", f"--model={folder.model}", f"--data={rows}", "--device=cpu"]
        arguments += ["--epochs=1", f"--output_dir={folder.run}"]
    process = command_line.start(arguments, place)
    if reader is not None:
        assert command_line.wait_for((folder.run / "parts.jsonl").exists, process)
        os.close(reader)
    assert command_line.finish(process) == 0
    said = [
        line
        for record in read_jsonl(folder.run / "metrics.jsonl")
        for line in record.get("warnings", [])
    ]
    assert any("stderr could not be written (" in line for line in said), said


# -------------------------------------------------------------------------------------- a full disk


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Files may grow to so many bytes, as if the disk were full then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The bytecode of a module that is imported first there would be cut off, and kept.
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_that_finds_the_disk_full_is_removed_and_the_old_one_stays(
    folder: Folder, run, small_files
) -> None:
    assert run(iterations=1)[0] == 0
    before = {path: path.read_bytes() for path in (folder.run / "checkpoint-000001").iterdir()}
    small_files(60_000)  # the model's and the optimiser's files are larger, the records are not
    code, said = run(iterations=4, resume=True)
    assert code == 1
    place = folder.run / "checkpoint-000002"
    assert f"fastppo: checkpoint {place} could not be written: " in said
    assert f"the newest is {folder.run / 'checkpoint-000001'}" in said
    assert {path: path.read_bytes() for path in before} == before
    assert folder.checkpoints() == ["checkpoint-000001"]
    assert not list(folder.run.glob(".checkpoint-*"))


def test_records_of_tensorboard_that_are_deleted_end_no_run(folder: Folder, run) -> None:
    folder.write_reward(
        f"import shutil; calls == 2 and shutil.rmtree({str(folder.run / 'tensorboard')!r})"
    )
    assert run(iterations=3)[0] == 0
    assert len(read_jsonl(folder.run / "metrics.jsonl")) == 3
    assert list((folder.run / "tensorboard").iterdir())


def test_a_clock_that_is_set_back_before_a_resume_loses_no_point_of_tensorboard(
    folder: Folder, run
) -> None:
    assert run(iterations=1)[0] == 0
    (events,) = (folder.run / "tensorboard").iterdir()
    began = NAME.match(events.name)
    assert began is not None
    events.rename(events.with_name(f"{began[1]}{int(began[2]) + 3600}{began[3]}"))
    assert run(iterations=2, resume=True)[0] == 0
    shown = EventAccumulator(str(folder.run / "tensorboard")).Reload()
    assert [point.step for point in shown.Scalars("reward")] == [0, 1]


# ----------------------------------------------------------------------------------- another config


def _other_model(folder: Folder) -> object:
    tiny.model("llama", seed=5).save_pretrained(folder.path / "other")
    tiny.tokenizer().save_pretrained(folder.path / "other")
    return folder.path / "other"


def _other_prompts(folder: Folder) -> object:
    lines = folder.prompts.read_text().splitlines(keepends=True)
    other = folder.path / "other.jsonl"
    other.write_text("".join(lines[:-1]) + lines[-1].replace("w3", "w2"))
    return other


def _other_reward(folder: Folder) -> object:
    other = folder.path / "other.py"
    other.write_text(folder.reward.read_text().replace("w7", "w8"))
    return f"{other}:count"


def _half_of_the_head_is_other(folder: Folder) -> object:
    """Every second weight of it, in the file where it was."""
    file = Path(folder.model) / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"].view(-1)[1::2] += 1
    save_file(weights, file, metadata={"format": "pt"})
    return folder.model


def _what_the_reward_imports_is_other(folder: Folder) -> object:
    (folder.path / "beside.py").write_text("W = 2\n")
    return f"{folder.reward}:count"


def _config_is_other(folder: Folder) -> object:
    """The weights are not."""
    file = Path(folder.model) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.1}))
    return folder.model


def _tokens_are_other(folder: Folder) -> object:
    """Two, which no prompt has."""
    file = Path(folder.model) / "tokenizer.json"
    written = json.loads(file.read_text())
    words = written["model"]["vocab"]
    words["w38"], words["w39"] = words["w39"], words["w38"]
    file.write_text(json.dumps(written))
    return folder.model


OTHERS: list[tuple[str, object, str]] = [
    ("model", _other_model, "the content of model was '"),
    ("prompts", _other_prompts, "the content of prompts was '"),
    ("rewards", _other_reward, "the content of rewards/count was '"),
    ("seed", 1, "seed was 0 and is 1"),
    ("rewards", _what_the_reward_imports_is_other, "the content of rewards/count was '"),
    ("model", _tokens_are_other, "the content of tokenizer was '"),
    ("model", _config_is_other, "the content of model was '"),
    ("model", _half_of_the_head_is_other, "the content of model was '"),
]


def test_a_resume_under_another_config_is_refused_unless_it_is_asked_for(
    folder: Folder, run
) -> None:
    (folder.path / "beside.py").write_text("W = 1\n")
    folder.reward.write_text(f"import beside\n{folder.reward.read_text()}")
    assert run(iterations=1)[0] == 0
    config = (folder.run / "config.yaml").read_bytes()
    for option, value, says in OTHERS:
        value = value(folder) if callable(value) else value
        options = {"iterations": 2, option: value}
        code, said = run(resume=True, **options)
        assert code == 2, option
        assert f"{folder.run / 'checkpoint-000001'} belongs to another run: " in said, option
        assert says in said, option
        assert "`--allow_config_change true` resumes it anyway" in said
        assert (folder.run / "config.yaml").read_bytes() == config, option
        assert folder.checkpoints() == ["checkpoint-000001"], option


def test_a_change_that_is_asked_for_is_shown(folder: Folder, run) -> None:
    assert run(iterations=1)[0] == 0
    options = {"iterations": 2, "resume": True, "seed": 3, "learning_rate": 1e-5}
    code, said = run(**options, allow_config_change=True)
    assert code == 0
    assert "since checkpoint-000001: seed was 0 and is 3" in said
    assert "since checkpoint-000001: learning_rate was 0.001 and is 1e-05" in said
    assert "seed: 3" in (folder.run / "config.yaml").read_text()


# ---------------------------------------------------------------------------------------- the files


def test_the_best_checkpoint_by_a_metric_is_kept_besides_the_last(folder: Folder, run) -> None:
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
    assert "checkpoint_best=min:rewards: no iteration since the last checkpoint had it" in said


# -------------------------------------------------------------------------------- rewards and names


def test_a_reward_that_changes_all_it_is_given_changes_nothing_of_the_run(
    folder: Folder, run
) -> None:
    """Two of them, so that the second would see what the first has done."""
    rows = [{"prompt": [{"role": "user", "content": f"w{i}"}], "n": [i]} for i in range(24)]
    folder.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny.tokenizer(chat=True).save_pretrained(folder.model)
    score = "[text.split().count('w7') / 8 + n[0] / 99 for text, n in zip(completions, n)]"
    signature = "prompts, completions, completion_ids, n, **columns"
    bodies = {
        "honest.py": "pass",
        "rude.py": "for given in (prompts, completions, completion_ids, n): given.sort(key=str)\n"
        "    for ids in completion_ids: ids.clear()\n"
        "    for messages in prompts: messages[0]['content'] = 'x'\n"
        "    for each in n: each.append(7)\n"
        "    for given in (prompts, completions, completion_ids, n): given.clear()",
    }
    bits = []
    for file, body in bodies.items():
        text = f"def count({signature}):\n    found = {score}\n    {body}\n    return found\n"
        (folder.path / file).write_text(text)
        rewards = [f"{folder.path / file}:count"] * 2
        assert run(iterations=2, rewards=rewards)[0] == 0
        bits.append(folder.bits())
        shutil.rmtree(folder.run)
    assert bits[0] == bits[1]


# -------------------------------------------------------------------------------- the stages before


@pytest.fixture(params=["sft", pytest.param("reward", marks=pytest.mark.slow)])
def stage(request: pytest.FixtureRequest, folder: Folder) -> Callable[..., list[str]]:
    """The flags of a short run of a stage: 24 rows, 8 steps an epoch."""
    rows = folder.path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in kills.ROWS))

    def flags(**options: object) -> list[str]:
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
        return [request.param, *(f"--{name}={text}" for name, text in texts.items())]

    return flags


def _records(folder: Folder) -> list[dict]:
    records = read_jsonl(folder.run / "metrics.jsonl")
    return [{k: v for k, v in record.items() if "runtime" not in k} for record in records]


STAGE_STOPS = [
    (signal.SIGTERM, 5),
    pytest.param(signal.SIGKILL, 5, marks=pytest.mark.slow),
    pytest.param(signal.SIGUSR1, 5, marks=pytest.mark.slow),
    pytest.param(signal.SIGTERM, 8, marks=pytest.mark.slow, id="SIGTERM at the end of an epoch"),
]


@pytest.mark.parametrize(("signum", "step"), STAGE_STOPS)
def test_a_stage_that_was_stopped_ends_in_the_same_bits(
    signum: signal.Signals, step: int, stage, folder: Folder, capsys, monkeypatch
) -> None:
    from fastppo.stages.callbacks import Interruptions

    assert cli.main(stage(epochs=2)) == 0
    weights = (folder.run / "model.safetensors").read_bytes()
    records = _records(folder)
    shutil.rmtree(folder.run)
    original = Interruptions.on_step_end

    def send(self, args, state, control, **more):
        if state.global_step == step:
            os.kill(os.getpid(), signum)
        original(self, args, state, control, **more)

    monkeypatch.setattr(Interruptions, "on_step_end", send)
    if signum == signal.SIGKILL:
        child = os.fork()
        if child == 0:
            os._exit(cli.main(stage(epochs=2)))
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    else:
        capsys.readouterr()
        code = cli.main(stage(epochs=2))
        said = capsys.readouterr().err
        if signum == signal.SIGUSR1:
            assert code == 0
        else:
            assert code == 143
            where = f"`--resume true` continues from {folder.run / f'checkpoint-{step}'}\n"
            assert f"stopped by SIGTERM after {step} of 16 steps; {where}" in said
    monkeypatch.undo()
    if signum != signal.SIGUSR1:
        assert cli.main(stage(epochs=2, resume=True)) == 0
    assert (folder.run / "model.safetensors").read_bytes() == weights
    assert _records(folder) == records
    for _ in range(2):  # nothing is left to do, and nothing is written twice
        assert cli.main(stage(epochs=2, resume=True)) == 0
    assert _records(folder) == records


def test_a_stage_takes_the_newest_whole_checkpoint_and_keeps_as_many_as_it_is_told(
    stage, folder: Folder, capsys
) -> None:
    assert cli.main(stage()) == 0
    assert folder.checkpoints() == ["checkpoint-6", "checkpoint-8"]
    weights = (folder.run / "model.safetensors").read_bytes()
    records = _records(folder)
    newest = folder.run / "checkpoint-8"
    _flip_a_bit(newest / "optimizer.pt")  # a pickle: it must not even be opened
    capsys.readouterr()
    assert cli.main(stage(resume=True)) == 0
    said = capsys.readouterr().err
    assert f"passed over {newest}: optimizer.pt has changed since it was written" in said
    assert f"resuming from {folder.run / 'checkpoint-6'}" in said
    assert (folder.run / "model.safetensors").read_bytes() == weights
    assert _records(folder) == records
    code = cli.main(stage(resume=True, seed=5))
    assert code == 2
    assert "belongs to another run: seed was 0 and is 5" in capsys.readouterr().err


def test_a_pickle_in_a_checkpoint_of_a_stage_is_not_executed(stage, folder: Folder) -> None:
    assert cli.main(stage()) == 0
    shutil.rmtree(folder.run / "checkpoint-8")
    _put_a_pickle_that_calls(folder.run / "checkpoint-6" / "optimizer.pt")
    with pytest.raises(UnpicklingError, match="Weights only load failed"):
        cli.main(stage(resume=True))
    assert not (folder.run / "called").exists()


def test_a_stage_with_another_tokenizer_is_another_run(stage, folder: Folder, capsys) -> None:
    assert cli.main(stage()) == 0
    tokenizer = Path(folder.model, "tokenizer.json")
    written = json.loads(tokenizer.read_text())
    vocabulary = written["model"]["vocab"]
    vocabulary["w7"], vocabulary["w8"] = vocabulary["w8"], vocabulary["w7"]
    tokenizer.write_text(json.dumps(written))
    assert cli.main(stage(resume=True)) == 2
    assert "another run: the content of tokens was" in capsys.readouterr().err


@pytest.mark.parametrize("checkpoint_interval", [0, 2])
def test_a_stage_that_finds_the_disk_full_says_what_it_could_not_write(
    checkpoint_interval: int, stage, folder: Folder, capsys, small_files
) -> None:
    small_files(60_000)
    assert cli.main(stage(checkpoint_interval=checkpoint_interval)) == 1
    said = capsys.readouterr().err
    what = f"checkpoint {folder.run / 'checkpoint-2'}" if checkpoint_interval else folder.run
    assert f"fastppo: {what} could not be written: " in said
    assert "Traceback" not in said
    assert folder.checkpoints() == []
    assert not (folder.run / "config.json").exists()
