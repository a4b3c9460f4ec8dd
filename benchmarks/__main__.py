"""`python -m benchmarks`: run a set, print the table, write JSON and pictures.

python -m benchmarks                  the set of this device: minutes
python -m benchmarks --quick          within a minute
python -m benchmarks claims           the ratios that are promised for a CPU, PASS or FAIL
python -m benchmarks keep RESULTS     adds the cases of a results file to those of its device
python -m benchmarks docs             docs/benchmarks.md and the README's numbers
python -m benchmarks tune             rows for the kernels' table of programs, on a GPU
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import cases, report
from benchmarks.run import describe_device, now, run
from benchmarks.shapes import SETS

OUT = Path("runs/benchmarks")


def build_parser(prog: str = "python -m benchmarks") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Times every operation beside its peers and its floor. Each provider is "
        "checked against fp64 first; a wrong one is reported and not timed.",
        epilog="cases: " + "; ".join(f"{name} ({what})" for name, what in cases.NAMES.items()),
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
        choices=tuple(cases.NAMES),
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
        help="of tune: put the rows into kernels/fastppo_kernels/programs.py",
    )
    return parser


def main(arguments: Sequence[str] | None = None, prog: str = "python -m benchmarks") -> int:
    parser = build_parser(prog)
    options = parser.parse_args(arguments)
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    if (options.results is not None) != (options.command == "keep"):
        parser.error("a results file is what `keep` takes, and only that")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = report.console()
    if options.write and options.command != "tune":
        parser.error("--write is of `tune`")
    if options.command == "docs":
        return _docs(console)
    if options.command == "tune":
        return _tune(parser, options, console)
    if options.command == "keep":
        return _keep(parser, options.results, console)
    if options.command == "claims":
        if options.device == "cuda":
            parser.error("claims are for a CPU: leave --device cuda out")
        return _claims(options.keep, console)
    return _run(parser, options, console)


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace, console: Console) -> int:
    device_type = options.device
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    if options.keep and (options.quick or options.case or options.no_compile or options.seconds):
        parser.error(
            "--keep is for the whole set: leave --quick, --case, --no-compile and --seconds out; "
            "`keep RESULTS` adds the results of a part to those of its device"
        )
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out} cannot be written: {error.strerror}")
    work = SETS[device_type, "quick" if options.quick else "default"]
    if options.seconds is not None:
        work = work._replace(seconds=options.seconds)
    path = options.out / "results.json"
    with _progress(console) as progress:
        record = run(
            work,
            torch.device(device_type),
            names=tuple(options.case or cases.NAMES),
            # Compiling alone would take the quick set's minute.
            compiled=not (options.no_compile or options.quick),
            progress=progress,
            save=lambda record: report.write(record, path),
        )
    report.print_table(record, console)
    _say_written(path, console)
    if options.keep:
        path = report.results_path(record)
        if path.exists():  # what `claims` and `trl_grid` measured, with its date, stays
            record = report.read(path) | record
        report.write(record, path)
        _say_written(path, console)

    from benchmarks import plots

    for picture in plots.draw(record, options.out):
        _say_written(picture, console)
    return 0


def _keep(parser: argparse.ArgumentParser, results: Path, console: Console) -> int:
    try:
        record = report.read(results)
    except (OSError, ValueError) as error:
        parser.error(f"{results} is no results file: {error}")
    if record["set"] != "default":
        parser.error(f"only results of the default set are kept, got the {record['set']} set")
    path = report.results_path(record)
    try:
        report.write(report.joined(report.read(path), record) if path.exists() else record, path)
    except ValueError as error:
        parser.error(f"{path}: {error}")
    _say_written(path, console)
    return 0


def _claims(keep: bool, console: Console) -> int:
    from benchmarks import claims

    device: dict[str, Any] = {"device": describe_device(torch.device("cpu"))}
    path = report.results_path(device)
    if keep and not path.exists():
        console.print(f"{path} is not there: run `python -m benchmarks --keep` first", style="red")
        return 1
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    with _progress(console) as progress:
        measured = claims.measure_claims(progress)
    claims.print_claims(measured, console)
    if keep:
        record = report.read(path)
        record["claims"] = claims.describe(measured)
        record["claims_measured"] = {
            "date": now(),
            "threads": torch.get_num_threads(),
            "load_average_before": load,
        }
        report.write(record, path)
        _say_written(path, console)
    return int(any(claim.verdict == "FAIL" for claim in measured))


def _docs(console: Console) -> int:
    from benchmarks import docs

    changed = docs.update()
    for path in (docs.PAGE, docs.README):
        state = "written" if path in changed else "is what the results say"
        console.print(f"{path.relative_to(docs.ROOT)}: {state}", highlight=False)
    return 0


def _tune(parser: argparse.ArgumentParser, options: argparse.Namespace, console: Console) -> int:
    from benchmarks import tune

    device = torch.device("cuda" if options.device == "auto" else options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("tune times the kernels on a GPU, and torch sees no CUDA device")
    if device.type == "cpu" and (options.write or not options.quick):
        parser.error("tune times nothing on a CPU: --quick --device cpu only shows that it runs")
    todo = tune.works(device, tiny=options.quick)
    source = "nothing: a CPU"
    if device.type == "cuda":
        source = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0]
    rows = tune.tune(
        todo,
        tune.seconds_on(device),
        source=source,
        end=time.monotonic() + (options.seconds or 500.0),
        say=lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True),
    )
    if options.write:
        tune.FILE.write_text(tune.rewritten(tune.FILE.read_text(), rows))
        _say_written(tune.FILE, console)
    return 0


def _say_written(path: Path, console: Console) -> None:
    console.print(f"written {path}", style="dim", highlight=False, markup=False)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """One line that changes in a terminal; else a line per case."""
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return

    def line(text: str) -> None:
        # "3/40  loss, gpt2: checking verl" is for a terminal's changing line.
        if ": " not in text or not text[0].isdigit():
            console.print(text, style="dim", highlight=False, markup=False)

    yield line


if __name__ == "__main__":
    sys.exit(main())
