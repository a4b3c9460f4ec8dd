"""What a run says in text: a table in the terminal, and a JSON file per device."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.style import device_title, digits, is_ours, seconds, size

RESULTS = Path(__file__).parent / "results"

WIDTH = 150
"""Columns where the output is no terminal."""

WIDE = 120
"""Columns that the whole table needs; in a narrower terminal it leaves out what JSON has."""

FAINT = {"absent", "unsupported", "skipped"}


def slug(device: dict[str, Any]) -> str:
    """A device as a file name: nvidia-h200, amd-epyc."""
    return re.sub(r"[^a-z0-9]+", "-", device["name"].lower()).strip("-")


def results_path(record: dict[str, Any]) -> Path:
    """benchmarks/results/<device>.json."""
    return RESULTS / f"{slug(record['device'])}.json"


def write(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def joined(kept: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """A results file with the cases that another run of its device measured, in place of the same
    or behind the others.

    Raises:
        ValueError: the runs are of different days, packages or sets: the file says one of each.
    """
    for name in ("format", "set", "packages"):
        if kept[name] != part[name]:
            raise ValueError(
                f"its {name}: {kept[name]}, and of the new results {part[name]}: measure "
                "the whole set anew, or delete the file"
            )
    if kept["date"][:10] != part["date"][:10]:
        raise ValueError(
            f"it is of {kept['date'][:10]}, and the new results are of {part['date'][:10]}: "
            "measure the whole set anew, or delete the file"
        )
    cases = {(case["case"], case["shape"], case["dtype"]): case for case in kept["cases"]}
    for case in part["cases"]:
        key = case["case"], case["shape"], case["dtype"]
        if key not in cases or any(row["status"] == "timed" for row in case["rows"]):
            cases[key] = case
    sweeps = part["sweeps"] or kept["sweeps"]
    return kept | {"cases": [*cases.values()], "sweeps": sweeps}


def console() -> Console:
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=WIDTH)


def ceilings_line(record: dict[str, Any]) -> str:
    """The ceilings of a run, as a person reads them."""
    ceilings = record["ceilings"]
    matmul = ", ".join(
        f"{digits(value / 1e12)} TFLOP/s {dtype}"
        for dtype, value in ceilings["matmul_flop_per_second"].items()
    )
    copy = digits(ceilings["copy_bytes_per_second"] / 1e9)
    return f"copy {copy} GB/s · matrix product {matmul}"


def print_table(record: dict[str, Any], to: Console) -> None:
    columns = ["median", "±", "GB/s", "TFLOP/s", "of floor", "extra", "error"]
    shown = range(len(columns)) if to.width >= WIDE else (0, 4, 5)
    table = Table(
        title=f"{device_title(record['device'])} · {ceilings_line(record)}",
        caption="floor: compulsory bytes and FLOP at those ceilings · ± half the distance between "
        "the quartiles · extra: peak memory above the inputs' · error: worst output, in units of "
        "its largest entry",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("case")
    table.add_column("provider", no_wrap=True)
    for index in shown:
        table.add_column(columns[index], justify="right", no_wrap=True)
    for case in record["cases"]:
        rows = [row for row in case["rows"] if row["status"] not in FAINT]
        fields = [_fields(row) for row in rows]
        # One cell for the case beside all its providers.
        floor = f"floor {seconds(case['floor_seconds'])}"
        lines = [case["case"], f"{case['shape']}, {case['dtype']}", floor, *[""] * len(fields)]
        fields += [[""] * 8] * (3 - len(fields))
        for line, row in zip(lines, fields, strict=False):
            cells = [row[0], *(row[1 + index] for index in shown)]
            table.add_row(line, *cells, style="bold" if is_ours(row[0]) else "")
        table.add_section()
    to.print(table)
    for sweep in record.get("sweeps", []):
        if sweep["growth"]:
            _print_growth(sweep, to)
    for line, faint in left_out(record):
        to.print(line, style="dim" if faint else "bold red", highlight=False, markup=False)


def _print_growth(sweep: dict[str, Any], to: Console) -> None:
    variable = sweep["variable"]
    sizes = [point["size"] for point in sweep["points"]]
    table = Table(
        title=f"{sweep['case']} over {variable} = {', '.join(map(str, sizes))} "
        f"({_fixed(sweep)}): time ∝ {variable}^a, memory ∝ {variable}^b",
        title_justify="left",
    )
    table.add_column("provider", no_wrap=True)
    points = sweep["points"] if to.width >= WIDE else [sweep["points"][0], sweep["points"][-1]]
    for name in ("a", "b", *(str(point["size"]) for point in points)):
        table.add_column(name, justify="right", no_wrap=True)
    for provider, growth in sweep["growth"].items():
        times = []
        for point in points:
            row = next((r for r in point["rows"] if r["provider"] == provider), None)
            timed = row is not None and row["median_seconds"] is not None
            times.append(seconds(row["median_seconds"]) if timed else "")  # type: ignore[index]
        exponents = [exponent(growth["time"]), exponent(growth["memory"])]
        table.add_row(provider, *exponents, *times, style="bold" if is_ours(provider) else "")
    to.print(table)


def exponent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _fixed(sweep: dict[str, Any]) -> str:
    """What stays the same along a sweep."""
    shape = sweep["points"][0]["shape"]
    parts = [part for part in shape.split(", ") if not part.startswith(f"{sweep['variable']}=")]
    return ", ".join(parts[1:] if sweep["variable"] == "V" else parts)


def left_out(record: dict[str, Any]) -> list[tuple[str, bool]]:
    """(line, whether it is no fault) for each provider without a time, with its cases."""
    reported: dict[tuple[str, str, str], list[str]] = {}
    points = [
        {**point, "case": f"{sweep['case']} over {sweep['variable']}"}
        for sweep in record.get("sweeps", [])
        for point in sweep["points"]
    ]
    for case in [*record["cases"], *points]:
        for row in case["rows"]:
            if row["detail"]:
                key = (row["provider"], row["status"], row["detail"])
                reported.setdefault(key, []).append(case["case"])
    return [
        (
            f"{provider} is {status} ({'; '.join(dict.fromkeys(where))}): {detail}",
            status in FAINT,
        )
        for (provider, status, detail), where in reported.items()
    ]


def _fields(row: dict[str, Any]) -> list[str]:
    error = "" if row["error"] is None else f"{row['error']:.0e}"
    if row["median_seconds"] is None:
        return [row["provider"], row["status"], *[""] * 5, error]
    return [
        row["provider"],
        seconds(row["median_seconds"]),
        seconds(row["spread_seconds"]),
        digits(row["bytes_per_second"] / 1e9),
        digits(row["flop_per_second"] / 1e12),
        f"{row['percent_of_floor']:.1f} %",
        size(row["peak_extra_bytes"]),
        error,
    ]
