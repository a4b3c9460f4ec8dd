"""`fastppo plan`: whether a run fits into the memory of its devices, and if not, which options make
it fit.

What a process holds is counted by `fastppo.ppo.plan.memory`.
"""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fastppo.models import quantized
from fastppo.models.device import choose_device
from fastppo.models.pretrained import model_config
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.plan.memory import Phase, Run, least_bytes, phases_of
from fastppo.ppo.setup.processes import check_context, check_processes
from fastppo.run.progress import say

GB = 1e9

PROCESSES = (2, 4, 8, 16, 32, 64)
"""Numbers of processes that a plan tries."""

PACKAGES = {
    "lora_rank": "peft",
    "quantization": quantized.NEEDED,
}
"""What pip has to install for options that a plan may name."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Options with which a run fits."""

    options: dict[str, Any]
    peak: int
    """The peak with them, bytes."""

    def __str__(self) -> str:
        flags = [f"--{name} {_text(value)}" for name, value in self.options.items()]
        needed = [shlex.quote(PACKAGES[name]) for name in self.options if name in PACKAGES]
        install = f"; pip install {' '.join(needed)}" if needed else ""
        return f"{' '.join(flags)}  ({self.peak / GB:.3g} GB{install})"


@dataclass(frozen=True, slots=True)
class Plan:
    """What each process of a run needs."""

    run: Run
    phases: list[Phase]
    """In the order in which a run goes through them."""
    notes: list[str]
    """Sentences on what is assumed, and on what could not be counted."""

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """Whether the peak fits into the memory; true where no memory was given."""
        return self.run.memory is None or self.peak.total <= self.run.memory

    @property
    def verdict(self) -> str:
        """Whether it fits, in a sentence."""
        unit, size_of_unit = unit_of(self)
        need = f"{self.peak.total / size_of_unit:.3g} {unit} at its peak, the {self.peak.name}"
        memory = self.run.memory
        if memory is None:
            return f"needs {need}; `fastppo plan --memory GB` says whether that fits"
        fits = "fits" if self.fits else "does not fit"
        return f"{fits} {memory / GB:g} GB: {need}"


def make_plan(
    config: PPOConfig, prompt_tokens: int, *, memory: float | None = None, processes: int = 1
) -> Plan:
    """What a run with these options needs.

    Args:
        config: a GPU is planned for where there is none too; auto is one if there is one or if a
            memory is given.
        prompt_tokens: of every prompt.
        memory: of each device, GB; by default what is free on a GPU that is there.
        processes: how many torchrun would start, one for each device.

    Raises:
        ValueError: a config cannot be read; sequences are longer than the model's context.
    """
    free = None if memory is None else memory * GB
    wanted = "cuda" if config.device == "auto" and memory is not None else config.device
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        device = torch.device("cuda")
    else:
        device = choose_device(wanted)
        if device.type == "cuda" and memory is None:
            free = float(torch.cuda.mem_get_info(device)[0])
    context = context_of(config)
    run = Run(config, device, prompt_tokens, context=context, processes=processes, memory=free)
    check_context(prompt_tokens, config.max_new_tokens, context)
    phases, notes = phases_of(run)
    sequences = (
        f"{config.rollout_batch_size} sequences of {prompt_tokens} + {run.response_tokens} tokens"
    )
    notes.insert(0, f"{sequences}, {run.microbatch} at a time in the update; GB are 10^9 bytes")
    if run.is_sharded:
        notes.insert(
            0, f"each of {processes} processes; {run.shards} share one copy of the weights"
        )
    if config.rollout == "vllm" and free is None:
        notes.append("not counted: vLLM's share of a memory that is not known")
    return Plan(run, phases, notes)


def context_of(config: PPOConfig) -> int | None:
    """Tokens that the model takes, if its config says."""
    text_config = model_config(config.model).get_text_config()
    return getattr(text_config, "max_position_embeddings", None)


# -------------------------------------------------------------------------------- what makes it fit


def find_remedies(plan: Plan) -> Iterator[Remedy]:
    """Options with which a run fits. First the ones that change it least; where these change what
    is trained, or there are none, also a number of processes in which it fits."""
    remedy = None
    for options in smaller_weights(plan.run):
        remedy = fit(plan.run, options)
        if remedy is not None:
            yield remedy
            break
    if remedy is not None and not remedy.options.keys() & {"optimizer", "lora_rank"}:
        return
    for processes in PROCESSES:
        more = replace(plan.run, processes=processes)
        options = {"param_dtype": "bfloat16", **one_copy(more)}
        remedy = fit(more, options) if processes > plan.run.processes else None
        if remedy is not None:
            yield replace(remedy, options={"processes": processes, **remedy.options})
            return


