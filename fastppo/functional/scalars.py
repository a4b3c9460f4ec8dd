"""The checks of single values: numbers, choices, truth values.

They are those of the public functions (`arguments`) and of a run's options, which are read before
torch is imported.
"""

from __future__ import annotations

import math
import numbers
import reprlib
import sys
from collections.abc import Sequence
from typing import Any

CLIPPED_SURROGATES = ("clip", "gspo")
"""Objectives that are the smaller of two terms, which a dual clip may bound."""
SAPO_TAU = (1.0, 1.05)
"""The gate's temperatures in the paper, Gao et al. 2025."""


class _Short(reprlib.Repr):
    """A repr of limited length: a user's value may be of any size and nested to any depth."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = 160
        self.maxother = 160
        self.maxlevel = 3
        self.maxlong = 60
        self.maxlist = 4
        self.maxtuple = 4
        self.maxdict = 4

    def repr1(self, x: Any, level: int) -> str:
        try:
            return super().repr1(x, level)
        except BaseException:  # of a user's class, which may exit
            return object.__repr__(x)

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write a number of more than 4300 digits.
        return f"an integer of {x.bit_length()} bits" if x.bit_length() > 400 else repr(x)


def describe(value: Any) -> str:
    """A user's value for a sentence: its repr, shortened."""
    return _Short().repr(value)


def counted(count: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
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
    """A Python or NumPy number. A tensor would have to be read, which waits for a GPU."""
    if not isinstance(value, (int, float, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"{name} must be a number within ±1.8e308, got {describe(value)}")
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
    # Comparisons, unlike math.isfinite, are traced by torch.compile for a float that varies.
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
    """(τ where A > 0, τ elsewhere) of a pair."""
    if len(tau) != 2:
        raise ValueError(f"sapo_tau must be (τ of A > 0, τ of the others), got {describe(tau)}")
    positive, negative = tau
    finite("sapo_tau", at_least("sapo_tau", positive, 0.0, strictly=True))
    finite("sapo_tau", at_least("sapo_tau", negative, 0.0, strictly=True))
    return float(positive), float(negative)
