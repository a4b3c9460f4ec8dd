"""`python -m benchmarks`: run a set, print the table, write JSON and pictures.

python -m benchmarks                  the set of this device: minutes
python -m benchmarks --quick          within a minute
python -m benchmarks claims           the ratios that are promised for a CPU, PASS or FAIL
python -m benchmarks keep RESULTS     adds the cases of a results file to those of its device
python -m benchmarks docs             docs/benchmarks.md and the README's numbers
python -m benchmarks tune             rows for the kernels' table of programs, on a GPU

What the commands do is in `benchmarks.commands`; help and a wrong flag do not wait for its imports.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import CASES

OUT = Path("runs/benchmarks")


def build_parser(prog: str = "python -m benchmarks") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Times every operation beside its peers and its floor. Each provider is "
        "checked against fp64 first; a wrong one is reported and not timed.",
        epilog="cases: " + "; ".join(f"{name} ({what})" for name, what in CASES.items()),
    )
    parser.add_argument(
        "command",
        nargs="?",
        default="run",
        choices=("run", "claims", "keep", "docs", "tune"),
        help="run (the default): a set; claims: the ratios promised for a CPU; keep: adds the "
        "cases of a results file to benchmarks/results/<device>.json; docs: docs/benchmarks.md "
        "and the README's numbers from benchmarks/results; tune: times what the kernels' programs "
        "may be and prints the rows of their table",
    )
    parser.add_argument("results", nargs="?", type=Path, help="of keep: a results file")
    parser.add_argument("--quick", action="store_true", help="small shapes, within a minute")
    parser.add_argument(
        "--case",
        action="append",
        choices=tuple(CASES),
        help="only this case; may be repeated",
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--threads", type=int, help="CPU threads of torch; default: what torch chooses"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="start no case after this many seconds; default: the set's, within ten minutes or one",
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--out",
        type=Path,
        default=OUT,
        help="folder of results.json and the PNG files; default: %(default)s",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="also write benchmarks/results/<device>.json, from which `docs` writes; of claims: "
        "add them to that file",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="of tune: put the rows into kernels/fastppo_kernels/triton/programs.py",
    )
    return parser


def main(arguments: Sequence[str] | None = None, prog: str = "python -m benchmarks") -> int:
    parser = build_parser(prog)
    options = parser.parse_args(arguments)
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    if (options.results is not None) != (options.command == "keep"):
        parser.error("a results file is what `keep` takes, and only that")
    if options.write and options.command != "tune":
        parser.error("--write is of `tune`")
    if options.command == "claims" and options.device == "cuda":
        parser.error("claims are for a CPU: leave --device cuda out")
    part = options.quick or options.case or options.no_compile or options.seconds
    if options.command == "run" and options.keep and part:
        parser.error(
            "--keep is for the whole set: leave --quick, --case, --no-compile and --seconds out; "
            "`keep RESULTS` adds the results of a part to those of its device"
        )
    from benchmarks import commands  # whose imports take seconds

    return commands.execute(parser, options)


if __name__ == "__main__":
    sys.exit(main())
