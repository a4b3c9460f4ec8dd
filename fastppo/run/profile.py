"""`fastppo train --profile N`: a trace of a run's iterations, by torch.profiler.

The phases of an iteration are named from outside, around the methods that it calls, so a run that
is not profiled pays nothing. The first iteration of a run is a warm-up: it allocates, and compiles
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

PHASES = {
    "generate": ("engine", "generate"),
    "score": ("score",),
    "experience": ("make_experience",),
    "update": ("update",),
}
"""Phases of an iteration, and where a trainer has each."""

PREFIX = "fastppo/"
"""Of a phase's name in a trace."""

TRACE = "profile.json"
"""In the run directory: a chrome trace."""

OPERATORS = "profile.txt"
"""Beside it: the largest operators, by the time that is their own."""

LARGEST = 40
"""Operators in the table, the phases among them."""


@contextmanager
def profiled(trainer: Any, iterations: int) -> Iterator[None]:
    """Around `trainer.train()`: profiles this many iterations after the first.

    Writes `profile.json` and `profile.txt` into the trainer's run directory as soon as they are
    over. A run that ends earlier writes what there is; one of a single iteration, nothing.

    Args:
        trainer: a `PPOTrainer`.
        iterations: 0 profiles nothing and changes nothing.
    """
    if not iterations:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    run_dir = Path(trainer.config.output_dir)

    def write(trace: profile) -> None:
        trace.export_chrome_trace(str(run_dir / TRACE))
        device = "device" if torch.cuda.is_available() else "cpu"
        table = trace.key_averages().table(f"self_{device}_time_total", row_limit=LARGEST)
        (run_dir / OPERATORS).write_text(table, encoding="utf-8")

    plan = schedule(wait=0, warmup=1, active=iterations, repeat=1)
    with (
        named_phases(trainer),
        profile(
            activities=activities, schedule=plan, on_trace_ready=write, acc_events=True
        ) as running,
    ):
        iterate = trainer.iterate

        def iterate_and_count(*args: Any, **keywords: Any) -> Any:
            result = iterate(*args, **keywords)
            running.step()
            return result

        trainer.iterate = iterate_and_count
        yield


@contextmanager
def named_phases(trainer: Any) -> Iterator[None]:
    """A trainer whose phases are ranges of a profile, until the block ends."""
    owners = []
    for name, (*path, method) in PHASES.items():
        owner = reduce(getattr, path, trainer)
        setattr(owner, method, _named(PREFIX + name, getattr(owner, method)))
        owners.append((owner, method))
    try:
        yield
    finally:
        for owner, method in [*owners, (trainer, "iterate")]:
            vars(owner).pop(method, None)  # the class's own is there again


def _named(name: str, function: Callable) -> Callable:
    def call(*args: Any, **keywords: Any) -> Any:
        with record_function(name):
            return function(*args, **keywords)

    return call
