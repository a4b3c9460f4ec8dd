"""The charts of a report: what page/plots.js draws of the records of one run, or of several."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fastppo.run.panels import GROUPS, LABELS, WATCHED, Panel

DASHES = 3
"""Kinds of lines, for the metrics of one run where several are compared."""
SPAN_RATIO = 4.0
"""Rewards whose spans differ by more get an axis each, or the smaller would be a flat line."""


class Run(NamedTuple):
    """What a run directory holds."""

    name: str
    records: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    config: dict[str, Any]
    held_out: list[dict[str, Any]]
    """Responses to prompts of eval_prompts."""
    parts: list[dict[str, Any]]
    """Of each start of the run: when, device, versions; see `fastppo.run.log`."""


class Chart(NamedTuple):
    """A plot as page/plots.js draws it."""

    title: str
    note: str
    unit: str
    xlabel: str
    x: list[float]
    series: list[dict[str, Any]]
    """label, values, and what is special: right, points, joined, dash, colour."""
    range: list[float] | None = None
    """Of the left axis; None fits it to the curves."""


Groups = list[tuple[str, list[Chart]]]
"""(heading, its charts)."""


def make_charts(runs: list[Run]) -> tuple[Groups, list[tuple[str, float]]]:
    """((heading, its charts) of all panels that have data; metrics that never change)."""
    constants = _constants(runs)
    groups = []
    for heading, panels in GROUPS:
        charts = [chart for panel in panels if (chart := _panel(panel, runs, constants))]
        if heading == "Learning":  # beside the reward
            if len(runs) == 1:
                charts[1:1] = _gold_against_proxy(runs[0].records)
            elif watched := _panel(WATCHED, runs, constants):
                charts.insert(1, watched)
        if charts:
            groups.append((heading, charts))
    return groups, list(constants.items())


def _constants(runs: list[Run]) -> dict[str, float]:
    """Metrics that are the same in every iteration of several, but the reward."""
    records = [record for run in runs for record in run.records]
    if len(records) < 2:
        return {}
    names = {name for record in records for name in record} - {"iteration", "warnings"}
    constants = {}
    for name in sorted(names - {"reward"}):
        values = {record[name] for record in records if name in record}
        if len(values) == 1 and all(map(math.isfinite, values)):
            constants[name] = values.pop()
    return constants


def _panel(panel: Panel, runs: list[Run], constants: dict[str, float]) -> Chart | None:
    """The panel's chart, or None if no run has one of its metrics, or none that changes."""
    records = [record for run in runs for record in run.records]
    names = [name for name in panel.metrics if any(name in record for record in records)]
    for prefix in panel.prefixes:
        prefixed = with_prefix(records, prefix)
        # A single reward of weight 1 is the reward itself: one line is enough.
        single = len(prefixed) == 1 and prefix[:-1] in panel.metrics
        names += [] if single and _are_the_same(records, prefix[:-1], prefixed[0]) else prefixed
    if all(name in constants for name in names):
        return None
    x = sorted({record["iteration"] for record in records})
    series = []
    for index, run in enumerate(runs):
        by_iteration = {record["iteration"]: record for record in run.records}
        for i, name in enumerate(names):
            values = [by_iteration.get(at, {}).get(name) for at in x]
            if values.count(None) == len(values):  # a metric that only other runs have
                continue
            label = LABELS.get(name, name)
            curve: dict[str, Any] = {"label": label, "values": values}
            if name.startswith("eval/"):  # with iterations between them, at which a line would end
                curve["joined"] = True
            if len(runs) > 1:
                curve["label"] = run.name if len(names) == 1 else f"{run.name}: {label}"
                curve["colour"] = index
                curve["dash"] = i % DASHES
            series.append(curve)
    return Chart(panel.title, panel.note, panel.unit, "iteration", x, series, _range(panel, series))


def _are_the_same(records: list[dict[str, Any]], first: str, second: str) -> bool:
    """Whether two metrics differ by no more than fp32 rounds off a mean."""
    both = ((record.get(first, 0.0), record.get(second, 0.0)) for record in records)
    return all(math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-6) for x, y in both)


def _range(panel: Panel, series: list[dict[str, Any]]) -> list[float] | None:
    """Of an axis of shares: with air above, but no higher than 1."""
    if not panel.unit.startswith("share"):
        return None
    values = [y for curve in series for y in curve["values"] if is_finite(y)]
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    air = 0.1 * (high - low) or 0.1
    return [max(low - air, min(low, 0.0)), min(high + air, max(high, 1.0))]


def _gold_against_proxy(records: list[dict[str, Any]]) -> list[Chart]:
    """The trained reward beside what is watched, over the iterations and over the KL.

    The second is the picture of Gao et al. 2022: against √KL a trained (proxy) reward goes on
    rising where the gold reward has turned. It has no lines, since the KL may fall as well.
    """
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
    far = [record for record in rows if math.isfinite(record.get("kl", math.nan))]
    far.sort(key=lambda record: record["kl"])
    over_iterations = []
    over_kl = []
    for i, name in enumerate(names):
        curve = {"label": name, "colour": i, "right": right and name != "reward"}
        over_iterations.append(curve | {"values": [record[name] for record in rows]})
        over_kl.append(curve | {"values": [record[name] for record in far], "points": True})
    charts = [
        Chart(
            title="Gold against proxy",
            note="the trained reward and what is only watched",
            unit="reward",
            xlabel="iteration",
            x=[record["iteration"] for record in rows],
            series=over_iterations,
        )
    ]
    if far:
        charts.append(
            Chart(
                title="Gold against proxy, by KL",
                note="over-optimisation: where the rewards part",
                unit="reward",
                xlabel="√KL to the reference, √nats",
                # A mean of sampled log-ratios may fall below 0 while the policy is near.
                x=[math.sqrt(max(record["kl"], 0.0)) for record in far],
                series=over_kl,
            )
        )
    return charts


def with_prefix(records: list[dict[str, Any]], prefix: str) -> list[str]:
    """The names of the metrics with this prefix."""
    return sorted({name for record in records for name in record if name.startswith(prefix)})


def is_finite(value: float | None) -> bool:
    """Whether there is a value, and it can be drawn."""
    return value is not None and math.isfinite(value)
