"""GAE, reward shaping and whitening by the definition, for devices without kernels.

The recurrence runs token by token in Python on the CPU: slow and simple.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastppo_kernels import definition
from fastppo_kernels.records import (
    Discounts,
    Gae,
    ShapedAdvantages,
    Shaping,
    Trajectory,
    map_tensors,
)


def _moved(record: Any, device: torch.device | str) -> Any:
    """Move the record's tensors to a device."""
    return map_tensors(lambda x: x.to(device), record)


def gae(trajectory: Trajectory, discounts: Discounts) -> Gae:
    """`definition.gae`."""
    estimates = definition.gae(_moved(trajectory, "cpu"), _moved(discounts, "cpu"))
    return _moved(estimates, trajectory.token_values.device)


def shaped_advantages(
    trajectory: Trajectory, shaping: Shaping, discounts: Discounts
) -> ShapedAdvantages:
    """`definition.shaped_advantages`."""
    estimates = definition.shaped_advantages(
        _moved(trajectory, "cpu"), _moved(shaping, "cpu"), _moved(discounts, "cpu")
    )
    return _moved(estimates, trajectory.token_values.device)


def whiten(
    x: Tensor, mask: Tensor | None = None, *, shift_mean: bool = True, moments: Tensor | None = None
) -> Tensor:
    """`definition.whiten`."""
    return definition.whiten(x, mask, shift_mean=shift_mean, moments=moments)