def one_copy(run: Run) -> dict[str, Any]:
    """The option by which all processes share one copy of the weights, unless they do."""
    return {} if run.shards == run.processes else {"shard_size": run.processes}


def smaller_weights(run: Run) -> list[dict[str, Any]]:
    """Options that take less memory for the whole run, from the smallest change to the largest."""
    shards = one_copy(run)
    adapters = {} if run.config.lora_rank else {"lora_rank": 16}
    half = {"param_dtype": "bfloat16"}
    more = [shards, shards | half, shards | adapters]
    more += [shards | adapters | half, adapters | {"quantization": "nf4"}]
    return [{}, *filter(None, more)]


def smaller_passes(run: Run) -> dict[str, list[Any]]:
    """Values of options with which a pass takes less memory, the slowest option first, of each the
    smallest saving first."""
    config = run.config
    options: dict[str, list[Any]] = {}
    if not config.gradient_checkpointing:
        options["gradient_checkpointing"] = [True]
    sizes = [size for size in (4, 1) if size < run.microbatch]
    if sizes and config.microbatch_tokens is None:
        options["microbatch_size"] = sizes
    if config.holds_cache and run.generated_at_once > 8:
        options["generate_batch_size"] = [8]
    return options


def fit(run: Run, options: dict[str, Any]) -> Remedy | None:
    """The options with as few of `smaller_passes` as are needed to fit; None if all do not."""
    passes = smaller_passes(run)
    chosen = options | {name: values[-1] for name, values in passes.items()}
    peak = fitting_peak(run, chosen)
    if peak is None:
        return None
    for name, values in passes.items():
        without = {other: value for other, value in chosen.items() if other != name}
        for milder in (without, *(without | {name: value} for value in values[:-1])):
            milder_peak = fitting_peak(run, milder)
            if milder_peak is not None:
                chosen = milder
                peak = milder_peak
                break
    return Remedy(chosen, peak)


def fitting_peak(run: Run, options: dict[str, Any]) -> int | None:
    """Bytes at the peak of a run with other options, if it fits, they go together and the models
    can be made with what is installed."""
    memory = run.memory or 0
    try:
        run = replace(run, config=replace(run.config, **options))
        check_processes(run.config, run.processes)
        if least_bytes(run) > memory:
            return None
        phases, _ = phases_of(run)
    except (ValueError, ImportError):
        return None
    peak = max(phase.total for phase in phases)
    return peak if peak <= memory else None


# ---------------------------------------------------------------------------------- what is printed


def unit_of(plan: Plan) -> tuple[str, float]:
    """(name, bytes) of the unit in which a plan is read best."""
    return ("MB", 1e6) if plan.peak.total < GB / 10 else ("GB", GB)


def show(plan: Plan, console: Console) -> None:
    """Prints a plan as a table of parts and phases, whether it fits and what makes it fit."""
    unit, size_of_unit = unit_of(plan)
    table = Table(title=f"{unit} at the peak of each phase", title_justify="left")
    table.add_column("part")
    for phase in plan.phases:
        table.add_column(phase.name, justify="right")
    names = dict.fromkeys(name for phase in plan.phases for name in phase.parts)
    for name in names:
        sizes = [phase.parts.get(name, 0) for phase in plan.phases]
        if any(sizes):
            table.add_row(name, *(f"{size / size_of_unit:.3f}" for size in sizes))
    table.add_section()
    table.add_row("total", *(f"{phase.total / size_of_unit:.3f}" for phase in plan.phases))
    console.print(table)
    for sentence in (plan.verdict, *plan.notes):
        say(console, sentence)
    if plan.fits:
        return
    remedy = None
    for remedy in find_remedies(plan):  # which takes some seconds
        say(console, f"fits with  {remedy}")
    if remedy is None:
        say(console, "no option makes it fit: a smaller model, or devices with more memory")
    if not plan.run.config.lora_rank and importlib.util.find_spec("peft") is None:
        say(console, "not tried: --lora_rank, since peft is not installed: pip install peft")


def _text(value: Any) -> str:
    """A value as a flag takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
