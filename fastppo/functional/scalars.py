"""Check single values: numbers, choices, booleans.

The public functions and a run's options use these checks. The options are read before torch is
imported, so this module does not import it.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Sequence
from typing import Any

CLIPPED_SURROGATES = ("clip", "gspo")
"""Objectives with a minimum of two terms, which a dual clip can bound."""
SAPO_TAU = (1.0, 1.05)
"""The gate's temperatures in Gao et al. 2025."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = 160
_SHORT.maxother = 160
_SHORT.maxlong = 60
_SHORT.maxlevel = 3
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 4


def describe(value: Any) -> str:
    """Return a shortened repr of a user's value for a message."""
    return _SHORT.repr(value)


def counted(count: int, noun: str) -> str:
    """Format a count: `1 row`, `2 rows`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {describe(value)}")
    return value


def choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {describe(value)}")
    return value


def number(name: str, value: object) -> float:
    """Check for a number of Python or NumPy. A tensor is none, since reading it waits for a GPU."""
    if not isinstance(value, (int, float, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    return value  # type: ignore[return-value]


def at_least(name: str, value: float, low: float, *, strictly: bool = False) -> float:
    number(name, value)
    if not (value > low if strictly else value >= low):
        raise ValueError(
            f"{name} must be {'>' if strictly else '>='} {low:g}, got {describe(value)}"
        )
    return value


def finite(name: str, value: float) -> float:
    number(name, value)
    # torch.compile traces comparisons of a varying float, but not math.isfinite.
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name} must be finite, got {describe(value)}")
    return value


def check_dual_clip(dual_clip: float | None) -> float | None:
    if dual_clip is not None and not 1 < number("dual_clip", dual_clip) < math.inf:
        raise ValueError(
            "dual_clip must be > 1 and finite (it bounds ratio·A from below), got "
            f"{describe(dual_clip)}"
        )
    return dual_clip


def check_sapo_tau(tau: Sequence[float]) -> tuple[float, float]:
    """Check a pair (τ for A > 0, τ for A ≤ 0)."""
    if len(tau) != 2:
        raise ValueError(f"sapo_tau must be (τ for A > 0, τ for A ≤ 0), got {describe(tau)}")
    positive, negative = tau
    finite("sapo_tau", at_least("sapo_tau", positive, 0.0, strictly=True))
    finite("sapo_tau", at_least("sapo_tau", negative, 0.0, strictly=True))
    return float(positive), float(negative)


def clip_range(clip_ratio: float | tuple[float, float] | None) -> tuple[float, float]:
    """Return (1 − ε_low, 1 + ε_high) for a number, a pair, or None (infinite: no clipping)."""
    if clip_ratio is None:
        return -math.inf, math.inf
    if isinstance(clip_ratio, (tuple, list)):
        if len(clip_ratio) != 2:
            raise ValueError(f"clip_ratio must be ε or (ε_low, ε_high), got {describe(clip_ratio)}")
        low, high = clip_ratio
    else:
        low = clip_ratio
        high = clip_ratio
    number("clip_ratio", low)
    number("clip_ratio", high)
    if not (low >= 0 and high >= 0):
        raise ValueError(f"clip_ratio must not be negative, got {describe(clip_ratio)}")
    return 1.0 - float(low), 1.0 + float(high)
