"""`fastppo bench`, `python -m benchmarks`: the same as `pytest benchmarks`, from any folder."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

EPILOG = """\
All options of pytest and pytest-benchmark work:
  -k "gae and FastPPO"                       some cases and providers, by name
  -m promise                                 the promised ratios
  --benchmark-disable                        only compare with fp64
  --benchmark-autosave, --benchmark-compare  save a run, compare with a saved one
"""


def build_parser(prog: str = "python -m benchmarks") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Time every operation against its peers and its floor. Each provider is "
        "compared with fp64 first; a wrong one fails and is not timed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="small shapes")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    return parser


def main(arguments: Sequence[str] | None = None, prog: str = "python -m benchmarks") -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    build_parser(prog).parse_known_args(arguments)
    # Nothing above imports torch, so that --help is fast.
    import pytest

    os.chdir(ROOT)  # pytest finds its configuration and the saved runs here
    return pytest.main(["benchmarks", *arguments])


if __name__ == "__main__":
    sys.exit(main())
