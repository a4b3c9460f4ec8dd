"""The commands of `python -m benchmarks`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import CASES, report
from benchmarks.run import describe_device, now, run
from benchmarks.shapes import SETS

BUSY = 0.5
"""Load average with a process that uses half a core."""


def execute(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run a command and return its exit code.

    Raises:
        SystemExit: from the parser, if the device or a file does not fit the arguments.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = report.console()
    if options.command == "docs":
        return _docs(console)
    if options.command == "tune":
        return _tune(parser, options, console)
    if options.command == "keep":
        return _keep(parser, options.results, console)
    warn_if_busy(console)
    if options.command == "claims":
        return _claims(options.keep, console)
    return _run(parser, options, console)


def warn_if_busy(console: Console) -> None:
    """Print a warning if other processes have used the machine in the last minute."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load >= BUSY:
        console.print(
            f"the machine is busy: load {load:.1f} on {os.cpu_count()} cores over the last minute. "
            "Times, and the ceilings that the floors follow from, may be off by several times",
            style="yellow",
            highlight=False,
        )


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace, console: Console) -> int:
    device_type = options.device
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
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
            names=tuple(options.case or CASES),
            # Compiling alone would take the quick set's minute.
            compiled=not (options.no_compile or options.quick),
            progress=progress,
            save=lambda record: report.write(record, path),
        )
    report.print_table(record, console)
    _say_written(path, console)
    if options.keep:
        path = report.results_path(record)
        if path.exists():  # keeps the claims and the grid of `trl_iteration`
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
        parser.error(f"{results} is not a results file: {error}")
    if record["set"] != "default":
        parser.error(f"only results of the default set can be kept, got the {record['set']} set")
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
        console.print(
            f"{path} does not exist: run `python -m benchmarks --keep` first", style="red"
        )
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

    for path in docs.update():
        console.print(f"written {path.relative_to(docs.ROOT)}", highlight=False)
    return 0


def _tune(parser: argparse.ArgumentParser, options: argparse.Namespace, console: Console) -> int:
    from benchmarks import tune

    device = torch.device("cuda" if options.device == "auto" else options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("tune needs a GPU, but torch sees no CUDA device")
    if device.type == "cpu" and (options.write or not options.quick):
        parser.error("tune needs a GPU; --quick --device cpu only tests the code")
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
    """Report progress: one changing line in a terminal, otherwise a line per case."""
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return

    def line(text: str) -> None:
        # Lines such as "3/40  loss, gpt2: checking verl" are for a terminal only.
        if ": " not in text or not text[0].isdigit():
            console.print(text, style="dim", highlight=False, markup=False)

    yield line
