"""How things are measured: time, memory, ceilings, error.

- Time: on a GPU, CUDA events around each call, with a wait queued on the device before it, so that
  Python's launch overhead is counted only as far as it is longer than HEAD_START_CYCLES. On a CPU,
  `perf_counter`, and `process_time` beside it: processor time of all threads, which other jobs on
  the machine disturb less. Providers take turns call by call, so that a slow minute is everybody's,
  until each has had its time: the fast ones make more calls, the last of them among themselves.
- Cache: each call takes the next of a rotation of inputs that is larger than the caches together.
- Memory: the most that is allocated at any moment of the call, outputs included, above what was
  allocated before it. On a GPU, `torch.cuda.max_memory_allocated`. On a CPU, the allocation events
  of `torch.profiler`, which sees every tensor of torch, those inside its operators included.
- Ceilings: a large copy and large matrix products, a square one and one as wide as a vocabulary,
  timed in the same run, the best of several.
- Ratios: of two functions, call by call in turns, the median of the quotients of neighbours. A busy
  machine slows both, so that the quotient holds where a time does not.
- Error: max |x − truth| over an output, in units of that output's scale (`cases.Truth`). A
  gradient is also held to mean |x − truth| over mean |truth|.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Inputs = dict[str, Tensor]

ROTATION_BYTES = {"cpu": 2**28, "cuda": 2**29}
"""Inputs in rotation: several times the last-level caches (32 MiB and more; 60 MB on an H200)."""

MAX_ROTATION = 128
"""Sets of inputs at most: more would only take longer to draw."""

HEAD_START_CYCLES = 1_000_000
"""About half a millisecond on the device, for the host to queue the call."""

MAX_CALLS = 1000

PATIENCE = 4

COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
MATMUL_SHAPES = {
    "cpu": ((2048, 2048, 2048), (1024, 768, 32000)),
    "cuda": ((8192, 8192, 8192), (8192, 4096, 131072)),
}
"""(rows, inner, columns). Which of them the library does best depends on the machine."""

CEILING_CALLS, CEILING_SECONDS = 10, 1.0


class Timing(NamedTuple):
    """Of one provider on one case; seconds per call."""

    median: float
    quartiles: tuple[float, float]
    calls: int
    processor: float | None
    """Median processor time of all threads; None on a GPU."""

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles."""
        return (self.quartiles[1] - self.quartiles[0]) / 2


