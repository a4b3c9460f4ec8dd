"""`fastppo plan`: estimate whether a run fits into the memory of its devices.

`fastppo.ppo.plan.memory` counts the bytes of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from fastppo.data.world import shards_of
from fastppo.functional import scalars
from fastppo.models.device import choose_device
from fastppo.models.pretrained import causal_lm_config
from fastppo.ppo.options.config import PPOConfig, check_processes
from fastppo.ppo.plan.memory import Phase, Run, phases_of
from fastppo.ppo.setup.preflight import context_of
from fastppo.run.progress import say

GB = 1e9


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory of each process of a run."""

    run: Run
    phases: list[Phase]
    """Phases in the order in which a run goes through them."""
    notes: list[str]
    """Sentences on assumptions, and on what is not counted."""

    @property
    def peak(self) -> Phase:
        """Phase that needs the most memory."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """Whether the peak fits into the memory; True if no memory was given."""
        return self.run.memory is None or self.peak.total <= self.run.memory

    @property
    def summary(self) -> str:
        """Sentence on whether the run fits, and on its largest part."""
        unit, size_of_unit = unit_of(self)
        need = f"{self.peak.total / size_of_unit:.3g} {unit} at its peak, the {self.peak.name}"
        part, size = max(self.peak.parts.items(), key=lambda item: item[1])
        largest = f"; the largest part, {part}, is {size / size_of_unit:.3g} {unit}"
        if self.run.memory is None:
            return f"needs {need}{largest}; `fastppo plan --memory GB` says whether that fits"
        fits = "fits" if self.fits else "does not fit"
        return f"{fits} {self.run.memory / GB:g} GB: {need}{largest}"


def make_plan(
    config: PPOConfig, prompt_tokens: int, *, memory: float | None = None, processes: int = 1
) -> Plan:
    """Estimate the memory of a run.

    Args:
        config: the run's options. device=auto is a GPU if there is one or if `memory` is given;
            with device=cuda the machine need not have a GPU.
        prompt_tokens: length of every prompt.
        memory: memory of each device in GB; by default the free memory of the GPU.
        processes: number of processes of torchrun, one per device.

    Raises:
        ValueError: a model's config cannot be read; sequences are longer than the model's context;
            an option does not work with so many processes.
    """
    scalars.at_least("prompt_tokens", prompt_tokens, 1)
    scalars.at_least("processes", processes, 1)
    if memory is not None:
        scalars.at_least("memory", memory, 0, strictly=True)
    if processes == 1 and config.shard_size not in (None, 1):
        raise ValueError(
            f"shard_size={config.shard_size} shards the weights over several processes: give their "
            "number, --processes"
        )
    shards_of(processes, config.shard_size)
    check_processes(config, processes)
    free = None if memory is None else memory * GB
    wanted = "cuda" if config.device == "auto" and memory is not None else config.device
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        device = torch.device("cuda")
    else:
        device = choose_device(wanted)
        if device.type == "cuda" and memory is None:
            free = float(torch.cuda.mem_get_info(device)[0])
    context = context_of(causal_lm_config(config.model))
    if context is not None and prompt_tokens + config.max_new_tokens > context:
        raise ValueError(
            f"prompts of {prompt_tokens} tokens and responses of {config.max_new_tokens} are "
            f"longer than the context of {context} tokens: give a smaller --prompt_tokens or "
            "--max_new_tokens"
        )
    run = Run(config, device, prompt_tokens, context=context, processes=processes, memory=free)
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
        notes.append("not counted: vLLM's share of the memory, which is unknown")
    return Plan(run, phases, notes)


def unit_of(plan: Plan) -> tuple[str, float]:
    """Return (name, bytes) of the unit in which a plan is shown."""
    return ("MB", 1e6) if plan.peak.total < GB / 10 else ("GB", GB)


def show(plan: Plan, console: Console, changes: Sequence[str] = ()) -> None:
    """Print a table of parts and phases, whether the run fits, and what would help.

    Args:
        changes: from `fastppo.ppo.plan.changes`, if it does not fit.
    """
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
    say(console, plan.summary)
    for sentence in changes:
        say(console, f"  {sentence}")
    for sentence in plan.notes:
        say(console, sentence)
