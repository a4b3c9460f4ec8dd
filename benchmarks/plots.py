"""The pictures of a run: time against size, percent of the floor, peak memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import style
from benchmarks.report import exponent
from benchmarks.style import count, is_ours, look

COLUMNS = 3
PANEL_WIDTH = 4.5


def draw(record: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Writes the PNG files that the record has data for; by name, in the order of the page."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Path] = {}
    with plt.rc_context(style.MATPLOTLIB):  # type: ignore[arg-type]
        figures: tuple[tuple[str, Callable[[dict[str, Any]], Any]], ...] = (
            ("floor", _floor),
            ("memory", _memory),
            ("growth", _growth),
        )
        for name, make in figures:
            figure = make(record)
            if figure is not None:
                drawn[name] = folder / f"{name}.png"
                figure.savefig(drawn[name])
                plt.close(figure)
    return drawn


def _layout() -> Any:
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)


def _timed(case: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in case["rows"] if row["median_seconds"] is not None]


# --------------------------------------------------------------------------------- bars per case


def _floor(record: dict[str, Any]) -> Any:
    return _bars(
        record,
        value=lambda row: row["percent_of_floor"],
        label=lambda row: (
            f"{style.percent(row['percent_of_floor'])}  ·  {style.seconds(row['median_seconds'])}"
        ),
        axis="percent of the floor",
        order=lambda row: row["median_seconds"],
        limit=100,
    )


def _memory(record: dict[str, Any]) -> Any:
    return _bars(
        record,
        value=lambda row: row["peak_extra_bytes"] / 1e6,
        label=lambda row: style.size(row["peak_extra_bytes"]),
        axis="peak memory above the inputs, MB",
        order=lambda row: row["peak_extra_bytes"],
    )


def _bars(
    record: dict[str, Any],
    *,
    value: Callable[[dict[str, Any]], float],
    label: Callable[[dict[str, Any]], str],
    axis: str,
    order: Callable[[dict[str, Any]], float],
    limit: float | None = None,
) -> Any:
    """A panel of horizontal bars for each case, all panels of a row equally high."""
    import matplotlib.pyplot as plt

    cases = [case for case in record["cases"] if _timed(case)]
    if not cases:
        return None
    lines = [cases[i : i + COLUMNS] for i in range(0, len(cases), COLUMNS)]
    bars = [max(len(_timed(case)) for case in line) for line in lines]
    figure, grid = plt.subplots(
        len(lines),
        COLUMNS,
        figsize=(PANEL_WIDTH * COLUMNS, sum(0.27 * n + 1.15 for n in bars)),
        squeeze=False,
        layout=_layout(),
        gridspec_kw={"height_ratios": [0.27 * n + 1.15 for n in bars]},
    )
    for panel in grid.flat[len(cases) :]:
        panel.set_visible(False)
    for index, case in enumerate(cases):
        panel, rows = grid[index // COLUMNS][index % COLUMNS], _timed(case)
        rows = sorted(rows, key=order)  # the best on top
        values = [value(row) for row in rows]
        for place, (row, x) in enumerate(zip(rows, values, strict=True)):
            colour, ours = look(row["provider"]).colour, is_ours(row["provider"])
            if row["status"] == "bound":
                panel.barh(place, x, 0.68, color="none", edgecolor=colour, hatch="////", lw=0.8)
            else:
                panel.barh(place, x, 0.68, color=colour, alpha=1.0 if ours else 0.75)
            panel.annotate(
                label(row),
                (x, place),
                (5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                fontweight="bold" if ours else "normal",
                bbox={"facecolor": style.PAPER, "edgecolor": "none", "pad": 1},
            )
        panel.set_yticks(range(len(rows)), [row["provider"] for row in rows])
        for text, row in zip(panel.get_yticklabels(), rows, strict=True):
            text.set_fontweight("bold" if is_ours(row["provider"]) else "normal")
        # Panels of a row share their bars' thickness.
        panel.set_ylim(bars[index // COLUMNS] - 0.4, -0.6)
        _title(panel, case["case"], case["shape"])
        panel.grid(axis="y", visible=False)
        panel.tick_params(axis="y", length=0)
        room = 1.62  # for the labels after the bars
        top = max([*values, 1e-9])
        if limit is not None and top > 0.55 * limit:
            panel.axvline(limit, color=style.INK, lw=1, ls=(0, (4, 3)))
            top = max(top, limit)
        panel.set_xlim(0, top * room)
        panel.locator_params(axis="x", nbins=5)
        if index + COLUMNS >= len(cases):
            panel.set_xlabel(axis)
    return figure


def _title(panel: Any, case: str, shape: str) -> None:
    """The case in bold, and its shape below."""
    panel.set_title(case, pad=21)
    panel.annotate(
        shape,
        (0, 1),
        (0, 6),
        xycoords="axes fraction",
        textcoords="offset points",
        color=style.FAINT,
        fontsize=9,
    )


# ------------------------------------------------------------------------------ time against size


def _growth(record: dict[str, Any]) -> Any:
    """A row for each sweep: time, memory, and a key with the fitted exponents."""
    import matplotlib.pyplot as plt

    sweeps = [sweep for sweep in record.get("sweeps", []) if sweep["growth"]]
    if not sweeps:
        return None
    figure, grid = plt.subplots(
        len(sweeps),
        3,
        figsize=(PANEL_WIDTH * COLUMNS, 3.5 * len(sweeps)),
        squeeze=False,
        layout=_layout(),
        gridspec_kw={"width_ratios": [1, 1, 0.8]},
    )
    for (time, memory, key), sweep in zip(grid, sweeps, strict=True):
        first, variable = sweep["points"][0]["shape"].split(", "), sweep["variable"]
        fixed = first[-1] if variable == "V" else first[0]
        _title(time, f"{sweep['case']}: time over {variable}", fixed)
        _title(memory, f"{sweep['case']}: memory over {variable}", fixed)
        _lines(time, sweep, "median_seconds", style.seconds)
        _lines(memory, sweep, "peak_extra_bytes", style.size)
        floors = [point["floor_seconds"] for point in sweep["points"]]
        sizes = [point["size"] for point in sweep["points"]]
        time.plot(sizes, floors, color=style.INK, lw=1, ls=(0, (1, 2)))
        _key(key, sweep)
    return figure


def _line_style(provider: str) -> dict[str, Any]:
    (colour, marker), ours = look(provider), is_ours(provider)
    bound = provider == "matrix products alone"
    return {
        "color": colour,
        "marker": "" if bound else marker,
        "markersize": 6 if ours else 5,
        "lw": 2.4 if ours else 1.3,
        "ls": (0, (4, 2)) if bound else "-",
        "zorder": 4 if ours else 3,
    }


def _lines(panel: Any, sweep: dict[str, Any], field: str, unit: Callable[[float], str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    for provider in sweep["growth"]:
        points = [
            (point["size"], row[field])
            for point in sweep["points"]
            for row in point["rows"]
            if row["provider"] == provider and row[field]
        ]
        if points:
            panel.plot(*zip(*points, strict=True), **_line_style(provider))
    sizes = [point["size"] for point in sweep["points"]]
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sizes, _apart(sizes))
    panel.minorticks_off()
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    names = {"N": "N, tokens", "V": "V, vocabulary entries", "T": "T, tokens per sequence"}
    panel.set_xlabel(names[sweep["variable"]])
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: style.tick(unit(y))))


def _apart(sizes: list[int]) -> list[str]:
    """Tick labels on a logarithmic axis, empty where one would run into the one before it."""
    labels: list[str] = []
    last = -math.inf
    room = 0.09 * (math.log(sizes[-1]) - math.log(sizes[0]))
    for size in sizes:
        fits = math.log(size) - last >= room
        labels.append(count(size) if fits else "")
        last = math.log(size) if fits else last
    return labels


def _key(panel: Any, sweep: dict[str, Any]) -> None:
    """Which line is whose, and its exponents: cost ∝ size^exponent."""
    panel.set_axis_off()
    panel.set_xlim(0, 1)
    panel.set_ylim(0, 1)
    head = {"fontsize": 9, "color": style.FAINT, "va": "center"}
    panel.text(0.72, 0.97, "time", ha="right", **head)
    panel.text(0.98, 0.97, "memory", ha="right", **head)
    panel.text(0.0, 0.97, f"exponent of {sweep['variable']}", **head)
    step = min(0.105, 0.9 / (len(sweep["growth"]) + 1))
    y = 0.97
    for provider, growth in sweep["growth"].items():
        y -= step
        weight = "bold" if is_ours(provider) else "normal"
        text = {"fontsize": 9.5, "fontweight": weight, "va": "center"}
        panel.plot([0.0, 0.045, 0.09], [y] * 3, **_line_style(provider), markevery=[1])
        panel.text(0.12, y, provider, **text)
        panel.text(0.72, y, exponent(growth["time"]), ha="right", **text)
        panel.text(0.98, y, exponent(growth["memory"]), ha="right", **text)
    y -= step
    panel.plot([0.0, 0.09], [y, y], color=style.INK, lw=1, ls=(0, (1, 2)))
    panel.text(0.12, y, "floor", fontsize=9.5, va="center")
