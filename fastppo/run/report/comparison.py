"""Compare runs: one HTML file with their curves over each other and the options that differ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastppo.run.log import short_names
from fastppo.run.report.charts import (
    Chart,
    Groups,
    Run,
    number_of,
    with_initial_evaluation,
    with_prefix,
)
from fastppo.run.report.page import write_page
from fastppo.run.report.panels import GROUPS, LABELS, OVERVIEW, Panel
from fastppo.run.report.report import (
    completed,
    duration_of,
    ending_of,
    first_and_last,
    read_run,
)
from fastppo.run.report.summary import summarize

FILE = "comparison.html"

MONITORED = Panel("Monitored rewards", "unweighted", (), ("monitor/",))
"""The report of a run draws these over the trained reward instead."""

LOCAL = ("output_dir", "resume")
"""Options that differ between any two runs."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What the page says about a run."""

    name: str
    report: str
    """Address of the run's own report, or "" if there is none."""
    summary: str
    iterations: str
    duration: str
    ending: str


def write_comparison(run_dirs: Sequence[str | Path], path: str | Path | None = None) -> Path:
    """Write the comparison of run directories and return its path.

    Args:
        path: the page's path; by default `comparison.html` in the deepest folder that holds all
            runs.

    Raises:
        FileNotFoundError: metrics.jsonl of a run is missing or empty.
        ValueError: it is not a PPO run, or a line of a file is not a JSON object.
    """
    runs = [read_run(run_dir) for run_dir in run_dirs]
    names = short_names([Path(run_dir).resolve() for run_dir in run_dirs])
    page = Path(os.path.commonpath([Path(each).resolve().parent for each in run_dirs])) / FILE
    page = page if path is None else Path(path)
    compared = []
    for run, run_dir, name in zip(runs, run_dirs, names, strict=True):
        report = Path(run_dir) / "report.html"
        compared.append(
            Compared(
                name=name,
                report=_address(report, page.parent) if report.exists() else "",
                summary=summarize(run.records),
                iterations=_progress(run),
                duration=duration_of(run),
                ending=ending_of(run),
            )
        )
    return write_page(
        page,
        "comparison.html.jinja",
        compare_charts(runs, names),
        name=f"Comparison of {len(runs)} runs",
        runs=compared,
        differences=differences([run.config for run in runs]),
        ends=ends(runs),
    )


def _progress(run: Run) -> str:
    """Return the number of complete iterations, of those of the config if they are more."""
    done, wanted = completed(run), run.config.get("iterations")
    return f"{done} of {wanted}" if isinstance(wanted, int) and wanted > done else str(done)


def differences(configs: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return (option, its value in each config) of the options that differ."""
    names = dict.fromkeys(name for config in configs for name in config)
    rows = [(name, [_text(config.get(name)) for config in configs]) for name in names]
    return [(name, values) for name, values in rows if name not in LOCAL and len(set(values)) > 1]


def _text(value: Any) -> str:
    """Return the value of an option as it is typed."""
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "–"
    return "–" if value in (None, "") else str(value)


def ends(runs: Sequence[Run]) -> list[tuple[str, list[float | None]]]:
    """Return (metric, its value at the end of each run) of the most important metrics."""
    by_run = [{name: last for name, _, last in first_and_last(run.records)} for run in runs]
    names = dict.fromkeys(name for values in by_run for name in values)
    return [(name, [values.get(name) for values in by_run]) for name in names]


def compare_charts(runs: Sequence[Run], names: Sequence[str]) -> Groups:
    """Return a chart per metric, with a curve per run."""
    records = [with_initial_evaluation(run.records) for run in runs]
    groups = []
    for heading, panels in GROUPS:
        charts = []
        for panel in (*panels, MONITORED) if heading == OVERVIEW else panels:
            for metric in _metrics(panel, records):
                chart = _chart(panel, metric, records, names)
                if heading == OVERVIEW or not _is_constant(chart):
                    charts.append(chart)
        if charts or heading == OVERVIEW:
            groups.append((heading, charts))
    return groups


def _metrics(panel: Panel, records: Sequence[list[dict[str, Any]]]) -> list[str]:
    """Return the metrics of a panel that at least one run has."""
    every = [record for of_run in records for record in of_run]
    names = [name for name in panel.metrics if any(name in record for record in every)]
    for prefix in panel.prefixes:
        names += with_prefix(every, prefix)
    return names


def _chart(
    panel: Panel, metric: str, records: Sequence[list[dict[str, Any]]], names: Sequence[str]
) -> Chart:
    is_part = (len(panel.metrics) > 1 or bool(panel.prefixes)) and panel.title.lower() != metric
    by_iteration = [
        {number_of(record): record[metric] for record in of_run if metric in record}
        for of_run in records
    ]
    x = sorted(set().union(*by_iteration))
    return Chart(
        title=LABELS.get(metric, metric) if is_part else panel.title,
        note=panel.title if is_part else panel.note,
        unit=panel.unit,
        xlabel="iteration",
        x=x,
        series=[
            {"label": name, "values": [values.get(i) for i in x]}
            | ({"joined": True} if metric.startswith("eval/") else {})
            for name, values in zip(names, by_iteration, strict=True)
        ],
    )


def _is_constant(chart: Chart) -> bool:
    """Return whether all runs have one value in all iterations."""
    return len({y for curve in chart.series for y in curve["values"] if y is not None}) < 2


def _address(file: Path, folder: Path) -> str:
    return quote(Path(os.path.relpath(file, folder)).as_posix())
