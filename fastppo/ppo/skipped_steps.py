"""An optimiser step that is not taken, because its loss or gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fastppo.ppo.state import RunState

MOST_IN_A_ROW = 5
"""Steps that may be skipped one after the other before the run stops: by then it is no accident of
one batch."""


def skip_step(numbers: Mapping[str, float], state: RunState) -> str:
    """Counts an optimiser step that is not taken; a sentence about it.

    Args:
        numbers: loss and norms of the gradient, of which one at least is not finite.

    Raises:
        FloatingPointError: too many in a row.
    """
    state.skipped_steps += 1
    state.skipped_in_a_row += 1
    wrong = [name for name, value in numbers.items() if not math.isfinite(value)]
    values = ", ".join(f"{name} {numbers[name]}" for name in wrong)
    if state.skipped_in_a_row >= MOST_IN_A_ROW:
        raise FloatingPointError(
            f"{state.skipped_in_a_row} optimiser steps in a row had a non-finite loss or "
            f"gradient, the last one {values}; lower the learning rate, or look for inf in the "
            "rewards or logits"
        )
    return f"optimiser step {state.optimizer_step}: {values}; skipped"
