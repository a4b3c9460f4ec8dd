"""The charts of a report: what page/plots.js draws of the records of a run."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fastppo.run.report.panels import GROUPS, LABELS, OVERVIEW, Panel

SPAN_RATIO = 4.0
"""Rewards whose spans differ by more get an axis each, or the smaller would be a flat line."""


class Run(NamedTuple):
    """What a run directory holds."""

    name: str
    records: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    config: dict[str, Any]
    parts: list[dict[str, Any]]
    """One entry for each start of the run: when, device, versions; see `fastppo.run.log`."""


class Chart(NamedTuple):
    """A plot as page/plots.js draws it."""

    title: str
    note: str
    unit: str
    xlabel: str
    x: list[float]
    series: list[dict[str, Any]]
    """label, values, and what is special: right, joined."""
    range: list[float] | None = None
    """The left axis; None fits it to the curves."""


Groups = list[tuple[str, list[Chart]]]
"""(heading, its charts)."""


def make_charts(records: list[dict[str, Any]]) -> tuple[Groups, list[tuple[str, float]]]:
    """((heading, its charts) of all panels that have data; metrics that never change)."""
    constants = _constants(records)
    groups = []
    for heading, panels in GROUPS:
        folded = {} if heading == OVERVIEW else constants
        charts = [chart for panel in panels if (chart := _panel(panel, records, folded))]
        if heading == "Reward":
            charts = _gold_against_proxy(records) + charts
        if charts:
            groups.append((heading, charts))
    return groups, list(constants.items())


def _constants(records: list[dict[str, Any]]) -> dict[str, float]:
    """Metrics that are the same in every iteration of several, but the reward."""
    if len(records) < 2:
        return {}
    names = {name for record in records for name in record} - {"iteration", "warnings"}
    constants = {}
    for name in sorted(names - {"reward"}):
        values = {record[name] for record in records if name in record}
        if len(values) == 1 and all(map(math.isfinite, values)):
            constants[name] = values.pop()
    return constants


def _panel(
    panel: Panel, records: list[dict[str, Any]], constants: dict[str, float]
) -> Chart | None:
    """The panel's chart, or None if the run has none of its metrics, or none that changes."""
    names = [name for name in panel.metrics if any(name in record for record in records)]
    for prefix in panel.prefixes:
        prefixed = with_prefix(records, prefix)
        # A single reward of weight 1 is the reward itself: one line is enough.
        is_single = len(prefixed) == 1
        if not (is_single and _are_the_same(records, prefix[:-1], prefixed[0])):
            names += prefixed
    if all(row.get("eval/reward") == row.get("eval/greedy/reward") for row in records):
        names = [name for name in names if name != "eval/reward"]  # greedy is the only mode
    if all(name in constants for name in names):
        return None
    x = [number_of(record) for record in records]
    series = []
    for name in names:
        curve: dict[str, Any] = {
            "label": LABELS.get(name, name),
            "values": [record.get(name) for record in records],
        }
        if name.startswith("eval/"):  # with iterations between them, at which a line would end
            curve["joined"] = True
            before = records[0].get(name.replace("eval/", "before/", 1))
            curve["values"][0] = records[0].get(name, before)
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
    """Whether two metrics differ by no more than fp32 rounds off a mean."""
    both = ((record.get(first, 0.0), record.get(second, 0.0)) for record in records)
    return all(math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-6) for x, y in both)


def _range(panel: Panel, series: list[dict[str, Any]]) -> list[float] | None:
    """The range of an axis of shares, with a margin above but not beyond 1, or of a flat line."""
    values = [y for curve in series for y in curve["values"] if is_finite(y)]
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    if not panel.unit.startswith("share"):
        room = abs(low) or 1.0
        return [low - room, low + room] if low == high else None
    air = 0.1 * (high - low) or 0.1
    return [max(low - air, min(low, 0.0)), min(high + air, max(high, 1.0))]


def _gold_against_proxy(records: list[dict[str, Any]]) -> list[Chart]:
    """The trained reward beside what is watched: where they part, the policy over-optimises."""
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
            title="Gold against proxy",
            note="the trained reward and what is only watched",
            unit="reward",
            xlabel="iteration",
            x=[number_of(row) for row in rows],
            series=series,
        )
    ]


def number_of(record: dict[str, Any]) -> Any:
    """The number of a record's iteration: a person counts from 1, records from 0."""
    return record["iteration"] + 1


def with_prefix(records: list[dict[str, Any]], prefix: str) -> list[str]:
    """The names of the metrics with this prefix."""
    return sorted({name for record in records for name in record if name.startswith(prefix)})


def is_finite(value: float | None) -> bool:
    """Whether there is a value, and it can be drawn."""
    return value is not None and math.isfinite(value)
