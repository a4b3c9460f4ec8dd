"""Run `fastppo` commands on files in a folder, in this process or another one."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import tiny
from processes import FORKSERVER

REWARD = """
import os, signal
calls = 0


def count(prompts, completions, **columns):
    global calls
    calls += len(completions) > 1  # not the trial call before the run
    {before}
    return [text.split().count("w7") / 8 for text in completions]
"""

Run = Callable[..., tuple[int, str]]
"""Type of the fixture `run`: options to (exit code, stderr)."""

TIMING = ("seconds/", "tokens_per_second")

START = 60.0
"""Seconds to wait for the start of a process."""


class Folder:
    """A folder with a model, prompts and a reward, and the flags of a short run."""

    def __init__(self, path: Path) -> None:
        self.path, self.run = path, path / "run"
        self.model = tiny.saved_model(path / "sft")
        self.prompts = path / "prompts.jsonl"
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in tiny.PROMPTS))
        self.reward = path / "reward.py"
        self.write_reward()

    def write_reward(self, before: str = "pass") -> None:
        """Write a reward, the fraction of w7, after a statement that may use `calls`."""
        self.reward.write_text(REWARD.format(before=before))

    def flags(self, command: str = "train", **options: Any) -> list[str]:
        """Return the arguments of a run of about a second; lists are flags with several values."""
        chosen = tiny.options(self.path, model=self.model, prompts=self.prompts)
        chosen |= {"rewards": f"{self.reward}:count", "checkpoint_interval": 1, "ppo_epochs": 1}
        chosen |= options
        arguments = [command]
        for name, value in chosen.items():
            values = value if isinstance(value, list) else [value]
            arguments += [
                f"--{name}",
                *(str(v).lower() if isinstance(v, bool) else str(v) for v in values),
            ]
        return arguments

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.run.glob("checkpoint-*"))

    def bits(self) -> dict[str, bytes]:
        """Return the files of a finished run, without its times."""
        files = {
            name: (self.run / name).read_bytes()
            for name in ("policy/model.safetensors", "value_function.safetensors", "samples.jsonl")
        }
        lines = (self.run / "metrics.jsonl").read_bytes().splitlines()
        records = [json.loads(line) for line in lines]
        untimed = [{k: v for k, v in r.items() if not k.startswith(TIMING)} for r in records]
        return {**files, "metrics.jsonl": json.dumps(untimed).encode()}


# ------------------------------------------------------------------------------------- processes


def start(arguments: list[str], output: Path, **environment: str) -> BaseProcess:
    """Start `fastppo` in another process; stdout and stderr go to the file `output`."""
    begun, beginning = FORKSERVER.Pipe(duplex=False)
    process = FORKSERVER.Process(target=_run, args=(arguments, str(output), environment, beginning))
    process.start()
    beginning.close()
    begun.poll(START)
    return process


def _run(
    arguments: list[str], output: str, environment: dict[str, str], beginning: Connection
) -> None:
    import torch

    from fastppo import cli

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
    os.environ |= environment
    torch.set_num_threads(1)
    beginning.close()  # from here on the command handles signals
    code = cli.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def finish(process: BaseProcess, seconds: float = 120) -> int:
    """Wait for a process; return its exit code, negative after a kill by a signal."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        raise AssertionError("the process did not end")
    assert process.exitcode is not None
    return process.exitcode


def wait_for(condition: Callable[[], bool], process: BaseProcess, seconds: float = 120) -> bool:
    """Wait until the condition holds or the process ends; return whether it holds."""
    end = time.monotonic() + seconds
    while not condition():
        if not process.is_alive() or time.monotonic() > end:
            return condition()
        time.sleep(0.001)
    return True
