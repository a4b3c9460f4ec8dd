"""The page of a run: its pictures and every row in one HTML file that loads nothing else."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from benchmarks import plots, style
from benchmarks.report import ceilings_line
from benchmarks.style import device_title, digits, is_ours, look, seconds, size

TEMPLATE = Path(__file__).parent / "page.html.jinja"


def write_page(record: dict[str, Any], folder: Path) -> Path:
    """Draws the PNG files and writes index.html into `folder`; the path of the page."""
    import jinja2

    drawn = plots.draw(record, folder)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    html = environment.from_string(TEMPLATE.read_text("utf-8")).render(
        record=record,
        device=device_title(record["device"]),
        ceilings=ceilings_line(record),
        plots={name: _inline(path) for name, path in drawn.items()},
        cases=[_case(case) for case in _all_cases(record)],
        ink=style.INK,
        faint=style.FAINT,
        rule=style.RULE,
        ours=look(style.OURS).colour,
    )
    path = folder / "index.html"
    path.write_text(html, encoding="utf-8")
    return path


def _inline(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")


def _all_cases(record: dict[str, Any]) -> list[dict[str, Any]]:
    swept = [point for sweep in record.get("sweeps", []) for point in sweep["points"]]
    return [*record["cases"], *swept]


def _case(case: dict[str, Any]) -> dict[str, Any]:
    return {
        **case,
        "floor": seconds(case["floor_seconds"]),
        "bytes": size(case["bytes"]),
        "flop": f"{digits(case['flop'] / 1e9)} GFLOP",
        "rows": [
            {
                **row,
                "ours": is_ours(row["provider"]),
                "colour": look(row["provider"]).colour,
                "cells": _cells(row),
            }
            for row in case["rows"]
        ],
    }


def _cells(row: dict[str, Any]) -> list[str]:
    if row["median_seconds"] is None:
        return []
    return [
        seconds(row["median_seconds"]),
        seconds(row["spread_seconds"]),
        str(row["calls"]),
        digits(row["bytes_per_second"] / 1e9),
        digits(row["flop_per_second"] / 1e12),
        f"{row['percent_of_floor']:.1f} %",
        size(row["peak_extra_bytes"]),
        "" if row["error"] is None else f"{row['error']:.0e}",
    ]
