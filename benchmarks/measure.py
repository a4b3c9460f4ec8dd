"""Measure time, memory, ceilings and errors.

- Time: `pytest-benchmark` on a CPU, on rotating inputs larger than the caches. On a GPU
  `triton.testing.do_bench`, with an empty cache before each call; `Replay` hands its times to
  pytest-benchmark.
- Memory: the peak during the call, outputs included, above the memory before it. On a GPU
  `torch.cuda.max_memory_allocated`; on a CPU the allocation events of `torch.profiler`, including
  tensors inside operators.
- Ceilings: a large copy and two large matrix products, square and as wide as a vocabulary, timed in
  the same run.
- Ratios: neighboring calls of two functions in turns, because a busy machine slows both.
- Error: max |x − truth| in units of the output's scale (`case.Truth`); for gradients also
  mean |x − truth| over mean |truth|.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

import fastppo

ROTATION_BYTES = 2**28
"""Size of the rotating inputs on a CPU: several times the last-level cache."""

MAX_ROTATION = 128
"""Maximum number of sets of inputs."""

COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
MATMUL_SHAPES = {
    "cpu": ((2048, 2048, 2048), (1024, 768, 32000)),
    "cuda": ((8192, 8192, 8192), (8192, 4096, 131072)),
}
"""Shapes of matrix products, (rows, inner, columns). The best one depends on the machine."""

CEILING_SECONDS = 0.5


class Ceilings(NamedTuple):
    """Bytes (read and written) and FLOP per second of the machine."""

    copy: float
    matmul: Mapping[str, float]
    """FLOP per second by dtype, such as "bfloat16"."""

    def floor(self, bytes_moved: int, flop: int, dtype: torch.dtype) -> float:
        """Return the shortest possible time of the work, in seconds."""
        return max(bytes_moved / self.copy, flop / self.matmul[dtype_name(dtype)])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -------------------------------------------------------------------------------------------- time


def rotation_length(bytes_per_set: int, device: torch.device) -> int:
    """Return the number of input sets that exceed the caches, at least 2 on a CPU."""
    if device.type == "cuda":
        return 1
    return max(2, min(MAX_ROTATION, -(-ROTATION_BYTES // max(1, bytes_per_set))))


def call_times(call: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Return seconds per call of a warmed-up function, measured for about `seconds`."""
    if device.type == "cuda":
        from triton.testing import do_bench

        rep = math.ceil(1e3 * seconds)
        return [1e-3 * ms for ms in do_bench(call, warmup=25, rep=rep, return_mode="all")]
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return list(timer.blocked_autorange(min_run_time=seconds).times)


class Replay:
    """Timer for pytest-benchmark that replays times measured elsewhere, by `do_bench` or in turns.

    After `load(times)`, pytest-benchmark runs that many rounds of an empty function, and the two
    readings of each round differ by the next time.
    """

    def __init__(self) -> None:
        self._readings: Iterator[float] = iter(())

    def load(self, times: Sequence[float]) -> None:
        self._readings = (reading for seconds in times for reading in (0.0, seconds))

    def __call__(self) -> float:
        return next(self._readings)

    def __repr__(self) -> str:
        return "Replay"


REPLAY = Replay()


def quartiles(times: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(times, (0.25, 0.75))
    return float(low), float(high)


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
    """Return the lower quartile, the time on an undisturbed machine."""
    call()
    return quartiles(call_times(call, device, CEILING_SECONDS))[0]


def in_turns(
    first: Callable[[int], object], second: Callable[[int], object], turns: int
) -> list[tuple[float, float]]:
    """Time `first(turn)` and `second(turn)` on a CPU, in seconds.

    Each turn runs both after a warm-up call, and the two alternate in going first.
    """

    def seconds(call: Callable[[int], object], turn: int) -> float:
        begin = time.perf_counter()
        call(turn)
        return time.perf_counter() - begin

    first(0)
    second(0)
    pairs: list[tuple[float, float]] = []
    for turn in range(turns):
        if turn % 2 == 0:
            of_first = seconds(first, turn)
            of_second = seconds(second, turn)
        else:
            of_second = seconds(second, turn)
            of_first = seconds(first, turn)
        pairs.append((of_first, of_second))
    return pairs


def growth_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float | None:
    """Fit the slope of log cost over log size. Returns None for fewer than two sizes."""
    points = [(math.log(x), math.log(y)) for x, y in zip(sizes, costs, strict=True) if y > 0]
    if len({x for x, _ in points}) < 2:
        return None
    slope, _ = statistics.linear_regression(*zip(*points, strict=True))
    return slope


# ------------------------------------------------------------------------------------------ memory


def peak_extra_memory(call: Callable[[], object], device: torch.device) -> int:
    """Return the peak memory of a call in bytes, above the memory before it.

    NumPy's memory counts only if the result still holds it. Buffers that the kernels keep are freed
    before the call.
    """
    gc.collect()
    fastppo.empty_cache()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    # The CPU backend returns large tensors in NumPy's memory, invisible to torch.
    is_numpys = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    traces = tracemalloc.take_snapshot().filter_traces([is_numpys]).traces
    tracemalloc.stop()
    del result
    assert profiler.profiler is not None
    events: Any = profiler.profiler.kineto_results.events()
    events = [event for event in events if event.name() == "[memory]"]
    held = 0
    peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak + sum(trace.size for trace in traces)


# ------------------------------------------------------------------------------------------- error

COMPARE_ELEMENTS = 2**26
"""Entries compared at once, to limit the memory of the fp64 difference."""


class Worst(NamedTuple):
    """Entry that differs most from the truth."""

    error: float
    """Error |x − truth| in fp64; inf for a NaN."""
    place: str
    """Position in the truth, such as "row 3, column 5"."""


def worst_entry(x: Tensor, truth: Tensor) -> Worst:
    """Return the largest error and its position.

    The shapes may differ, but not the order of the entries.
    """
    if x.numel() != truth.numel():
        raise ValueError(f"shape {list(x.shape)}, expected {list(truth.shape)}")
    parts = [gap.max(0) for gap, _ in _gaps(x, truth)]
    if not parts:
        return Worst(0.0, "")
    largest = max(range(len(parts)), key=lambda part: parts[part].values.item())
    entry = largest * COMPARE_ELEMENTS + int(parts[largest].indices)
    return Worst(parts[largest].values.item(), _place(entry, truth.shape))


def _place(entry: int, shape: torch.Size) -> str:
    if not shape:
        return "the only entry"
    row, column = divmod(entry, math.prod(shape[1:]))
    return f"row {row}, column {column}" if len(shape) > 1 else f"row {row}"


def mean_error(x: Tensor, truth: Tensor) -> float:
    """Return mean |x − truth| over mean |truth|.

    It shows errors outside the tokens' columns, where a gradient has its largest entries.
    """
    total = 0.0
    scale = 0.0
    for gap, size in _gaps(x, truth):
        total += gap.sum().item()
        scale += size.sum().item()
    return total / scale if scale else total


def _gaps(x: Tensor, truth: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (|x − truth|, |truth|) in fp64, in parts; inf for a NaN."""
    flat = x.detach().reshape(-1)
    flat_truth = truth.reshape(-1)
    for start in range(0, flat.numel(), COMPARE_ELEMENTS):
        part = slice(start, start + COMPARE_ELEMENTS)
        expected = flat_truth[part].double()
        gap = (flat[part].double() - expected).abs()
        yield gap.nan_to_num(nan=math.inf, posinf=math.inf), expected.abs()
