"""Runs cases: each provider is proven right on the case's input, and only then measured."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import gc
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import case as case_module
from benchmarks import cases, measure
from benchmarks.case import Case, Provider, UnsupportedError
from benchmarks.measure import Ceilings, Inputs, Timing
from benchmarks.shapes import Sweep, Work
from fastppo.models.device import device_name

PACKAGES = (
    *("fastppo", "torch", "triton", "numpy", "transformers"),
    *("liger-kernel", "trl", "verl", "agilerl", "cut-cross-entropy", "quack-kernels"),
)

FORMAT = 2
"""Of the results file; raised when a field changes its meaning."""

SWEEP_SHARE = 0.3
"""Of the time per provider, for each point of a sweep."""

Progress = Callable[[str], None]


class Row(NamedTuple):
    """One provider of one case."""

    provider: str
    status: str
    """timed, bound (timed, and no implementation), wrong, absent, unsupported, failed or skipped;
    all but the first two have a detail and no time."""
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
    case: Case,
    work: Work,
    device: torch.device,
    ceilings: Ceilings,
    *,
    compiled: bool = True,
    progress: Progress = lambda line: None,
) -> Result:
    """Checks, weighs and times every provider of a case."""
    try:
        rows = _run_case(case, work, device, compiled, progress)
    finally:
        case.release()
        torch.compiler.reset()
        case_module.compiled.cache_clear()
        gc.unfreeze()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return Result(case, ceilings.floor(case.bytes_moved, case.flop, case.dtype), rows)


def _run_case(
    case: Case, work: Work, device: torch.device, compiled: bool, progress: Progress
) -> list[Row]:
    providers, rows = _providers(case, device, compiled)
    gc.collect()
    gc.freeze()  # what the peers' imports left need not be searched at every collection
    inputs = case.draw(0, device)
    truth = case.truth(inputs)
    right: list[tuple[Provider, float | None]] = []
    prepared: dict[str, Inputs] = {}
    for provider in providers:
        progress(f"checking {provider.name}")
        checked = check(case, provider, inputs, truth)
        if isinstance(checked, Row):
            rows[provider.name] = checked
            continue
        right.append((provider, checked))
        prepared[provider.name] = _prepare(provider, inputs)
    del truth
    memory: dict[str, int] = {}
    for provider, _ in right:
        progress(f"weighing {provider.name}")
        prepared_inputs = prepared[provider.name]
        saved = _saved(provider, prepared_inputs)
        try:
            memory[provider.name] = measure.peak_extra_memory(
                functools.partial(provider.call, prepared_inputs), device
            )
        except Exception as raised:  # as in `check`
            rows[provider.name] = Row(provider.name, "failed", _one_line(raised))
        _restore(prepared_inputs, saved)
    right = [pair for pair in right if pair[0].name in memory]
    del prepared
    progress("timing")
    bytes_per_set = sum(x.nbytes for x in inputs.values())
    length = measure.rotation_length(bytes_per_set, device)
    rotation = [inputs, *(case.draw(seed, device) for seed in range(1, length))]
    rotations = {p.name: [_prepare(p, x) for x in rotation] for p, _ in right}
    originals = {p.name: [_saved(p, x) for x in rotations[p.name]] for p, _ in right if p.writes}

    def restore(name: str, index: int) -> None:
        if name in originals:
            _restore(rotations[name][index], originals[name][index])

    timings = measure.time_in_turns(
        {provider.name: provider.call for provider, _ in right},
        rotations,
        restore,
        device,
        seconds=work.seconds_per_provider,
        min_calls=work.min_calls,
    )
    for provider, error in right:
        rows[provider.name] = Row(
            provider.name,
            "bound" if provider.is_bound else "timed",
            error=error,
            peak_extra_bytes=memory[provider.name],
            timing=timings[provider.name],
        )
    return list(rows.values())


def _providers(
    case: Case, device: torch.device, compiled: bool
) -> tuple[list[Provider], dict[str, Row | Any]]:
    """(providers to run, rows in the order of the table with those that cannot run filled in)."""
    providers = [*case.providers, *(case.compiled if compiled else ())]
    rows: dict[str, Row | Any] = {provider.name: None for provider in providers}
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
            continue
        except Exception as error:  # an import may raise anything, and the others still have to run
            rows[peer.name] = Row(peer.name, "unsupported", _one_line(error))
            continue
        providers += built
        rows |= dict.fromkeys(provider.name for provider in built)
    return providers, rows


def _one_line(error: Exception) -> str:
    first = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[0][:160]}"


MEAN_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Of a gradient's mean size. Eager PyTorch is off by 3e-6 in fp32, and in bf16 by 1e-3 from logits
and 5e-3 from hidden states; an entropy bonus left out is 1e-2 to 8e-2."""


