"""What a run says: a table in the terminal, and a JSON file per device and date."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"

WIDTH = 150
"""Columns where the output is no terminal."""

FAINT = {"absent", "unsupported"}


def results_path(record: dict[str, Any]) -> Path:
    """results/<device>/<date>.json, with the time of day where that name is taken."""
    device = record["device"]
    name = device["name"]
    if device["type"] == "cpu":
        name += " 1 thread" if device["threads"] == 1 else f" {device['threads']} threads"
    folder = RESULTS / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    path = folder / f"{record['date'][:10]}.json"
    if path.exists():
        path = folder / f"{record['date'][:19].replace(':', '')}.json"
    return path


def write(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def console() -> Console:
    found = Console()
    return found if found.is_terminal else Console(width=WIDTH)


def print_table(record: dict[str, Any], to: Console) -> None:
    device, ceilings = record["device"], record["ceilings"]
    matmul = ", ".join(
        f"{value / 1e12:.3g} TFLOP/s {dtype}"
        for dtype, value in ceilings["matmul_flop_per_second"].items()
    )
    table = Table(
        title=f"{device['name']}, {device['threads']} CPU threads · copy "
        f"{ceilings['copy_bytes_per_second'] / 1e9:.4g} GB/s · matrix product {matmul}",
        caption="floor: compulsory bytes and FLOP at those ceilings · ± half the distance between "
        "the quartiles · extra: peak memory above the inputs' · error: worst output, in units of "
        "its largest entry",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("case")
    table.add_column("provider")
    for name in ("median", "±", "GB/s", "TFLOP/s", "of floor", "extra", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for case in record["cases"]:
        fields = [_fields(row) for row in case["rows"]]
        # One cell for the case beside all its providers.
        floor = f"floor {seconds(case['floor_seconds'])}"
        lines = [case["case"], f"{case['shape']}, {case['dtype']}", floor, *[""] * len(fields)]
        fields += [[""] * 8] * (3 - len(fields))
        for line, row in zip(lines, fields, strict=False):
            table.add_row(line, *row)
        table.add_section()
    to.print(table)
    told: dict[tuple[str, str, str], list[str]] = {}
    for case in record["cases"]:
        for row in case["rows"]:
            if row["detail"]:
                key = (row["provider"], row["status"], row["detail"])
                told.setdefault(key, []).append(case["case"])
    for (provider, status, detail), where in told.items():
        to.print(
            f"{provider} is {status} ({'; '.join(dict.fromkeys(where))}): {detail}",
            style="dim" if status in FAINT else "bold red",
            highlight=False,
            markup=False,
        )


def _fields(row: dict[str, Any]) -> list[str]:
    if row["status"] != "timed":
        error = "" if row["error"] is None else f"{row['error']:.0e}"
        return [row["provider"], row["status"], *[""] * 5, error]
    return [
        row["provider"],
        seconds(row["median_seconds"]),
        seconds(row["spread_seconds"]),
        f"{row['bytes_per_second'] / 1e9:.3g}",
        f"{row['flop_per_second'] / 1e12:.3g}",
        f"{row['percent_of_floor']:.1f} %",
        size(row["peak_extra_bytes"]),
        f"{row['error']:.0e}",
    ]


def seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1 or unit == "µs":
            return f"{value * factor:.3g} {unit}"
    raise AssertionError


def size(value: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value} B"
