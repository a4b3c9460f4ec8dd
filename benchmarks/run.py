"""Run cases: check each provider on the case's input, then measure it."""

from __future__ import annotations

import datetime
import functools
import gc
import importlib.metadata
import itertools
import os
import platform
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks import CASES, cases, measure
from benchmarks import case as case_module
from benchmarks.case import Case, Provider, Truth, UnsupportedError
from benchmarks.measure import Ceilings, Inputs, Timing
from benchmarks.shapes import Sweep, Work
from fastppo.models.device import device_name

PACKAGES = (
    "fastppo",
    "torch",
    "triton",
    "numpy",
    "transformers",
    "liger-kernel",
    "trl",
    "verl",
    "cut-cross-entropy",
    "quack-kernels",
)

FORMAT = 2
"""Version of the results file, raised if a field changes its meaning."""

SWEEP_SHARE = 0.3
"""Share of the time per provider for each point of a sweep."""

Progress = Callable[[str], None]


class Row(NamedTuple):
    """The result of a provider on a case."""

    provider: str
    status: str
    """timed, bound (a timed lower bound), wrong, absent, unsupported, failed or skipped. Only the
    first two have a time, the others have a detail."""
    detail: str = ""
    error: float | None = None
    """Error of the worst output, in units of its scale."""
    peak_extra_bytes: int | None = None
    timing: Timing | None = None


class Result(NamedTuple):
    case: Case
    floor: float
    """Seconds."""
    rows: list[Row]


def run_case(
    case: Case,
    device: torch.device,
    ceilings: Ceilings,
    *,
    seconds: float,
    compiled: bool = True,
    progress: Progress = lambda line: None,
) -> Result:
    """Check every provider of a case, then measure its memory and time, `seconds` each."""
    try:
        rows = _measured_rows(case, device, seconds, compiled, progress)
    finally:
        case.release()
        torch.compiler.reset()
        case_module.compiled.cache_clear()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return Result(case, ceilings.floor(case.bytes_moved, case.flop, case.dtype), rows)


def _measured_rows(
    case: Case, device: torch.device, seconds: float, compiled: bool, progress: Progress
) -> list[Row]:
    providers, rows = _providers(case, device, compiled)
    inputs = case.draw(0, device)
    truth = case.truth(inputs)
    length = measure.rotation_length(sum(x.nbytes for x in inputs.values()), device)
    rotation = [inputs, *(case.draw(seed, device) for seed in range(1, length))]
    calls: dict[str, Callable[[], object]] = {}
    for provider in providers:
        progress(f"checking {provider.name}")
        row = check(case, provider, inputs, truth)
        rows[provider.name] = row
        if row.status != "right":
            continue
        own = [provider.own_inputs(x) for x in rotation]
        try:
            peak = measure.peak_extra_memory(functools.partial(provider.call, own[0]), device)
        except Exception as error:  # as in `check`
            rows[provider.name] = Row(provider.name, "failed", _one_line(error))
            continue
        status = "bound" if provider.is_bound else "timed"
        rows[provider.name] = row._replace(status=status, peak_extra_bytes=peak)
        calls[provider.name] = _next_call(provider, own)
    del truth
    progress("timing")
    for name, timing in measure.time_calls(calls, device, seconds=seconds).items():
        rows[name] = rows[name]._replace(timing=timing)
    return list(rows.values())


def _next_call(provider: Provider, rotation: list[Inputs]) -> Callable[[], object]:
    inputs = itertools.cycle(rotation)
    return lambda: provider.call(next(inputs))


def _providers(
    case: Case, device: torch.device, compiled: bool
) -> tuple[list[Provider], dict[str, Row]]:
    """(providers to run, rows of those that cannot run)."""
    providers = [*case.providers, *(case.compiled if compiled else ())]
    rows = {provider.name: Row(provider.name, "not run") for provider in providers}
    for name, reason in case.notes.items():
        if name != "torch.compile" or compiled:
            rows[name] = Row(name, "unsupported", reason)
    for peer in case.peers:
        if not case_module.is_installed(peer.distribution):
            rows[peer.name] = Row(peer.name, "absent", f"pip install {peer.distribution}")
            continue
        try:
            built = peer.build(device)
        except UnsupportedError as error:
            rows[peer.name] = Row(peer.name, "unsupported", str(error))
        except Exception as error:  # an import may raise anything, and the others still have to run
            rows[peer.name] = Row(peer.name, "unsupported", _one_line(error))
        else:
            providers += built
    return providers, rows


