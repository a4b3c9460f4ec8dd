"""Runs cases: each provider is proven right on the case's input, and only then measured."""

from __future__ import annotations

import datetime
import functools
import gc
import importlib.metadata
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import cases, measure
from benchmarks.cases import Case, Provider
from benchmarks.measure import Ceilings, Inputs, Timing
from benchmarks.shapes import Work

PACKAGES = (
    *("fastppo", "torch", "triton", "numpy", "transformers"),
    *("liger-kernel", "trl", "verl", "cut-cross-entropy", "quack-kernels"),
)

FORMAT = 1
"""Of the results file; raised when a field changes its meaning."""

Progress = Callable[[str], None]


class Row(NamedTuple):
    """One provider of one case."""

    provider: str
    status: str
    """timed, wrong, absent, unsupported or failed; all but `timed` have a detail and no time."""
    detail: str = ""
    error: float | None = None
    """The worst output's, in units of its scale."""
    peak_extra_bytes: int | None = None
    timing: Timing | None = None


class Result(NamedTuple):
    case: Case
    floor: float
    """Seconds."""
    rows: list[Row]


def run_case(
    case: Case, work: Work, device: torch.device, ceilings: Ceilings, *, compiled: bool = True
) -> Result:
    """Checks, weighs and times every provider of a case."""
    providers, rows = _providers(case, device, compiled)
    inputs = case.draw(0, device)
    truth = case.truth(inputs)
    right: list[tuple[Provider, float]] = []
    for provider in providers:
        checked = _check(provider, inputs, truth, case.tolerance)
        if isinstance(checked, Row):
            rows[provider.name] = checked
        else:
            right.append((provider, checked))
    del truth
    memory: dict[str, int] = {}
    for provider, _ in right:
        saved = _saved(provider, inputs)
        memory[provider.name] = measure.peak_extra_memory(
            functools.partial(provider.call, inputs), device
        )
        _restore(inputs, saved)
    bytes_per_set = sum(x.nbytes for x in inputs.values())
    length = measure.rotation_length(bytes_per_set, device)
    rotation = [inputs, *(case.draw(seed, device) for seed in range(1, length))]
    kept = {p.name: [_saved(p, x) for x in rotation] for p, _ in right if p.writes}
    timings = measure.time_in_turns(
        {provider.name: provider.call for provider, _ in right},
        rotation,
        lambda name, index: _restore(rotation[index], kept[name][index]) if name in kept else None,
        device,
        seconds=work.seconds_per_provider,
        min_calls=work.min_calls,
    )
    for provider, error in right:
        rows[provider.name] = Row(
            provider.name,
            "timed",
            error=error,
            peak_extra_bytes=memory[provider.name],
            timing=timings[provider.name],
        )
    floor = ceilings.floor(case.bytes_moved, case.flop, case.dtype)
    torch.compiler.reset()
    cases._compiled.cache_clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Result(case, floor, list(rows.values()))


def _providers(
    case: Case, device: torch.device, compiled: bool
) -> tuple[list[Provider], dict[str, Row | Any]]:
    """(providers to run, rows in the order of the table with those that cannot run filled in)."""
    found = [*case.providers, *(case.compiled if compiled else ())]
    rows: dict[str, Row | Any] = {provider.name: None for provider in found}
    for name, reason in case.notes.items():
        rows[name] = Row(name, "unsupported", reason)
    for peer in case.peers:
        name = peer.distribution
        if not cases.is_installed(name):
            rows[name] = Row(name, "absent", f"pip install {name}")
            continue
        try:
            built = peer.build(device)
        except (ImportError, AttributeError) as error:
            rows[name] = Row(name, "unsupported", _one_line(error))
            continue
        found += built
        rows |= dict.fromkeys(provider.name for provider in built)
    return found, rows


def _one_line(error: Exception) -> str:
    first = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[0][:160]}"


def _check(
    provider: Provider, inputs: Inputs, truth: dict[str, cases.Truth], tolerance: float
) -> Row | float:
    """The provider's error if it is right, else its row. The check warms it up, too."""
    saved = _saved(provider, inputs)
    try:
        outputs = provider.call(inputs)
        if not outputs or not outputs.keys() <= truth.keys():
            raise ValueError(f"outputs {sorted(outputs)}, expected some of {sorted(truth)}")
        errors = {
            name: measure.max_error(x, truth[name].values) / truth[name].scale
            for name, x in outputs.items()
        }
    except Exception as error:  # a peer may raise anything, and the others still have to run
        return Row(provider.name, "failed", _one_line(error))
    finally:
        _restore(inputs, saved)
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] <= tolerance:
        detail = f"{worst} is off by {errors[worst]:.1e}, allowed {tolerance:.0e}"
        return Row(provider.name, "wrong", detail, error=errors[worst])
    return errors[worst]


def _saved(provider: Provider, inputs: Inputs) -> dict[str, Tensor]:
    return {name: inputs[name].detach().clone() for name in provider.writes}


def _restore(inputs: Inputs, saved: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, x in saved.items():
            inputs[name].copy_(x)


# ------------------------------------------------------------------------------ what a file says


def run(
    work: Work,
    device: torch.device,
    *,
    names: tuple[str, ...] = tuple(cases.NAMES),
    compiled: bool = True,
    progress: Progress = lambda line: None,
) -> tuple[dict[str, Any], list[Result]]:
    """The record of a run, as the JSON has it, and the results that it is made of."""
    chosen = cases.cases(work, names)
    record: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "set": work.name,
        "device": describe_device(device),
        "packages": {name: _version(name) for name in PACKAGES},
        "load_average_before": _load_average(),
    }
    progress("ceilings: a copy and a matrix product")
    ceilings = measure.measure_ceilings(device, [case.dtype for case in chosen])
    results = []
    for number, case in enumerate(chosen, 1):
        progress(f"{number}/{len(chosen)}  {case.name}, {case.shape}")
        results.append(run_case(case, work, device, ceilings, compiled=compiled))
    record["load_average_after"] = _load_average()
    record["ceilings"] = {
        "copy_bytes_per_second": ceilings.copy,
        "matmul_flop_per_second": dict(ceilings.matmul),
    }
    record["cases"] = [describe(result) for result in results]
    return record, results


def describe(result: Result) -> dict[str, Any]:
    case = result.case
    return {
        **cases.describe(case),
        "floor_seconds": result.floor,
        "rows": [_describe_row(row, case, result.floor) for row in result.rows],
    }


def _describe_row(row: Row, case: Case, floor: float) -> dict[str, Any]:
    """Every field in every row: null where there is nothing to say."""
    t = row.timing
    return {
        "provider": row.provider,
        "status": row.status,
        "detail": row.detail,
        "median_seconds": t and t.median,
        "quartiles_seconds": t and list(t.quartiles),
        "spread_seconds": t and t.spread,
        "processor_seconds": t and t.processor,
        "calls": t and t.calls,
        "bytes_per_second": t and case.bytes_moved / t.median,
        "flop_per_second": t and case.flop / t.median,
        "percent_of_floor": t and 100 * floor / t.median,
        "peak_extra_bytes": row.peak_extra_bytes,
        "error": row.error,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        if distribution == "fastppo":  # run from the tree
            import fastppo

            return fastppo.__version__
        return None


def _load_average() -> list[float] | None:
    """Of 1, 5 and 15 minutes; a busy machine's times are to be read with care."""
    return [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe_device(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": device_name(device),
        "type": device.type,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
    }
    if device.type == "cuda":
        found["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
        found["cuda"] = torch.version.cuda
    return found
