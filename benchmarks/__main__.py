"""`python -m benchmarks`: run a set, print the table, write JSON and pictures.

python -m benchmarks                  the set of this device: minutes
python -m benchmarks --quick          within a minute
python -m benchmarks claims           the claims for a CPU: PASS or FAIL
python -m benchmarks keep RESULTS     add the cases of a results file to those of its device
python -m benchmarks docs             write docs/benchmarks.md and the README's numbers
python -m benchmarks tune             find the kernels' program sizes on a GPU

`benchmarks.commands` has the commands. Its imports take seconds, so help and wrong flags skip them.
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
        description="Time every operation against its peers and its floor. Each provider is "
        "checked against fp64 first; a wrong one is reported and not timed.",
        epilog="cases: " + "; ".join(f"{name} ({what})" for name, what in CASES.items()),
    )
    parser.add_argument(
        "command",
        nargs="?",
        default="run",
        choices=("run", "claims", "keep", "docs", "tune"),
        help="run (the default): run a set; claims: check the claims for a CPU; keep: add the "
        "cases of a results file to benchmarks/results/<device>.json; docs: write "
        "docs/benchmarks.md and the README's numbers from benchmarks/results; tune: time the "
        "candidate programs of the kernels and print the best rows of their table",
    )
    parser.add_argument("results", nargs="?", type=Path, help="a results file, for keep")
    parser.add_argument("--quick", action="store_true", help="small shapes, within a minute")
    parser.add_argument(
        "--case",
        action="append",
        choices=tuple(CASES),
        help="run only this case; can be repeated",
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--threads", type=int, help="CPU threads of torch; default: chosen by torch"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="start no case after this many seconds; default: the limit of the set",
    )
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile")
    parser.add_argument(
        "--out",
        type=Path,
        default=OUT,
        help="folder for results.json and the figures; default: %(default)s",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="also write benchmarks/results/<device>.json, the input of `docs`; with claims: add "
        "them to this file",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="with tune: write the rows to kernels/fastppo_kernels/triton/programs.py",
    )
    return parser


def main(arguments: Sequence[str] | None = None, prog: str = "python -m benchmarks") -> int:
    parser = build_parser(prog)
    options = parser.parse_args(arguments)
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    if (options.results is not None) != (options.command == "keep"):
        parser.error("`keep` takes a results file, other commands take none")
    if options.write and options.command != "tune":
        parser.error("--write needs `tune`")
    if options.command == "claims" and options.device == "cuda":
        parser.error("claims are for a CPU: remove --device cuda")
    part = options.quick or options.case or options.no_compile or options.seconds
    if options.command == "run" and options.keep and part:
        parser.error(
            "--keep needs the whole set: remove --quick, --case, --no-compile and --seconds; "
            "`keep RESULTS` adds part of a set to the results of its device"
        )
    from benchmarks import commands

    return commands.execute(parser, options)


if __name__ == "__main__":
    sys.exit(main())