def _one_line(error: Exception) -> str:
    first = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[0][:160]}"


MEAN_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Of a gradient's mean size. Eager PyTorch is off by 3e-6 in fp32, and in bf16 by 1e-3 from logits
and 5e-3 from hidden states; an entropy bonus left out is 1e-2 to 8e-2."""


def check(case: Case, provider: Provider, inputs: Inputs, truth: dict[str, Truth]) -> Row:
    """Return a row with the status right, wrong or failed. The call also warms up."""
    name = provider.name
    try:
        outputs = provider.call(provider.own_inputs(inputs))
        if provider.truth is not None:
            truth = provider.truth(inputs)
        elif provider.is_bound:
            return Row(name, "right")
        if not outputs or not outputs.keys() <= truth.keys():
            raise ValueError(f"outputs {sorted(outputs)}, expected some of {sorted(truth)}")
        errors: dict[str, float] = {}
        mean_errors: dict[str, float] = {}
        for key, output in outputs.items():
            x = output.to(truth[key].values.device)
            errors[key] = measure.max_error(x, truth[key].values) / truth[key].scale
            if key.endswith("_grad"):
                mean_errors[key] = measure.mean_error(x, truth[key].values)
    except Exception as error:  # peers can raise anything; the others still run
        return Row(name, "failed", _one_line(error))
    worst = max(errors, key=lambda key: errors[key])
    if not errors[worst] <= case.tolerance:
        detail = f"{worst} is off by {errors[worst]:.1e}, allowed {case.tolerance:.0e}"
        return Row(name, "wrong", detail, errors[worst])
    allowed = MEAN_TOLERANCE[case.dtype]
    for key, mean in mean_errors.items():
        if not mean <= allowed:
            detail = f"{key} is off by {mean:.1e} of its mean size, allowed {allowed:.0e}"
            return Row(name, "wrong", detail, errors[worst])
    return Row(name, "right", error=errors[worst])


# --------------------------------------------------------------------------------- a set of cases


def run(
    work: Work,
    device: torch.device,
    *,
    names: tuple[str, ...] = tuple(CASES),
    compiled: bool = True,
    progress: Progress = lambda line: None,
    save: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Run a set and return its results as JSON data.

    Args:
        names: cases to run, see `benchmarks.CASES`.
        compiled: include `torch.compile`, except in sweeps.
        save: called with the partial results after each case.
    """
    start = time.monotonic()
    chosen = cases.cases(work, names)
    sweeps = work.sweeps if "sweeps" in names else ()
    points = {sweep: cases.sweep_cases(sweep, work.dtype) for sweep in sweeps}
    record: dict[str, Any] = {
        "format": FORMAT,
        "date": now(),
        "set": work.name,
        "device": describe_device(device),
        # torch's own version includes the build: 2.11.0+cu130
        "packages": {name: _version(name) for name in PACKAGES} | {"torch": torch.__version__},
        "load_average_before": _load_average(),
        "cases": [],
        "sweeps": [],
    }
    progress("ceilings: a copy and matrix products")
    every = [*chosen, *(case for sized in points.values() for _, case in sized)]
    ceilings = measure.measure_ceilings(device, [case.dtype for case in every])
    record["ceilings"] = {
        "copy_bytes_per_second": ceilings.copy,
        "matmul_flop_per_second": dict(ceilings.matmul),
    }
    titles = {
        id(case): f"{place}/{len(every)}  {case.name}, {case.shape}"
        for place, case in enumerate(every, start=1)
    }

    def step(case: Case, seconds: float, with_compiled: bool) -> Result:
        title = titles[id(case)]
        floor = ceilings.floor(case.bytes_moved, case.flop, case.dtype)
        ours_and_eager = [provider.name for provider in case.providers]
        # The first case always runs, even if the ceilings took all the time.
        if case is not every[0] and time.monotonic() - start > work.seconds:
            progress(f"{title}: skipped")
            detail = f"skipped after the time limit of {work.seconds:.0f} s"
            return Result(case, floor, [Row(name, "skipped", detail) for name in ours_and_eager])
        progress(title)
        try:
            return run_case(
                case,
                device,
                ceilings,
                seconds=seconds,
                compiled=with_compiled,
                progress=lambda line: progress(f"{title}: {line}"),
            )
        except Exception as error:  # such as out of memory; the other cases still run
            detail = _one_line(error)
            progress(f"{title} failed: {detail}")
            return Result(case, floor, [Row(name, "failed", detail) for name in ours_and_eager])

    def save_record() -> None:
        record["load_average_after"] = _load_average()
        record["seconds"] = round(time.monotonic() - start, 1)
        save(record)

    for case in chosen:
        record["cases"].append(describe(step(case, work.seconds_per_provider, compiled)))
        save_record()
    for sweep, sized in points.items():
        seconds = SWEEP_SHARE * work.seconds_per_provider
        results = [(size, step(case, seconds, False)) for size, case in sized]
        record["sweeps"].append(describe_sweep(sweep, results))
        save_record()
    save_record()
    return record


