"""Refusals of wrong input, before any work starts: the argument, what it got, what it wants."""

from __future__ import annotations

import math
import numbers
from pathlib import Path

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUMBERS = (*FLOATS, torch.int32, torch.int64)
KL_ESTIMATORS = ("k1", "k2", "k3", "full")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum")


def tensor(
    name: str,
    value: object,
    *,
    shape: torch.Size | tuple[int, ...] | None = None,
    like: Tensor | None = None,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    wants: str = "",
) -> Tensor:
    """`value` as a Tensor of the given shape, device (that of `like`) and one of `dtypes`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be {wanted}, got {str(value.dtype).removeprefix('torch.')}")
    if shape is not None and value.shape != torch.Size(shape):
        raise ValueError(
            f"{name} must have shape {list(shape)}{wants and f' ({wants})'}, "
            f"got {list(value.shape)}"
        )
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {value.device}")
    return value


def choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def number(name: str, value: object) -> float:
    """A Python or NumPy number. A tensor would have to be read, which waits for a GPU."""
    if not isinstance(value, (int, float, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    return value  # type: ignore[return-value]


def at_least(name: str, value: float, low: float, *, strictly: bool = False) -> float:
    number(name, value)
    if not (value > low if strictly else value >= low):
        raise ValueError(f"{name} must be {'>' if strictly else '>='} {low:g}, got {value!r}")
    return value


def finite(name: str, value: float) -> float:
    number(name, value)
    # Comparisons, unlike math.isfinite, are traced by torch.compile for a float that varies.
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name} must be finite, got {value!r}")
    return value


def clip_range(clip_ratio: float | tuple[float, float] | None) -> tuple[float, float]:
    """(ε_low, ε_high) of a number, a pair, or None (no clipping: both infinite)."""
    if clip_ratio is None:
        return math.inf, math.inf
    if isinstance(clip_ratio, (tuple, list)):
        if len(clip_ratio) != 2:
            raise ValueError(f"clip_ratio must be ε or (ε_low, ε_high), got {clip_ratio!r}")
        low, high = clip_ratio
    else:
        low = high = clip_ratio
    number("clip_ratio", low)
    number("clip_ratio", high)
    if not (low >= 0 and high >= 0):
        raise ValueError(f"clip_ratio must not be negative, got {clip_ratio!r}")
    return float(low), float(high)


def dual_clip(value: float | None) -> float | None:
    if value is not None and not number("dual_clip", value) > 1:
        raise ValueError(f"dual_clip must be > 1 (it bounds ratio·A from below), got {value!r}")
    return value


def absent_path(name: str) -> bool:
    """Whether a name can only be a path, and there is nothing: no hub name has two slashes, or
    begins with one, a dot or a tilde."""
    only_a_path = name.count("/") > 1 or name.startswith((".", "/", "~"))
    return only_a_path and not Path(name).exists()


def vocabulary(tokens: Tensor, vocab: int, name: str = "tokens") -> None:
    """Refuses tokens outside [0, vocab). Reads the tensor's values: call it where that is free."""
    if tokens.numel() == 0:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab:
        raise ValueError(f"{name} must be in [0, {vocab}), got values from {low} to {high}")
