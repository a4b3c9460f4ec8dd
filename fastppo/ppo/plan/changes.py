"""What to change if a run does not fit: a plan of each change, and those that save the most."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import yaml

from fastppo.ppo.plan.memory import Run, phases_of
from fastppo.ppo.plan.plan import Plan, unit_of

SHOWN = 3
"""Number of changes that are shown."""

LORA_RANK = 16

LEAST_RESPONSE = 64
"""Shortest max_new_tokens that is worth halving, tokens."""


def helpful_changes(plan: Plan) -> list[str]:
    """Return a sentence for each of the changes that save the most, the best one first.

    Each change is planned on its own. One that does not lower the peak is left out.
    """
    plans = []
    for name, changed in _candidates(plan):
        try:
            phases, _ = phases_of(changed.run)
        except (ValueError, ImportError):  # it does not go together with the run's other options
            continue
        plans.append((name, replace(changed, phases=phases)))
    unit, size_of_unit = unit_of(plan)
    sentences = []
    for name, changed in sorted(plans, key=lambda pair: pair[1].peak.total)[:SHOWN]:
        saved = plan.peak.total - changed.peak.total
        if saved > 0:
            fits = ", and fits" if changed.fits else ""
            sentences.append(
                f"{name} needs {changed.peak.total / size_of_unit:.3g} {unit}, "
                f"{saved / size_of_unit:.3g} {unit} less{fits}"
            )
    return sentences


def _candidates(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield (how the change is typed, the plan with the changed run)."""
    run = plan.run
    for name, value in _options(run):
        try:
            config = replace(run.config, **{name: value})
        except ValueError:
            continue
        text = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
        typed = f"--{name} {shlex.quote(text)}"
        yield typed, replace(plan, run=replace(run, config=config))
    if run.config.shard_size is None:
        more = 2 * run.processes
        yield f"--processes {more}", replace(plan, run=replace(run, processes=more))


def _options(run: Run) -> Iterator[tuple[str, Any]]:
    """Yield changed options, each of which may save memory."""
    config = run.config
    if not config.gradient_checkpointing:
        yield "gradient_checkpointing", True
    if run.microbatch > 1 and config.microbatch_tokens is None:
        yield "microbatch_size", run.microbatch // 2
    if not config.lora_rank:
        yield "lora_rank", LORA_RANK
    if config.param_dtype == "float32":
        yield "param_dtype", "bfloat16"
    if config.lora_rank and config.quantization == "none":
        yield "quantization", "nf4"
    if config.value_model == "critic":
        yield "value_model", "shared"
    if run.generated_at_once > 1 and config.rollout in ("decoder", "generate"):
        yield "engine_options", {"batch_size": run.generated_at_once // 2}
    if config.max_new_tokens >= 2 * LEAST_RESPONSE:
        yield "max_new_tokens", config.max_new_tokens // 2
