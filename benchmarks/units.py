"""Format times, bytes and rates as text."""

from __future__ import annotations

import math


def seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1 or unit == "µs":
            return f"{digits(value * factor)} {unit}"
    raise AssertionError


def size(value: float) -> str:
    """Format bytes in powers of ten."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= factor:
            return f"{digits(value / factor)} {unit}"
    return f"{value:.0f} B"


def digits(value: float) -> str:
    """Format three significant digits (two below 1) without an exponent."""
    if value == 0:
        return "0"
    if abs(value) < 1:
        return f"{value:.{1 - math.floor(math.log10(abs(value)))}f}"
    return f"{value:.{max(0, 3 - len(f'{abs(value):.0f}'))}f}"


def times(ratio: float) -> str:
    """Format a factor: 17.4 as "17×", 4.98 as "5×"."""
    return f"{ratio:.0f}×" if ratio >= 9.95 else f"{ratio:.1f}".removesuffix(".0") + "×"
