"""`python -m benchmarks`: run a set, print the table, write the JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import cases, report
from benchmarks.run import run
from benchmarks.shapes import SETS


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times every operation beside its peers and its floor. Each provider is "
        "checked against fp64 first; a wrong one is reported and not timed.",
        epilog="cases: " + "; ".join(f"{name} ({what})" for name, what in cases.NAMES.items()),
    )
    parser.add_argument("--quick", action="store_true", help="small shapes, about a minute")
    parser.add_argument(
        "--case",
        action="append",
        choices=tuple(cases.NAMES),
        help="only this case; may be repeated",
    )
    parser.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda")
    parser.add_argument("--threads", type=int, help="CPU threads of torch; default: torch's own")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--json", type=Path, help="results file; default benchmarks/results/DEVICE/DATE.json"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    if device.type not in ("cpu", "cuda"):
        parser.error(f"--device must be auto, cpu or cuda, got {kind!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    work = SETS[device.type, "quick" if options.quick else "default"]
    console = report.console()
    record, _ = run(
        work,
        device,
        names=tuple(options.case or cases.NAMES),
        compiled=not options.no_compile,
        progress=lambda line: console.print(line, style="dim", highlight=False, markup=False),
    )
    path = options.json or report.results_path(record)
    report.write(record, path)
    console.print(f"written {path}", style="dim", highlight=False, markup=False)
    report.print_table(record, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
