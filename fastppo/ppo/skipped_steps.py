"""An optimiser step that is not taken, because its loss or gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from fastppo.data.world import World
from fastppo.models.policy import ActorCritic
from fastppo.ppo.experience import Experience
from fastppo.ppo.state import RunState
from fastppo.run.skipped import non_finite_gradients, save_batch

MOST_IN_A_ROW = 5
"""Steps that may be skipped one after the other before the run stops: by then it is no accident of
one batch."""


def skip_step(
    minibatch: Experience,
    numbers: Mapping[str, float],
    state: RunState,
    *,
    model: ActorCritic,
    output_dir: str,
    world: World,
) -> str:
    """Counts an optimiser step that is not taken and saves its batch; a sentence about it.

    Args:
        numbers: loss and norms of the gradient, of which one at least is not finite.
        model: still has the gradient.

    Raises:
        FloatingPointError: too many in a row.
    """
    state.skipped_steps += 1
    state.skipped_in_a_row += 1
    wrong = [name for name, value in numbers.items() if not math.isfinite(value)]
    values = ", ".join(f"{name} {numbers[name]}" for name in wrong)
    path = Path(output_dir) / "skipped" / f"step-{state.optimizer_step:06d}.safetensors"
    by_rank = world.gather(non_finite_gradients(model))
    parameters = list(dict.fromkeys(name for names in by_rank for name in names))
    world.first(
        lambda: save_batch(
            path,
            minibatch.tensors(),
            iteration=state.iteration,
            step=state.optimizer_step,
            non_finite="loss" if "loss" in wrong else "grad_norm",
            parameters=parameters,
        )
    )
    if state.skipped_in_a_row >= MOST_IN_A_ROW:
        raise FloatingPointError(
            f"{state.skipped_in_a_row} optimiser steps in a row had a non-finite loss or "
            f"gradient, the last one {values} with the batch in {path}; lower the learning rate, "
            f"or look for inf in the rewards or logits"
        )
    return f"optimiser step {state.optimizer_step}: {values}; skipped, batch in {path}"
