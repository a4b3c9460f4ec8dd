"""The number of each prompt by which a curriculum sorts or draws, that of a column or of a
function. Torch is not imported, so that `fastppo check` tells at once what is no number."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fastppo.functional.scalars import describe
from fastppo.rewards.reward import plain_values


def column_numbers(
    option_name: str, spec: str, columns: Mapping[str, Sequence[Any]]
) -> list[float]:
    """The numbers of a column of the prompts.

    Raises:
        ValueError: there is no such column, or it has no number for each prompt.
    """
    if spec not in columns:
        names = ", ".join(columns) or "none"
        raise ValueError(f"{option_name}={spec}: no such column of the prompts; there are {names}")
    return checked_numbers(option_name, spec, columns[spec], len(columns[spec]))


def checked_numbers(option_name: str, spec: str, values: Any, count: int) -> list[float]:
    """`count` finite numbers, of which weights are at least 0 and not all 0; raises ValueError for
    others."""
    numbers = plain_values(values)
    if not isinstance(numbers, (list, tuple)) or len(numbers) != count:
        raise ValueError(
            f"{option_name}={spec}: expected a number for each of {count} prompts, got "
            f"{describe(values)}"
        )
    is_weight = option_name == "prompt_weights"
    for row, number in enumerate(numbers, 1):
        is_number = isinstance(number, (int, float)) and abs(number) <= sys.float_info.max
        if not is_number or (is_weight and number < 0):
            wanted = "a finite number >= 0" if is_weight else "a finite number"
            raise ValueError(
                f"{option_name}={spec}, prompt {row}: expected {wanted}, got {describe(number)}"
            )
    if is_weight and count and not any(numbers):
        raise ValueError(f"prompt_weights={spec}: every weight is 0")
    return [float(number) for number in numbers]