class Ceilings(NamedTuple):
    """What the machine can do: bytes (read and written) and FLOP per second."""

    copy: float
    matmul: Mapping[str, float]
    """By dtype, as in "bfloat16"."""

    def floor(self, bytes_moved: int, flop: int, dtype: torch.dtype) -> float:
        """Seconds below which the work cannot be done."""
        return max(bytes_moved / self.copy, flop / self.matmul[dtype_name(dtype)])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rotation_length(bytes_per_set: int, device: torch.device) -> int:
    """Sets of inputs, at least 2, that together are larger than the caches."""
    return max(2, min(MAX_ROTATION, -(-ROTATION_BYTES[device.type] // max(1, bytes_per_set))))


def measure_ceilings(device: torch.device, dtypes: Sequence[torch.dtype]) -> Ceilings:
    size = COPY_BYTES[device.type] // 4
    source = torch.ones(size, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / _best(lambda: target.copy_(source), device)
    matmul = {}
    for dtype in dict.fromkeys(dtypes):
        rates = []
        for rows, inner, columns in MATMUL_SHAPES[device.type]:
            a = torch.randn(rows, inner, device=device).to(dtype)
            b = torch.randn(columns, inner, device=device).to(dtype).T
            out = torch.empty(rows, columns, device=device, dtype=dtype)
            rates.append(2 * rows * inner * columns / _best(_matmul(a, b, out), device))
        matmul[dtype_name(dtype)] = max(rates)
    return Ceilings(copy, matmul)


def _matmul(a: Tensor, b: Tensor, out: Tensor) -> Callable[[], Tensor]:
    return lambda: torch.mm(a, b, out=out)


def _best(call: Callable[[], object], device: torch.device) -> float:
    call()
    seconds = [_seconds(call, device)[0] for _ in range(3)]
    while len(seconds) < CEILING_CALLS and sum(seconds) < CEILING_SECONDS:
        seconds.append(_seconds(call, device)[0])
    return min(seconds)


def _seconds(call: Callable[[], object], device: torch.device) -> tuple[float, float | None]:
    """(seconds, processor seconds or None) of one call; its result is dropped inside the time."""
    if device.type == "cuda":
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        torch.cuda._sleep(HEAD_START_CYCLES)
        before.record()
        call()
        after.record()
        torch.cuda.synchronize(device)
        return before.elapsed_time(after) / 1e3, None
    processor, wall = time.process_time(), time.perf_counter()
    call()
    return time.perf_counter() - wall, time.process_time() - processor


def time_in_turns(
    calls: Mapping[str, Callable[[Inputs], object]],
    rotations: Mapping[str, Sequence[Inputs]],
    restore: Callable[[str, int], None],
    device: torch.device,
    *,
    seconds: float,
    min_calls: int,
) -> dict[str, Timing]:
    """Times the providers in turns, each until it has used `seconds` and made `min_calls` calls.

    A provider so slow that its calls would take PATIENCE times `seconds` makes two and is done.

    Args:
        calls: by name, warmed up by the caller.
        rotations: each provider's inputs, as many sets for one as for another.
        restore: (name, index into the rotation) undoes what the provider wrote over its inputs.
    """
    wall: dict[str, list[float]] = {name: [] for name in calls}
    processor: dict[str, list[float]] = {name: [] for name in calls}
    running, turn = list(calls), 0
    gc.collect()
    gc.disable()
    try:
        while running:
            for name in list(running):
                index = turn % len(rotations[name])
                turn += 1
                inputs, call = rotations[name][index], calls[name]
                took, of_processor = _seconds(functools.partial(call, inputs), device)
                restore(name, index)
                wall[name].append(took)
                if of_processor is not None:
                    processor[name].append(of_processor)
                made, used = len(wall[name]), sum(wall[name])
                done = made >= min_calls and used >= seconds
                slow = made >= 2 and used >= PATIENCE * seconds > 0
                if made >= MAX_CALLS or done or slow:
                    running.remove(name)
    finally:
        gc.enable()
    return {
        name: Timing(
            statistics.median(times),
            _quartiles(times),
            len(times),
            statistics.median(processor[name]) if processor[name] else None,
        )
        for name, times in wall.items()
    }


class Ratio(NamedTuple):
    """How much longer one function takes than another: the median of quotients, its quartiles."""

    median: float
    quartiles: tuple[float, float]
    seconds: tuple[float, float]
    """Median of each of the two."""


def ratio_in_turns(
    numerator: Callable[[int], object], denominator: Callable[[int], object], turns: int
) -> Ratio:
    """Time of `numerator(turn)` over that of `denominator(turn)`, on a CPU.

    Each turn runs both, one turn the one first and one turn the other, after one call to warm up.
    """
    cpu = torch.device("cpu")
    numerator(0), denominator(0)
    taken: list[tuple[float, float]] = []
    gc.collect()
    for turn in range(turns):
        order = [numerator, denominator]
        timings = [
            _seconds(functools.partial(call, turn), cpu)[0]
            for call in (order if turn % 2 == 0 else order[::-1])
        ]
        first, second = timings if turn % 2 == 0 else timings[::-1]
        taken.append((first, second))
    quotients = [first / second for first, second in taken]
    medians = tuple(statistics.median(column) for column in zip(*taken, strict=True))
    return Ratio(statistics.median(quotients), _quartiles(quotients), medians)


def growth_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float | None:
    """The slope of log cost over log size by least squares; None from fewer than two sizes."""
    points = [(math.log(x), math.log(y)) for x, y in zip(sizes, costs, strict=True) if y > 0]
    if len({x for x, _ in points}) < 2:
        return None
    slope, _ = statistics.linear_regression(*zip(*points, strict=True))
    return slope


def _quartiles(times: list[float]) -> tuple[float, float]:
    if len(times) < 2:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def peak_extra_memory(call: Callable[[], object], device: torch.device) -> int:
    """Bytes allocated at the worst moment of the call, above what was allocated before it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    del result
    assert profiler.profiler is not None
    events: Any = profiler.profiler.kineto_results.events()
    events = [event for event in events if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


COMPARE_ELEMENTS = 2**26
"""Compared at once, so that the fp64 difference of a large output is never held whole."""


def max_error(x: Tensor, truth: Tensor) -> float:
    """max |x − truth|, in fp64; inf where there is a NaN. A layout in sequences is as good as one
    in tokens: what counts is the order of the entries.
    """
    if x.numel() != truth.numel():
        raise ValueError(f"shape {list(x.shape)}, expected {list(truth.shape)}")
    return max((gap.max().item() for gap, _ in _gaps(x, truth)), default=0.0)


def mean_error(x: Tensor, truth: Tensor) -> float:
    """mean |x − truth| over mean |truth|: shows what a gradient's largest entries, in the tokens'
    columns, hide from `max_error`."""
    total = scale = 0.0
    for gap, size in _gaps(x, truth):
        total += gap.sum().item()
        scale += size.sum().item()
    return total / scale if scale else total


def _gaps(x: Tensor, truth: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(|x − truth|, |truth|) in fp64, a part at a time; inf where there is a NaN."""
    flat, flat_truth = x.detach().reshape(-1), truth.reshape(-1)
    for start in range(0, flat.numel(), COMPARE_ELEMENTS):
        part = slice(start, start + COMPARE_ELEMENTS)
        wanted = flat_truth[part].double()
        gap = (flat[part].double() - wanted).abs()
        yield gap.nan_to_num(nan=math.inf, posinf=math.inf), wanted.abs()
