"""`fastppo train --profile N`: a trace of a run's iterations, by torch.profiler.

The phases of an iteration are named from outside, around the methods that it calls, so a run that
is not profiled pays nothing. The first iteration of a run is a warm-up: it allocates, and compiles
kernels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
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
"""Beside it: the largest operators of each phase."""

LARGEST = 12
"""Operators of a phase in the table."""


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
        (run_dir / OPERATORS).write_text(_table(trace), encoding="utf-8")

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


class _Use(NamedTuple):
    """What an operator took in a phase."""

    seconds: float = 0.0
    calls: int = 0


def _table(trace: profile) -> str:
    """The largest operators of each phase, by the time that is their own and no callee's."""
    on_device = torch.cuda.is_available()
    # On a GPU an operator has the device time of the kernels that it launched; those, and what the
    # phases' names cover there, are events of their own, and would count once more.
    of_host = (event for event in trace.events() or () if event.device_type == DeviceType.CPU)
    events = sorted(of_host, key=lambda event: event.time_range.start)
    spans = [event.time_range for event in events if event.name.startswith(PREFIX)]
    names = [event.name for event in events if event.name.startswith(PREFIX)]
    starts = [span.start for span in spans]
    used: dict[str, dict[str, _Use]] = {name: defaultdict(_Use) for name in names}
    for event in events:
        # By its time, not by its caller: a backward pass may run in a thread of its own.
        begin = event.time_range.start
        phase = bisect_right(starts, begin) - 1
        if event.name in names or phase < 0 or begin > spans[phase].end:
            continue
        took = event.self_device_time_total if on_device else event.self_cpu_time_total
        seconds, calls = used[names[phase]][event.name]
        used[names[phase]][event.name] = _Use(seconds + took / 1e6, calls + 1)
    kind = "the device's" if on_device else "the processor's"
    lines = [f"Operators by their own time ({kind}), all profiled iterations together"]
    for name, operators in used.items():
        durations = [
            span.elapsed_us() for span, of_span in zip(spans, names, strict=True) if of_span == name
        ]
        lines += ["", f"{name.removeprefix(PREFIX)}: {sum(durations) / 1e3:.1f} ms"]
        order = sorted(operators.items(), key=lambda item: item[1].seconds, reverse=True)
        lines += [
            f"{use.seconds * 1e3:12.2f} ms {use.calls:8d} calls  {operator}"
            for operator, use in order[:LARGEST]
        ]
    return "\n".join(lines) + "\n"
