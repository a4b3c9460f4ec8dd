"""FastPPO's iteration beside TRL's over a grid of shapes: `python -m benchmarks.trl_grid --keep`.

Each shape is a run of `benchmarks.trl_iteration` in a process of its own, on one thread. Beside its
time stands its floor, the FLOP of an iteration at the rate of a large matrix product measured in
the same process, and the ratio of both trainers' FLOP: what the speed-up would be if both were
equally efficient.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import report
from benchmarks.run import describe_device, now
from benchmarks.trl_iteration import Options, compare_in_a_process

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


def describe(result: dict[str, Any]) -> dict[str, Any]:
    """A shape's row: what the results file keeps."""
    flop = result["fastppo_flop"]
    seconds = statistics.median(result["fastppo_seconds"])
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
    options = row["options"]
    return [
        f"{options['prompt']} + {options['response']} tokens, {options['layers']} × "
        f"{options['hidden']}, V = {options['vocab']}",
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
    keep = parser.parse_args(arguments).keep
    path = report.results_path({"device": describe_device(torch.device("cpu"))})
    if keep and not path.exists():
        print(f"{path} is not there: run `python -m benchmarks --keep` first", file=sys.stderr)
        return 1
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    rows = []
    print("  ".join(HEADER))
    for options in SHAPES:
        try:
            rows.append(describe(compare_in_a_process(options)))
        except RuntimeError as error:
            print(f"benchmarks.trl_grid: {error}", file=sys.stderr)
            return 1
        print("  ".join(cells(rows[-1])), flush=True)
    if keep:
        record = report.read(path)
        record["trl_grid"] = {
            "date": now(),
            "load_average_before": load,
            "rows": rows,
        }
        report.write(record, path)
        print(f"written {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