def check(
    case: Case, provider: Provider, inputs: Inputs, truth: dict[str, case_module.Truth]
) -> Row | float | None:
    """The provider's error if it is right (None for a bound), else its row. It warms it up, too."""
    prepared_inputs = inputs
    saved: dict[str, Tensor] = {}
    try:
        prepared_inputs = _prepare(provider, inputs)
        saved = _saved(provider, prepared_inputs)
        outputs = provider.call(prepared_inputs)
        if provider.is_bound:
            return None
        if case.truth_of_outputs is not None:
            truth = case.truth_of_outputs(inputs, outputs)
        if not outputs or not outputs.keys() <= truth.keys():
            raise ValueError(f"outputs {sorted(outputs)}, expected some of {sorted(truth)}")
        there = {name: x.to(truth[name].values.device) for name, x in outputs.items()}
        errors = {
            name: measure.max_error(x, truth[name].values) / truth[name].scale
            for name, x in there.items()
        }
        means = {
            name: measure.mean_error(x, truth[name].values)
            for name, x in there.items()
            if name.endswith("_grad")
        }
    except Exception as error:  # a peer may raise anything, and the others still have to run
        return Row(provider.name, "failed", _one_line(error))
    finally:
        _restore(prepared_inputs, saved)
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] <= case.tolerance:
        detail = f"{worst} is off by {errors[worst]:.1e}, allowed {case.tolerance:.0e}"
        return Row(provider.name, "wrong", detail, error=errors[worst])
    for name, mean in means.items():
        if not mean <= MEAN_TOLERANCE[case.dtype]:
            detail = (
                f"{name} is off by {mean:.1e} of its mean size, allowed "
                f"{MEAN_TOLERANCE[case.dtype]:.0e}"
            )
            return Row(provider.name, "wrong", detail, error=errors[worst])
    return errors[worst]


def _prepare(provider: Provider, inputs: Inputs) -> Inputs:
    return inputs if provider.prepare is None else provider.prepare(inputs)


def _saved(provider: Provider, inputs: Inputs) -> dict[str, Tensor]:
    return {name: inputs[name].detach().clone() for name in provider.writes}


