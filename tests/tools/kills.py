"""Kill runs at random times, resume them, and compare their results with uninterrupted runs.

    python tests/tools/kills.py 200

The runs are `fastppo train` and `sft` (one process and two), `reward` and `recipe`. Most are
killed by SIGKILL, with two processes only one of them. Others get a signal and lose their console,
as by Ctrl-C under `tee` or a terminal that closes. The script raises AssertionError if a checkpoint
is lost, a process ends in another way, or the bits differ.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import tty
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "helpers")]

import command_line  # noqa: E402
from command_line import Folder  # noqa: E402

from fastppo.recipes.catalogue import find  # noqa: E402
from fastppo.recipes.run import OWNER, write_files  # noqa: E402

RECIPE = "arithmetic"

ROWS = [
    {"prompt": f"w{i}", "completion": f" w{i + 1} w7", "chosen": " w7", "rejected": " w8"}
    for i in range(24)
]


def pipe(path: Path) -> tuple[Path, int]:
    """Return the path of a pipe, as with `| tee`, and the descriptor of its reader."""
    os.mkfifo(path)
    return path, os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def terminal(path: Path) -> tuple[Path, int]:
    """Return the path of a terminal and the descriptor of its other side."""
    shown, its_end = os.openpty()
    tty.setraw(its_end)
    os.set_blocking(shown, False)
    return Path(os.ttyname(its_end)), shown


def read_on(reader: int, process: BaseProcess, seconds: float) -> None:
    """Read the output of a process, which would block on a full pipe."""
    end = time.monotonic() + seconds
    while process.is_alive() and time.monotonic() < end:
        with suppress(OSError):  # no output yet
            os.read(reader, 2**16)
        process.join(0.02)


CONSOLES: dict[str, tuple[Callable[[Path], tuple[Path, int]], signal.Signals]] = {
    "Ctrl-C under tee": (pipe, signal.SIGINT),
    "a terminal that closes": (terminal, signal.SIGHUP),
}


UNFINISHED = {"recipe": "*recipe.txt*"}
"""Files of the run directory while a command writes; those of a checkpoint for the others."""

PATIENCE = 5.0
"""Seconds for the other processes to end after one is killed."""


class Victim:
    """Run to kill, and the result of an uninterrupted run with the same options.

    Args:
        command: `train`, `sft`, `reward` or `recipe`.
        path: its folder.
        ranks: its number of processes.
    """

    def __init__(self, command: str, path: Path, ranks: int = 1) -> None:
        self.command = command
        self.folder = Folder(path)
        self.ranks = ranks
        self.newest = ""
        """Name of the newest checkpoint so far."""
        self.rows = path / "rows.jsonl"
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        self.log = path / "log.txt"
        begin = time.monotonic()
        self.finish()
        self.seconds = time.monotonic() - begin
        """Duration of an uninterrupted run."""
        self.untouched = self.bits()
        """Result of an uninterrupted run."""
        shutil.rmtree(self.folder.run)

    def flags(self) -> list[str]:
        if self.command == "recipe":
            return ["recipe", RECIPE, f"--out={self.folder.run}", "--iterations=1"]
        if self.command == "train":
            return self.folder.flags(iterations=12, rollout_batch_size=8, resume=True)
        return [
            self.command,
            f"--model={self.folder.model}",
            f"--data={self.rows}",
            f"--output_dir={self.folder.run}",
            *("--device=cpu", "--batch_size=3", "--epochs=2", "--eval_share=0.1"),
            *("--checkpoint_interval=1", "--resume=true"),
        ]

    def start(self, output: Path) -> list[BaseProcess]:
        """Start its processes, in the order of the ranks."""
        if self.ranks == 1:
            return [command_line.start(self.flags(), output)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"WORLD_SIZE": f"{self.ranks}"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        return [
            command_line.start(self.flags(), output, RANK=f"{rank}", LOCAL_RANK=f"{rank}", **shared)
            for rank in range(self.ranks)
        ]

    def finish(self) -> None:
        """Run to the end."""
        if self.command == "recipe":
            return  # only its files are tested
        codes = [command_line.finish(process) for process in self.start(self.log)]
        assert codes == [0] * self.ranks, self.log.read_text()

    def bits(self) -> dict[str, bytes]:
        """Return the result, without times."""
        run = self.folder.run
        if self.command == "train":
            return self.folder.bits()
        if self.command == "recipe":
            write_files(find(RECIPE), run)  # adds missing files
            names = (OWNER, "run.yaml", *find(RECIPE).shipped.values())
            return {name: (run / name).read_bytes() for name in names}
        return {name: (run / name).read_bytes() for name in ("model.safetensors", "metrics.jsonl")}

    def kill(self, draw: random.Random, *, with_consoles: bool = True) -> str | None:
        """Start the run and kill it; return how, or None if it ended before."""
        run = self.folder.run
        ways = ["SIGKILL", "SIGKILL", "SIGKILL in a write"]
        if with_consoles and self.ranks == 1 and self.command != "recipe":
            ways += CONSOLES
        way = draw.choice(ways)
        output = self.log
        reader = None
        if way in CONSOLES:
            make_console, signum = CONSOLES[way]
            output, reader = make_console(self.folder.path / f"console-{draw.randrange(2**40)}")
        processes = self.start(output)
        victim = draw.choice(processes)
        if way == "SIGKILL in a write":
            unfinished = UNFINISHED.get(self.command, ".checkpoint-*")
            command_line.wait_for(lambda: any(run.glob(unfinished)), victim, seconds=20)
        elif self.command == "recipe":
            command_line.wait_for(run.exists, victim)
            victim.join(draw.uniform(0, 0.1))
        elif reader is not None:
            read_on(reader, victim, draw.uniform(0, self.seconds))
        else:
            victim.join(draw.uniform(0, self.seconds))
        if reader is None:
            victim.kill()
        else:
            os.close(reader)
            with suppress(ProcessLookupError):  # it has ended
                os.kill(victim.pid or 0, signum)
        codes = [_end(process, is_victim=process is victim) for process in processes]
        if any(code == 0 for code in codes):
            shutil.rmtree(run, ignore_errors=True)
            self.newest = ""
            return None
        said = self.log.read_text() if self.log.exists() else ""
        if reader is None:
            assert codes[processes.index(victim)] == -signal.SIGKILL, said
        else:
            assert codes[0] in (128 + signum, -signum), (codes, way)
        assert "Traceback" not in said, said
        newest = max([*self.folder.checkpoints(), ""], key=_number)
        assert _number(newest) >= _number(self.newest), f"{self.newest} is lost"
        self.newest = newest
        if self.command == "recipe":  # its files are written once
            assert self.bits() == self.untouched, "recipe: other files"
            shutil.rmtree(run)
        return way


def _end(process: BaseProcess, *, is_victim: bool) -> int:
    """Wait for a process, end it if it waits for the victim, and return its exit code."""
    if not is_victim:
        process.join(PATIENCE)
        process.terminate()
        process.join(PATIENCE)
        process.kill()
    return command_line.finish(process)


def _number(checkpoint: str) -> int:
    return int(checkpoint.rpartition("-")[2] or 0)


def kill(count: int, path: Path, seed: int = 0, *, with_consoles: bool = True) -> Counter[str]:
    """Kill `count` runs, and return how often each way was used."""
    draw = random.Random(seed)
    kinds = [("train", 1), ("sft", 1), ("reward", 1), ("recipe", 1), ("train", 2), ("sft", 2)]
    victims = [Victim(name, path / f"{name}-{ranks}", ranks) for name, ranks in kinds]
    ways: Counter[str] = Counter()
    while sum(ways.values()) < count:
        victim = victims[sum(ways.values()) % len(victims)]
        way = victim.kill(draw, with_consoles=with_consoles)
        if way is not None:
            ways[f"{victim.command} by {victim.ranks}: {way}"] += 1
    for victim in victims:
        victim.finish()
        bits = victim.bits()
        other = [name for name in bits if bits[name] != victim.untouched[name]]
        assert not other, f"{victim.command} by {victim.ranks}: other bits of {', '.join(other)}"
    return ways


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ways = kill(int(sys.argv[1]), Path(folder))
    for way, times in sorted(ways.items()):
        print(f"{times:4} {way}")
    print(f"{sum(ways.values())} kills: nothing lost, the same bits")
