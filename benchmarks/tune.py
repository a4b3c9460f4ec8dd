"""Tune the kernels' table of programs by measurement: `python -m benchmarks.tune`.

For each row of `fastppo_kernels.triton.programs.TABLE` with candidates below, time the row's kernel
with every candidate and print the best row. The current program stays unless another is faster by
more than `MARGIN`. --write replaces the rows in the file.

Kernels of a few microseconds have no candidates. Neither has the scan, because its block size fixes
the order of its sums. This has not been run on a GPU.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from fastppo_kernels.triton import programs
from fastppo_kernels.triton.programs import TABLE, Program

import fastppo
from benchmarks import measure, on_a_gpu

MARGIN = 0.02
"""Relative difference in time between runs of the same launch."""

FILE = Path(programs.__file__)

WARPS_LOADS = ((16, 4), (16, 2), (8, 4), (8, 2), (8, 8), (4, 4), (4, 2))
ROWS = tuple(
    Program(warps, loads=loads, registers=min(128, 65536 // (32 * warps)))
    for warps, loads in WARPS_LOADS
)
SCALES = tuple(Program(8, block=block, resident=4) for block in (2048, 4096, 8192))
WHITENS = tuple(
    Program(4, block=block, steps=steps)
    for block, steps in ((512, 4), (512, 8), (512, 16), (1024, 8))
)


class Work(NamedTuple):
    """Row of the table with its candidates and a function that makes its bf16 launch."""

    row: str
    candidates: tuple[Program, ...]
    make: Callable[[], Callable[[], object]]


def works(device: torch.device, *, tiny: bool) -> list[Work]:
    def logits(vocab: int, *, is_read_twice: bool) -> Callable[[], object]:
        n, vocab = (2, 1040) if tiny else (2**30 // vocab, vocab)
        operands = on_a_gpu.rows_of(n, vocab, device, torch.bfloat16)
        if is_read_twice:
            return partial(on_a_gpu.loss, operands)
        return partial(
            fastppo.token_stats, operands["logits"], operands["tokens"], backend="triton"
        )

    def scale() -> Callable[[], object]:
        from fastppo_kernels.triton.scale import scale_

        shape = (2, 1040) if tiny else (4096, 151936)
        x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        return partial(scale_, x, torch.tensor(0.5, device=device))

    def whiten() -> Callable[[], object]:
        x = torch.randn(2**12 if tiny else 2**23, device=device)
        moments = torch.tensor([x.numel(), 0.0, x.numel()], dtype=torch.float64, device=device)
        mask = x < 2
        return partial(fastppo.whiten, x, mask, moments=moments, backend="triton")

    twice = partial(logits, is_read_twice=True)
    once = partial(logits, is_read_twice=False)
    return [
        Work("rows to 16 KiB, read twice", ROWS, partial(twice, 4096)),
        Work("rows to 128 KiB, read twice", ROWS, partial(twice, 32000)),
        Work("longer rows, read twice", ROWS, partial(twice, 151936)),
        Work("rows to 16 KiB, read once", ROWS, partial(once, 4096)),
        Work("longer rows, read once", ROWS, partial(once, 151936)),
        Work("scale", SCALES, scale),
        Work("whiten", WHITENS, whiten),
    ]


@contextmanager
def launched_with(row: str, program: Program) -> Iterator[None]:
    """Replace a program in the table."""
    before = TABLE[row]
    TABLE[row] = program
    try:
        yield
    finally:
        TABLE[row] = before


def seconds_on(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Return a timer that first runs the call once to compile it."""

    def seconds(call: Callable[[], object]) -> float:
        call()
        return measure.quartiles(measure.call_times(call, device, seconds=0.05))[0]

    return seconds


def tune(
    todo: list[Work],
    seconds_of: Callable[[Callable[[], object]], float],
    *,
    source: str,
    end: float,
    say: Callable[[str], None] = print,
) -> dict[str, Program]:
    """Return the best program per row, and print each as a row of the table.

    Args:
        seconds_of: the timer of a call.
        source: the source of the choice, the GPU's name.
        end: time limit on the clock of `time.monotonic`; no row starts after it.
    """
    chosen = {}
    for work in todo:
        if time.monotonic() > end:
            say(f"# {work.row}: skipped, the time is up")
            continue
        call = work.make()
        here = TABLE[work.row]._replace(source=Program(1).source)
        times = {}
        for program in (here, *(each for each in work.candidates if each != here)):
            try:
                with launched_with(work.row, program):
                    times[program] = seconds_of(call)
            except Exception as error:  # such as a launch too large for the GPU
                say(f"# {_written(program)}: FAILED {type(error).__name__}: {str(error)[:90]}")
                continue
            say(f"# {_written(program)}: {1e3 * times[program]:.3f} ms")
        if here not in times:
            continue
        best = min(times, key=lambda program: times[program])
        if times[best] > (1 - MARGIN) * times[here]:
            best = here
        chosen[work.row] = best._replace(source=source)
        say(_row(work.row, chosen[work.row]))
    return chosen


def _written(program: Program) -> str:
    """Format a program for the table."""
    defaults = Program._field_defaults
    named = [
        f"{name}={value}"
        for name, value in program._asdict().items()
        if name not in ("num_warps", "source") and value != defaults[name]
    ]
    return f'Program({", ".join([str(program.num_warps), *named])}, source="{program.source}")'


def _row(name: str, program: Program) -> str:
    return f'    "{name}": {_written(program)},'


def rewritten(text: str, rows: dict[str, Program]) -> str:
    """Replace rows in the text of the table's file. Raises ValueError for unknown rows."""
    for name, program in rows.items():
        line = re.compile(rf'^    "{re.escape(name)}": Program\(.*\),$', re.MULTILINE)
        text, count = line.subn(_row(name, program), text)
        if count != 1:
            raise ValueError(f"expected one row {name!r} in the table of programs, got {count}")
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write the rows to {FILE.name}")
    parser.add_argument("--seconds", type=float, default=500.0, help="start no row after these")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to test the code")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("tune needs a GPU, but torch sees no CUDA device")
    if device.type == "cpu" and (options.write or not options.tiny):
        parser.error("tune needs a GPU; --tiny --device cpu only tests the code")
    todo = works(device, tiny=options.tiny)
    source = "nothing: a CPU"
    if device.type == "cuda":
        source = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0]
    end = time.monotonic() + options.seconds
    rows = tune(todo, seconds_on(device), source=source, end=end)
    if options.write:
        FILE.write_text(rewritten(FILE.read_text(), rows))
        print(f"written {FILE}")


if __name__ == "__main__":
    main()
