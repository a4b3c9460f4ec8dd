"""Figures: percent of the floor, peak memory, time against size, and the README's chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import exponent, is_ours, seconds, size

COLUMNS = 3
OURS = "#1f5fa8"
OTHERS = "#9aa5b1"


def draw(record: dict[str, Any], folder: Path) -> list[Path]:
    """Write a PNG for each kind of data in the record."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figures = {
        "floor": _bars(record, "percent_of_floor", "percent of the floor", seconds),
        "memory": _bars(record, "peak_extra_bytes", "peak memory above the inputs, bytes", size),
        "growth": _growth(record),
    }
    paths = []
    for name, figure in figures.items():
        if figure is not None:
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=160)
            plt.close(figure)
    return paths


def _bars(record: dict[str, Any], field: str, axis: str, unit: Any) -> Any:
    """Draw a panel of horizontal bars per case."""
    import matplotlib.pyplot as plt

    timed = {
        f"{case['case']}\n{case['shape']}": [
            row for row in case["rows"] if row["median_seconds"] is not None
        ]
        for case in record["cases"]
    }
    timed = {title: rows for title, rows in timed.items() if rows}
    if not timed:
        return None
    lines = -(-len(timed) // COLUMNS)
    figure, grid = plt.subplots(
        lines, COLUMNS, figsize=(14, 2.6 * lines), squeeze=False, layout="constrained"
    )
    for panel in grid.flat[len(timed) :]:
        panel.set_visible(False)
    for panel, (title, rows) in zip(grid.flat, timed.items(), strict=False):
        names = [row["provider"] for row in rows]
        values = [row[field] for row in rows]
        bars = panel.barh(
            names, values, color=[OURS if is_ours(name) else OTHERS for name in names]
        )
        shown = values if field == "peak_extra_bytes" else [row["median_seconds"] for row in rows]
        panel.bar_label(bars, [unit(value) for value in shown], padding=3, fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.25)
        panel.set_title(title, fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(axis)
    return figure


def _growth(record: dict[str, Any]) -> Any:
    """Draw time against size, a panel per sweep, with the fitted exponents in the legend."""
    import matplotlib.pyplot as plt

    sweeps = [sweep for sweep in record.get("sweeps", []) if sweep["growth"]]
    if not sweeps:
        return None
    figure, grid = plt.subplots(
        1, len(sweeps), figsize=(4.7 * len(sweeps), 4), squeeze=False, layout="constrained"
    )
    for panel, sweep in zip(grid.flat, sweeps, strict=True):
        for provider, growth in sweep["growth"].items():
            points = [
                (point["size"], row["median_seconds"])
                for point in sweep["points"]
                for row in point["rows"]
                if row["provider"] == provider and row["median_seconds"]
            ]
            sizes, times = zip(*points, strict=True)
            width = 2.5 if is_ours(provider) else 1.2
            label = f"{provider}: {exponent(growth['time'])}"
            panel.loglog(sizes, times, marker="o", lw=width, label=label)
        floors = [(point["size"], point["floor_seconds"]) for point in sweep["points"]]
        panel.loglog(*zip(*floors, strict=True), "k:", label="floor")
        panel.set_title(f"{sweep['case']}: exponent of time over {sweep['variable']}", fontsize=10)
        panel.set_xlabel(sweep["variable"])
        panel.set_ylabel("seconds")
        panel.legend(fontsize=7)
    return figure


class Bar(NamedTuple):
    """A bar of the README's chart."""

    group: str
    """What is compared: "faster" or "less memory"."""
    what: str
    against: str
    ratio: float
    label: str


COLORS = {"faster": OURS, "less memory": "#2f855a"}


def draw_chart(bars: Sequence[Bar], machine: str, path: Path) -> None:
    """Draw ratios as horizontal bars from 1 on a log axis. The SVG is readable at 400 px."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    # Text stays text, so that the reader's browser renders it with its own fonts.
    style: Any = {"font.size": 12, "svg.fonttype": "none", "svg.hashsalt": "fastppo"}
    with plt.rc_context(style):
        figure, axis = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
        places = [place + 0.7 * (bar.group != bars[0].group) for place, bar in enumerate(bars)]
        drawn = axis.barh(
            places,
            [bar.ratio - 1 for bar in bars],
            left=1,
            height=0.62,
            color=[COLORS[bar.group] for bar in bars],
        )
        axis.bar_label(
            drawn, [f"{bar.label} {bar.group}" for bar in bars], padding=4, fontweight="bold"
        )
        axis.set_yticks(places, [f"{bar.what}\nvs {bar.against}" for bar in bars])
        axis.tick_params(axis="y", length=0)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlim(1, 400)
        axis.set_xticks([1, 10, 100], ["1×", "10×", "100×"])
        axis.minorticks_off()
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.set_xlabel(machine, fontsize=11)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)