def _restore(inputs: Inputs, saved: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, x in saved.items():
            inputs[name].copy_(x)


# --------------------------------------------------------------------------------- a set of cases

SECONDS_OF_COMPILING = 12
TIMES_THE_BYTES, TIMES_THE_FLOP = 8, 2
FP64_SHARE = 1 / 15
"""For the estimate: what compiling a function takes, how often a middling provider moves the bytes
and does the FLOP, and how fast fp64 products are beside the case's dtype."""


def estimate_seconds(case: Case, work: Work, ceilings: Ceilings, *, compiled: bool) -> float:
    """About how long `run_case` takes, from the case's bytes and FLOP."""
    products = case.flop / ceilings.matmul[measure.dtype_name(case.dtype)]
    call = TIMES_THE_BYTES * case.bytes_moved / ceilings.copy + TIMES_THE_FLOP * products
    count = len(case.providers) + len(case.peers) + (len(case.compiled) if compiled else 0)
    timed = max(work.seconds_per_provider, min(work.min_calls * call, 2 * call))
    truth = products / FP64_SHARE
    compiling = SECONDS_OF_COMPILING * len(case.compiled) if compiled else 0
    return count * (2 * call + timed) + truth + compiling


def run(
    work: Work,
    device: torch.device,
    *,
    names: tuple[str, ...] = tuple(cases.NAMES),
    compiled: bool = True,
    compiled_last: bool = False,
    progress: Progress = lambda line: None,
    save: Callable[[dict[str, Any]], None] = lambda record: None,
) -> tuple[dict[str, Any], list[Result]]:
    """The record of a run, as the JSON has it, and the results that it is made of.

    Args:
        save: takes the record after each case, with what there is by then.
        compiled: `torch.compile` takes part.
        compiled_last: after everything else, not in turns with the others. On a GPU compiling takes
            about half of a set's time, which is what its last rows would be skipped for.
    """
    start = time.monotonic()
    chosen = cases.cases(work, names)
    sweeps = work.sweeps if "sweeps" in names else ()
    points = {sweep: cases.sweep_cases(sweep, work.dtype) for sweep in sweeps}
    record: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "set": work.name,
        "device": describe_device(device),
        # torch's version string says which build it is: 2.11.0+cu130
        "packages": {name: _version(name) for name in PACKAGES} | {"torch": torch.__version__},
        "load_average_before": _load_average(),
    }
    progress("ceilings: a copy and matrix products")
    every = [*chosen, *(case for sized in points.values() for _, case in sized)]
    last = compiled and compiled_last
    alone = [compiled_alone(case) if last and case.compiled else None for case in chosen]
    turns = len(every) + sum(case is not None for case in alone)
    ceilings = measure.measure_ceilings(device, [case.dtype for case in every])
    short = for_sweeps(work)
    estimate = sum(estimate_seconds(c, work, ceilings, compiled=compiled) for c in chosen)
    for sized in points.values():
        estimate += sum(estimate_seconds(c, short, ceilings, compiled=False) for _, c in sized)
    progress(
        f"{turns} cases, about {min(estimate, work.seconds):.0f} s; none starts after "
        f"{work.seconds:.0f} s"
    )
    record["estimated_seconds"] = round(estimate, 1)
    record["ceilings"] = {
        "copy_bytes_per_second": ceilings.copy,
        "matmul_flop_per_second": dict(ceilings.matmul),
    }
    record["sweeps"] = []
    results: list[Result] = []

    def save_results() -> None:
        record["cases"] = [describe(result) for result in results]
        record["load_average_after"] = _load_average()
        record["seconds"] = round(time.monotonic() - start, 1)
        save(record)

    done = 0

    def step(case: Case, of: Work, compiled: bool) -> Result:
        nonlocal done
        done += 1
        title = f"{done}/{turns}  {case.name}, {case.shape}"
        spent = time.monotonic() - start
        if spent > work.seconds:
            progress(f"{title}: skipped")
            return skipped(case, ceilings, f"{work.seconds:.0f} s were spent before its turn")
        progress(title)
        try:
            return run_case(
                case,
                of,
                device,
                ceilings,
                compiled=compiled,
                progress=lambda line: progress(f"{title}: {line}"),
            )
        except Exception as error:  # out of memory, say: the other cases still have to run
            progress(f"{title} failed: {_one_line(error)}")
            floor = ceilings.floor(case.bytes_moved, case.flop, case.dtype)
            names = [provider.name for provider in case.providers]
            return Result(case, floor, [Row(name, "failed", _one_line(error)) for name in names])

    for case, later in zip(chosen, alone, strict=True):
        results.append(step(case, work, compiled and later is None))
        save_results()
    for sweep, sized in points.items():
        found = [(size, step(case, short, False)) for size, case in sized]
        record["sweeps"].append(describe_sweep(sweep, found))
        save_results()
    for index, by_itself in enumerate(alone):
        if by_itself is not None:
            results[index] = with_rows(results[index], step(by_itself, work, False).rows)
            save_results()
    save_results()
    return record, results


def compiled_alone(case: Case) -> Case:
    """The case with what is compiled for its only providers."""
    return dataclasses.replace(case, providers=case.compiled, compiled=(), peers=(), notes={})


def with_rows(result: Result, rows: list[Row]) -> Result:
    """The result with more rows behind those of the case's own providers."""
    own = len(result.case.providers)
    return result._replace(rows=[*result.rows[:own], *rows, *result.rows[own:]])


def for_sweeps(work: Work) -> Work:
    return work._replace(
        seconds_per_provider=SWEEP_SHARE * work.seconds_per_provider,
        min_calls=min(3, work.min_calls),
    )


def skipped(case: Case, ceilings: Ceilings, why: str) -> Result:
    rows = [Row(provider.name, "skipped", why) for provider in case.providers]
    return Result(case, ceilings.floor(case.bytes_moved, case.flop, case.dtype), rows)


# ------------------------------------------------------------------------------ what a file says


def describe(result: Result) -> dict[str, Any]:
    case = result.case
    return {
        **case_module.describe(case),
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


def describe_sweep(sweep: Sweep, points: list[tuple[int, Result]]) -> dict[str, Any]:
    """The points, and for each provider the exponents of its time and memory over the size."""
    series: dict[str, list[tuple[int, Row]]] = {}
    for size, result in points:
        for row in result.rows:
            if row.timing is not None:
                series.setdefault(row.provider, []).append((size, row))
    growth = {}
    for provider, measured in series.items():
        sizes = [float(size) for size, _ in measured]
        growth[provider] = {
            "sizes": len(measured),
            "time": measure.growth_exponent(
                sizes, [r.timing.median for _, r in measured if r.timing]
            ),
            "memory": measure.growth_exponent(
                sizes, [r.peak_extra_bytes or 0 for _, r in measured]
            ),
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


def _load_average() -> list[float] | None:
    """Of 1, 5 and 15 minutes; a busy machine's times are to be read with care."""
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
