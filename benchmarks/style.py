"""The look of tables, plots and page: names, colours, units. Nothing else decides on any of it."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

OURS = "FastPPO"

INK, FAINT, RULE, PAPER = "#1c2733", "#6c7886", "#e3e8ee", "#ffffff"


class Look(NamedTuple):
    colour: str
    marker: str = "o"


LOOKS = {
    "FastPPO": Look("#1f5fa8"),
    "FastPPO, in place": Look("#63a0dc", "D"),
    "FastPPO, one kernel": Look("#0b2f5c", "s"),
    "FastPPO, loss from logits": Look("#63a0dc", "D"),
    "eager PyTorch": Look("#7d8794", "s"),
    "Python loop": Look("#7d8794", "s"),
    "torch.compile": Look("#c8553d", "^"),
    "TRL": Look("#b8892b", "v"),
    "verl": Look("#3a8d5d", "P"),
    "verl, whitens too": Look("#3a8d5d", "P"),
    "verl, Triton kernel": Look("#7fbf98", "X"),
    "Liger-Kernel": Look("#8a5a9e", "<"),
    "Cut Cross-Entropy": Look("#c2638f", ">"),
    "QuACK": Look("#2a9d9d", "h"),
    "transformers": Look("#99663d", "*"),
    "matrix products alone": Look("#1c2733", "_"),
}
"""One colour per provider on every picture; ours are the blues."""

MATPLOTLIB: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "savefig.dpi": 160,
}


def look(provider: str) -> Look:
    """A provider's colour and marker; one that is not listed takes its package's, or grey."""
    package = provider.split(",")[0]
    return LOOKS.get(provider) or LOOKS.get(package) or Look("#a9b2bd", ".")


def is_ours(provider: str) -> bool:
    return provider.split(",")[0] == OURS


def seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1 or unit == "µs":
            return f"{digits(value * factor)} {unit}"
    raise AssertionError


def size(value: float) -> str:
    """Bytes, in powers of ten."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= factor:
            return f"{digits(value / factor)} {unit}"
    return f"{value:.0f} B"


def digits(value: float) -> str:
    """Three significant digits (two below 1), never in powers of ten."""
    if value == 0:
        return "0"
    if abs(value) < 1:
        return f"{value:.{1 - math.floor(math.log10(abs(value)))}f}"
    return f"{value:.{max(0, 3 - len(f'{abs(value):.0f}'))}f}"


def tick(text: str) -> str:
    """“10.0 ms” as an axis has it: “10 ms”."""
    return re.sub(r"\.0+ ", " ", text)


def percent(value: float) -> str:
    return f"{value:.1f} %" if value < 9.95 else f"{value:.0f} %"


def count(value: int) -> str:
    """A size on an axis: 512, 32k, 1M."""
    for unit, factor in (("M", 1e6), ("k", 1e3)):
        if value >= 10 * factor:
            return f"{value / factor:.0f}{unit}"
    return str(value)


def device_title(device: dict[str, Any]) -> str:
    """“NVIDIA H200”, or “AMD EPYC, 2 threads”."""
    if device["type"] != "cpu":
        return device["name"]
    threads = device["threads"]
    return f"{device['name']}, {threads} thread{'s' if threads > 1 else ''}"
