"""FastPPO's iteration beside TRL's over a grid of shapes: `python -m benchmarks.trl_grid --keep`.

Each shape is a run of `benchmarks.trl_iteration` in a process of its own, on one thread. Beside its
time stands its floor, the FLOP of an iteration at the rate of a large matrix product measured in
the same process, and the ratio of both trainers' FLOP: what the speed-up would be if both were
equally efficient. `--compile` adds a row to each shape, of both trainers through torch.compile.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.run import describe_device
from benchmarks.trl_iteration import Options

SHAPES = [
    Options(),
    Options(prompt=32),
    Options(prompt=16, vocab=128, hidden=128),
    Options(prompt=64, response=64, hidden=256, layers=4, vocab=8000),
    Options(prompt=16),
    Options(prompt=128, vocab=128),
    Options(prompt=128, vocab=8000, hidden=128),
    Options(prompt=64, vocab=1000, hidden=256),
    Options(prompt=64, hidden=128),
]
"""Vocabularies of 128 to 32000 tokens, widths of 64 to 256, prompts of 16 to 128 tokens."""


def shapes_of(*, compiled_too: bool) -> list[Options]:
    """The shapes, and behind each, if that is asked for, the same with both trainers compiled."""
    ways = (False, True) if compiled_too else (False,)
    return [replace(options, compile=way) for options in SHAPES for way in ways]


def measure(options: Options) -> dict[str, Any]:
    """One shape, in a process of its own.

    Raises:
        RuntimeError: the process failed; the message is its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "iteration.json"
        flags = [*options.flags(), f"--json={path}"]
        command = [sys.executable, "-m", "benchmarks.trl_iteration", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["it failed"])[-1])
        return json.loads(path.read_text(encoding="utf-8"))


def describe(result: dict[str, Any]) -> dict[str, Any]:
    """A shape's row: what the results file keeps."""
    flop, seconds = result["fastppo_flop"], statistics.median(result["fastppo_seconds"])
    floor = flop / result["matmul_flop_per_second"]
    return {
        "options": result["options"],
        "fastppo_seconds": seconds,
        "trl_seconds": statistics.median(result["trl_seconds"]),
        "speed_up": result["speed_up"],
        "flop_ratio": result["trl_flop"] / flop,
        "fastppo_flop": flop,
        "floor_seconds": floor,
        "percent_of_floor": 100 * floor / seconds,
        "phases": result["phases"],
    }


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the page and the terminal show it; `HEADER` names the columns."""
    options = Options(**row["options"])
    return [
        f"{options.prompt} + {options.response} tokens, {options.layers} × {options.hidden}, "
        f"V = {options.vocab}{', compiled' * options.compile}",
        f"{row['fastppo_seconds']:.2f} s",
        f"{row['floor_seconds']:.2f} s",
        f"{row['percent_of_floor']:.0f} %",
        f"{row['trl_seconds']:.2f} s",
        f"{row['speed_up']:.2f}",
        f"{row['flop_ratio']:.2f}",
    ]


HEADER = ["shape", "FastPPO", "floor", "of the floor", "TRL", "times TRL", "at equal efficiency"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trl_grid",
        description="A PPO iteration of FastPPO beside TRL 1.12's over a grid of shapes.",
    )
    parser.add_argument("--keep", action="store_true", help="add it to this device's results file")
    parser.add_argument(
        "--compile", action="store_true", help="each shape once more, both trainers compiled"
    )
    given = parser.parse_args(arguments)
    keep, shapes = given.keep, shapes_of(compiled_too=given.compile)
    path = report.results_path({"device": describe_device(torch.device("cpu"))})
    if keep and not path.exists():
        print(f"{path} is not there: run `python -m benchmarks --keep` first", file=sys.stderr)
        return 1
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    rows = []
    print("  ".join(HEADER))
    for options in shapes:
        try:
            rows.append(describe(measure(options)))
        except RuntimeError as error:
            print(f"benchmarks.trl_grid: {error}", file=sys.stderr)
            return 1
        print("  ".join(cells(rows[-1])), flush=True)
    if keep:
        record = report.read(path)
        record["trl_grid"] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "load_average_before": load,
            "rows": rows,
        }
        report.write(record, path)
        print(f"written {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
