"""Units, the table in the terminal, and a JSON file per device."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"

WIDTH = 150
"""Width without a terminal."""

WIDE = 120
"""Width of the whole table. Narrower terminals get fewer columns."""

FAINT = {"absent", "unsupported", "skipped"}

# ------------------------------------------------------------------------------------------- units


def is_ours(provider: str) -> bool:
    return provider.split(",")[0] == "FastPPO"


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


def exponent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def device_title(device: dict[str, Any]) -> str:
    """Return "NVIDIA H200" or "AMD EPYC, 2 threads"."""
    if device["type"] != "cpu":
        return device["name"]
    threads = device["threads"]
    return f"{device['name']}, {threads} thread{'s' if threads > 1 else ''}"


def ceilings_line(record: dict[str, Any]) -> str:
    """Format the ceilings of a run."""
    ceilings = record["ceilings"]
    matmul = ", ".join(
        f"{digits(value / 1e12)} TFLOP/s {dtype}"
        for dtype, value in ceilings["matmul_flop_per_second"].items()
    )
    copy = digits(ceilings["copy_bytes_per_second"] / 1e9)
    return f"copy {copy} GB/s · matrix product {matmul}"


# ------------------------------------------------------------------------------------------- files


def results_path(record: dict[str, Any]) -> Path:
    """Return benchmarks/results/<device>.json, for example nvidia-h200.json."""
    name = re.sub(r"[^a-z0-9]+", "-", record["device"]["name"].lower()).strip("-")
    return RESULTS / f"{name}.json"


def write(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """Read a results file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a results file.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or "format" not in record:
        raise ValueError(f"{path} has no format")
    return record


def joined(kept: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Merge the cases of another run on the same device into its results.

    Raises:
        ValueError: the runs differ in day, packages or set.
    """
    for name in ("format", "set", "packages"):
        if kept[name] != part[name]:
            raise ValueError(
                f"its {name} is {kept[name]}, but the new results have {part[name]}: measure "
                "the whole set again, or delete the file"
            )
    if kept["date"][:10] != part["date"][:10]:
        raise ValueError(
            f"it is from {kept['date'][:10]}, but the new results are from {part['date'][:10]}: "
            "measure the whole set again, or delete the file"
        )
    cases = {(case["case"], case["shape"], case["dtype"]): case for case in kept["cases"]}
    for case in part["cases"]:
        key = case["case"], case["shape"], case["dtype"]
        if key not in cases or any(row["status"] == "timed" for row in case["rows"]):
            cases[key] = case
    sweeps = part["sweeps"] or kept["sweeps"]
    return kept | {"cases": [*cases.values()], "sweeps": sweeps}


# --------------------------------------------------------------------------------- in the terminal


def console() -> Console:
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=WIDTH)


def print_table(record: dict[str, Any], to: Console) -> None:
    wide = to.width >= WIDE
    columns = ["median", "±", "GB/s", "TFLOP/s", "of floor", "extra", "error"]
    shown = range(len(columns)) if wide else (0, 4, 5)
    table = Table(
        title=f"{device_title(record['device'])} · {ceilings_line(record)}",
        caption="floor: compulsory bytes and FLOP at these ceilings · ± half the interquartile "
        "range · extra: peak memory above the inputs · error: worst output, in units of its "
        "largest entry",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("case")
    table.add_column("provider", no_wrap=True)
    for index in shown:
        table.add_column(columns[index], justify="right", no_wrap=True)
    for case in record["cases"]:
        title = [
            case["case"],
            f"{case['shape']}, {case['dtype']}",
            f"floor {seconds(case['floor_seconds'])}",
        ]
        rows = [row for row in case["rows"] if row["status"] not in FAINT]
        if not rows:  # reported below the table
            continue
        # The case's three lines share the rows of its providers.
        for line, row in itertools.zip_longest(title, rows):
            fields = _fields(row) if row else [""] * len(columns)
            provider = row["provider"] if row else ""
            style = "bold" if is_ours(provider) else ""
            table.add_row(line or "", provider, *(fields[index] for index in shown), style=style)
        table.add_section()
    if table.row_count:
        to.print(table)
    for sweep in record.get("sweeps", []):
        if sweep["growth"]:
            _print_growth(sweep, to)
    for line, is_fault in left_out(record):
        to.print(line, style="bold red" if is_fault else "dim", highlight=False, markup=False)


def _fields(row: dict[str, Any]) -> list[str]:
    error = "" if row["error"] is None else f"{row['error']:.0e}"
    if row["median_seconds"] is None:
        return [row["status"], "", "", "", "", "", error]
    return [
        seconds(row["median_seconds"]),
        seconds(row["spread_seconds"]),
        digits(row["bytes_per_second"] / 1e9),
        digits(row["flop_per_second"] / 1e12),
        f"{row['percent_of_floor']:.1f} %",
        size(row["peak_extra_bytes"]),
        error,
    ]


def _print_growth(sweep: dict[str, Any], to: Console) -> None:
    variable = sweep["variable"]
    points = sweep["points"]
    sizes = ", ".join(str(point["size"]) for point in points)
    table = Table(
        title=f"{sweep['case']} over {variable} = {sizes}: time ∝ {variable}^a, "
        f"memory ∝ {variable}^b",
        title_justify="left",
    )
    table.add_column("provider", no_wrap=True)
    for name in ("a", "b", f"{variable} = {points[0]['size']}", f"{points[-1]['size']}"):
        table.add_column(name, justify="right", no_wrap=True)
    for provider, growth in sweep["growth"].items():
        times = []
        for point in (points[0], points[-1]):
            row = next((row for row in point["rows"] if row["provider"] == provider), None)
            median = row and row["median_seconds"]
            times.append("" if median is None else seconds(median))
        cells = [provider, exponent(growth["time"]), exponent(growth["memory"]), *times]
        table.add_row(*cells, style="bold" if is_ours(provider) else "")
    to.print(table)


def left_out(record: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return (line, whether it is a fault) for each provider without a time.

    All absent packages share one line, and so do all skipped cases.
    """
    absent: dict[str, None] = {}
    late: dict[str, list[str]] = {}
    cases_by_reason: dict[tuple[str, str, str], list[str]] = {}
    swept = [point for sweep in record.get("sweeps", []) for point in sweep["points"]]
    for case in [*record["cases"], *swept]:
        for row in case["rows"]:
            if row["status"] == "absent":
                absent[row["provider"]] = None
            elif row["status"] == "skipped":
                late.setdefault(row["detail"], []).append(case["case"])
            elif row["detail"]:
                key = (row["provider"], row["status"], row["detail"])
                cases_by_reason.setdefault(key, []).append(case["case"])
    lines = [
        (
            f"{provider} is {status} ({'; '.join(dict.fromkeys(names))}): {detail}",
            status not in FAINT,
        )
        for (provider, status, detail), names in cases_by_reason.items()
    ]
    lines += [
        (f"{'; '.join(dict.fromkeys(names))}: {detail}; raise it with --seconds", False)
        for detail, names in late.items()
    ]
    if absent:
        names = " · ".join(absent)
        lines.append((f"absent: {names} (commands to install them: benchmarks/README.md)", False))
    return lines
