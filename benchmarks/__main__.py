"""`python -m benchmarks`: run a set, print the table, write JSON, pictures and a page.

python -m benchmarks                  the set of this device: minutes
python -m benchmarks --quick          within a minute
python -m benchmarks claims           the ratios that are promised for a CPU, PASS or FAIL
python -m benchmarks page RESULTS     pictures and page of a results file
python -m benchmarks keep RESULTS     adds the cases of a results file to those of its device
python -m benchmarks docs             docs/benchmarks.md and the README's numbers
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import cases, report
from benchmarks.run import run
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
        choices=("run", "claims", "page", "keep", "docs"),
        help="run (the default): a set; claims: the ratios promised for a CPU; page: pictures and "
        "page of a results file; keep: adds its cases to benchmarks/results/<device>.json; docs: "
        "docs/benchmarks.md and the README's numbers from benchmarks/results",
    )
    parser.add_argument("results", nargs="?", type=Path, help="of page and keep: a results file")
    parser.add_argument("--quick", action="store_true", help="small shapes, within a minute")
    parser.add_argument(
        "--case",
        action="append",
        choices=tuple(cases.NAMES),
        help="only this case; may be repeated",
    )
    parser.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda")
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
        help="folder of results.json, index.html and the PNG files; default: %(default)s",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="also write benchmarks/results/<device>.json, from which `docs` writes; of claims: "
        "add them to that file",
    )
    return parser


def main(arguments: Sequence[str] | None = None, prog: str = "python -m benchmarks") -> int:
    parser = build_parser(prog)
    options = parser.parse_args(arguments)
    if options.device not in ("auto", "cpu", "cuda"):
        parser.error(f"--device must be auto, cpu or cuda, got {options.device!r}")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    if options.command == "claims" and options.device == "cuda":
        parser.error("claims are for a CPU: leave --device cuda out")
    if (options.results is not None) != (options.command in ("page", "keep")):
        parser.error("a results file is what `page` and `keep` take, and only they")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = report.console()
    if options.command == "docs":
        return _docs(console)
    if options.command == "claims":
        return _claims(options, console)
    if options.command in ("page", "run"):
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out {options.out} cannot be written: {error.strerror}")
    if options.command in ("page", "keep"):
        try:
            record = report.read(options.results)
        except (OSError, ValueError) as error:
            parser.error(f"{options.results} is no results file: {error}")
        if not isinstance(record, dict) or "format" not in record:
            parser.error(f"{options.results} is no results file: it does not say its format")
        if options.command == "page":
            _write_page(record, options.out, console)
            return 0
        return _keep(parser, record, console)
    return _run(parser, options, console)


def _keep(parser: argparse.ArgumentParser, record: dict[str, Any], console: Console) -> int:
    path = report.results_path(record)
    if record["set"] != "default":
        parser.error(f"only results of the default set are kept, got the {record['set']} set")
    try:
        report.write(report.joined(report.read(path), record) if path.exists() else record, path)
    except ValueError as error:
        parser.error(f"{path}: {error}")
    console.print(f"written {path}", style="dim", highlight=False, markup=False)
    return 0


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace, console: Console) -> int:
    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    if options.keep and (options.quick or options.case or options.no_compile or options.seconds):
        parser.error(
            "--keep is for the whole set: leave --quick, --case, --no-compile and --seconds out; "
            "`keep RESULTS` adds the results of a part to those of its device"
        )
    work = SETS[device.type, "quick" if options.quick else "default"]
    if options.seconds is not None:
        work = work._replace(seconds=options.seconds)
    paths = [options.out / "results.json"]
    with _progress(console) as progress:
        record, _ = run(
            work,
            device,
            names=tuple(options.case or cases.NAMES),
            # Compiling alone would take the quick set's minute.
            compiled=not (options.no_compile or options.quick),
            compiled_last=device.type == "cuda",
            progress=progress,
            save=lambda record: report.write(record, paths[0]),
        )
    report.print_table(record, console)
    if options.keep:
        paths.append(report.results_path(record))
        if paths[-1].exists():  # what `claims` and `trl_grid` measured, with its date, stays
            record = report.read(paths[-1]) | record
    for path in paths:
        report.write(record, path)
        console.print(f"written {path}", style="dim", highlight=False, markup=False)
    _write_page(record, options.out, console)
    return 0


def _write_page(record: dict[str, Any], folder: Path, console: Console) -> None:
    from benchmarks.page import write_page

    path = write_page(record, folder)
    console.print(f"written {path}", style="dim", highlight=False, markup=False)


def _claims(options: argparse.Namespace, console: Console) -> int:
    from benchmarks import claims
    from benchmarks.run import describe_device

    record: dict[str, Any] = {"device": describe_device(torch.device("cpu"))}
    path = report.results_path(record)
    if options.keep and not path.exists():
        console.print(f"{path} is not there: run `python -m benchmarks --keep` first", style="red")
        return 1
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    with _progress(console) as progress:
        measured = claims.measure_claims(progress)
    claims.print_claims(measured, console)
    if options.keep:
        record = report.read(path)
        record["claims"] = claims.describe(measured)
        record["claims_measured"] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "threads": torch.get_num_threads(),
            "load_average_before": load,
        }
        report.write(record, path)
        console.print(f"written {path}", style="dim", highlight=False, markup=False)
    return int(any(claim.verdict == "FAIL" for claim in measured))


def _docs(console: Console) -> int:
    from benchmarks import docs

    changed = docs.update()
    for path in (docs.PAGE, docs.README):
        state = "written" if path in changed else "is what the results say"
        console.print(f"{path.relative_to(docs.ROOT)}: {state}", highlight=False)
    return 0


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
