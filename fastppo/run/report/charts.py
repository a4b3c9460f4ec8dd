"""The charts of a report, as data for page/plots.js."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fastppo.run.report.panels import GROUPS, LABELS, OVERVIEW, Panel

SPAN_RATIO = 4.0
"""Rewards whose ranges differ by more than this factor get separate axes."""


class Run(NamedTuple):
    """The content of a run directory."""

    name: str
    records: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    config: dict[str, Any]
    parts: list[dict[str, Any]]
    """One entry per start of the run, from parts.jsonl."""


class Chart(NamedTuple):
    """A plot for page/plots.js."""

    title: str
    note: str
    unit: str
    xlabel: str
    x: list[float]
    series: list[dict[str, Any]]
    """Curves: label, values, and optionally right (axis) or joined (over gaps)."""
    range: list[float] | None = None
    """Range of the left axis; None fits it to the curves."""


Groups = list[tuple[str, list[Chart]]]
"""Headings with their charts."""


def with_initial_evaluation(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records, with the evaluation before training as a separate record.

    It is the first record and precedes iteration 0. Its metrics begin with eval/ instead of
    before/, like those of later evaluations.
    """
    first = {name: x for name, x in records[0].items() if not name.startswith("before/")}
    initial = {
        name.replace("before/", "eval/", 1): value
        for name, value in records[0].items()
        if name.startswith("before/")
    }
    if not initial:
        return records
    return [{"iteration": first["iteration"] - 1, **initial}, first, *records[1:]]


def make_charts(records: list[dict[str, Any]]) -> tuple[Groups, list[tuple[str, float]]]:
    """Return the charts of all panels with data, and (name, value) of constant metrics.

    The first group is the overview.
    """
    records = with_initial_evaluation(records)
    constants = _constants(records)
    groups = []
    for heading, panels in GROUPS:
        folded = {} if heading == OVERVIEW else constants
        charts = [chart for panel in panels if (chart := _panel(panel, records, folded))]
        if heading == "Reward":
            charts = _gold_and_proxy(records) + charts
        if charts or heading == OVERVIEW:
            groups.append((heading, charts))
    return groups, list(constants.items())


def _constants(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics, except the reward, that keep one value over several iterations."""
    names = {name for record in records for name in record} - {"iteration", "warnings"}
    constants = {}
    for name in sorted(names - {"reward"}):
        values = [record[name] for record in records if name in record]
        if len(values) > 1 and len(set(values)) == 1 and math.isfinite(values[0]):
            constants[name] = values[0]
    return constants


def _panel(
    panel: Panel, records: list[dict[str, Any]], constants: dict[str, float]
) -> Chart | None:
    """Return the chart of a panel, or None if none of its metrics exists or changes."""
    names = [name for name in panel.metrics if any(name in record for record in records)]
    for prefix in panel.prefixes:
        prefixed = with_prefix(records, prefix)
        # A single reward with weight 1 equals the total reward.
        is_single = len(prefixed) == 1
        if not (is_single and _are_the_same(records, prefix[:-1], prefixed[0])):
            names += prefixed
    if all(name in constants for name in names):
        return None
    if number_of(records[0]) == 0 and not any(name in records[0] for name in names):
        records = records[1:]  # the evaluation before training
    x = [number_of(record) for record in records]
    series = []
    for name in names:
        curve: dict[str, Any] = {
            "label": LABELS.get(name, name),
            "values": [record.get(name) for record in records],
        }
        if name.startswith("eval/"):  # not in every iteration
            curve["joined"] = True
        series.append(curve)
    return Chart(
        title=panel.title,
        note=panel.note,
        unit=panel.unit,
        xlabel="iteration",
        x=x,
        series=series,
        range=_range(panel, series),
    )


def _are_the_same(records: list[dict[str, Any]], first: str, second: str) -> bool:
    """Return whether two metrics agree within the fp32 rounding of a mean."""
    both = ((record.get(first, 0.0), record.get(second, 0.0)) for record in records)
    return all(math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-6) for x, y in both)


def _range(panel: Panel, series: list[dict[str, Any]]) -> list[float] | None:
    """Return the range of an axis for fractions or for a flat line; None for other curves."""
    values = [y for curve in series for y in curve["values"] if is_finite(y)]
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    if not panel.unit.startswith("fraction"):
        margin = abs(low) or 1.0
        return [low - margin, low + margin] if low == high else None
    margin = 0.1 * (high - low) or 0.1
    return [max(low - margin, min(low, 0.0)), min(high + margin, max(high, 1.0))]


def _gold_and_proxy(records: list[dict[str, Any]]) -> list[Chart]:
    """Return charts of trained and monitored rewards, which diverge under over-optimization."""
    monitors = with_prefix(records, "monitor/")
    names = ["reward", *monitors]
    rows = [record for record in records if all(name in record for name in names)]
    if not monitors or not rows:
        return []
    spans = []
    for name in names:
        values = [row[name] for row in rows]
        spans.append(max(values) - min(values))
    right = max(spans) > SPAN_RATIO * min(spans) > 0
    series = [
        {
            "label": name,
            "values": [row[name] for row in rows],
            "right": right and name != "reward",
        }
        for name in names
    ]
    return [
        Chart(
            title="Proxy and gold rewards",
            note="the trained reward and the monitored ones",
            unit="reward",
            xlabel="iteration",
            x=[number_of(row) for row in rows],
            series=series,
        )
    ]


def number_of(record: dict[str, Any]) -> Any:
    """Return the iteration of a record, counted from 1 (records count from 0)."""
    return record["iteration"] + 1


def with_prefix(records: list[dict[str, Any]], prefix: str) -> list[str]:
    """Return the names of the metrics with this prefix."""
    return sorted({name for record in records for name in record if name.startswith(prefix)})


def is_finite(value: float | None) -> bool:
    """Return whether a value is present and finite."""
    return value is not None and math.isfinite(value)