# ------------------------------------------------------------------------------ what a file says


def describe(result: Result) -> dict[str, Any]:
    case = result.case
    return {
        "case": case.name,
        "shape": case.shape,
        "dtype": measure.dtype_name(case.dtype),
        "bytes": case.bytes_moved,
        "flop": case.flop,
        "counted": case.bytes_and_flop,
        "floor_seconds": result.floor,
        "rows": [_describe_row(row, case, result.floor) for row in result.rows],
    }


def _describe_row(row: Row, case: Case, floor: float) -> dict[str, Any]:
    """Return all fields of a row, None without a value."""
    timing = row.timing
    return {
        "provider": row.provider,
        "status": row.status,
        "detail": row.detail,
        "median_seconds": timing and timing.median,
        "quartiles_seconds": timing and list(timing.quartiles),
        "spread_seconds": timing and timing.spread,
        "calls": timing and timing.calls,
        "bytes_per_second": timing and case.bytes_moved / timing.median,
        "flop_per_second": timing and case.flop / timing.median,
        "percent_of_floor": timing and 100 * floor / timing.median,
        "peak_extra_bytes": row.peak_extra_bytes,
        "error": row.error,
    }


def describe_sweep(sweep: Sweep, points: list[tuple[int, Result]]) -> dict[str, Any]:
    """Return the points of a sweep, and each provider's growth exponents of time and memory."""
    series: dict[str, list[tuple[float, float, float]]] = {}
    for size, result in points:
        for row in result.rows:
            if row.timing is not None:
                measured = size, row.timing.median, row.peak_extra_bytes or 0
                series.setdefault(row.provider, []).append(measured)
    growth = {}
    for provider, measurements in series.items():
        sizes, times, memory = zip(*measurements, strict=True)
        growth[provider] = {
            "sizes": len(sizes),
            "time": measure.growth_exponent(sizes, times),
            "memory": measure.growth_exponent(sizes, memory),
        }
    return {
        "case": points[0][1].case.name,
        "variable": sweep.variable,
        "growth": growth,
        "points": [{"size": size, **describe(result)} for size, result in points],
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        if distribution == "fastppo":  # run from the tree
            import fastppo

            return fastppo.__version__
        return None


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _load_average() -> list[float] | None:
    """Return the load average over 1, 5 and 15 minutes."""
    return [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None


def describe_device(device: torch.device) -> dict[str, Any]:
    machine: dict[str, Any] = {
        "name": device_name(device),
        "type": device.type,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
    }
    if device.type == "cuda":
        machine["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
        machine["cuda"] = torch.version.cuda
    return machine
