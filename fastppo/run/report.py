"""The report of a run, or a comparison of several: one HTML file with plots and samples.

The file loads nothing: the numbers, the library that draws them (uPlot, MIT licence) and the little
that tells it what to draw (page/plots.js) are in it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastppo.functional.arguments import shown
from fastppo.run.log import (
    EVAL_SAMPLES_LINE,
    METRICS_LINE,
    PARTS_LINE,
    SAMPLES_LINE,
    check_fields,
    is_number,
    read_jsonl,
    short_names,
)
from fastppo.run.options import load_yaml
from fastppo.run.panels import GROUPS, LABELS, WATCHED, Panel

LINKED = ("metrics.jsonl", "samples.jsonl", "eval_samples.jsonl", "config.yaml")
"""Files of a run that its report leads to."""

SAMPLINGS = {"sampled": "eval/", "greedy": "eval/greedy/"}
"""How held-out prompts are answered, with the prefix of the metrics of each."""
SAMPLES_PER_ITERATION = 4
SAMPLED_ITERATIONS = 6
VALUE = re.compile(r"(= |step[ -])[-+.\w]+")
"""What differs between two warnings of one kind: a metric's value, an optimiser step."""
GOLD_GROUPS = 10
"""Steps of equal length from 0 to the largest √KL, over each of which the means are joined: a
rollout's noise in both axes would hide where the curves bend."""
DASHES = 3
"""Kinds of lines, for the metrics of one run where several are compared."""
SPAN_RATIO = 4.0
"""Rewards whose spans differ by more get an axis each, or the smaller would be a flat line."""


class Chart(NamedTuple):
    """A plot as page/plots.js draws it."""

    title: str
    note: str
    unit: str
    xlabel: str
    x: list[float]
    series: list[dict[str, Any]]
    """label, values, and what is special: right, points, trend, apart, dash, colour."""
    range: list[float] | None = None
    """Of the left axis; None fits it to the curves."""


Groups = list[tuple[str, list[Chart]]]
"""(heading, its charts)."""


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


def write_report(run_dir: str | Path, path: str | Path | None = None) -> Path:
    """Builds a page from the records of a run directory: its `report.html`, or `path`.

    Raises:
        FileNotFoundError: there is no metrics.jsonl, or it is empty.
        ValueError: the run is no PPO run, or a file of it is damaged; file and line are named.
    """
    run = read_run(run_dir)
    groups, constants = _groups([run])
    page = Path(run_dir) / "report.html" if path is None else Path(path)
    files = [
        os.path.relpath(Path(run_dir) / name, page.parent)
        for name in LINKED
        if (Path(run_dir) / name).exists()
    ]
    return _write(
        page,
        groups,
        name=run.name,
        header=_header(run),
        links=files,
        summary=summary(run.records),
        warnings=_warnings(run.records),
        constants=constants,
        samples=_pick_samples(run.samples),
        held_out=_held_out(run),
        config=run.config,
    )


def write_comparison(run_dirs: Sequence[str | Path], path: str | Path) -> Path:
    """Builds a page with the curves of several runs in the same plots, and the options in which
    they differ.

    Raises:
        FileNotFoundError, ValueError: as `write_report`.
    """
    paths = [Path(run_dir).resolve() for run_dir in run_dirs]
    runs = [
        read_run(run_dir)._replace(name=name)
        for run_dir, name in zip(run_dirs, short_names(paths), strict=True)
    ]
    groups, _ = _groups(runs)
    rows = [(run.name, {name: (a, z) for name, a, z in summary(run.records)}) for run in runs]
    metrics = list(dict.fromkeys(name for _, found in rows for name in found))
    values = [
        (run, [f"{f[m][0]:.3g} → {f[m][1]:.3g}" if m in f else "–" for m in metrics])
        for run, f in rows
    ]
    names = list(dict.fromkeys(option for run in runs for option in run.config))
    differing = []
    for option in names:
        shown_values = [shown(run.config.get(option)) for run in runs]
        if len(set(shown_values)) > 1:
            differing.append((option, shown_values))
    return _write(
        Path(path),
        groups,
        name=f"{len(runs)} runs",
        header=[line for run in runs for line in (f"{run.name}: {'; '.join(_header(run))}",)],
        comparison={
            "metrics": metrics,
            "rows": values,
            "runs": [run.name for run in runs],
            "options": differing,
        },
    )


def read_run(run_dir: str | Path) -> Run:
    """A run directory's records, checked."""
    run_dir = Path(run_dir)
    records = read_jsonl(run_dir / "metrics.jsonl")
    if not records:
        raise FileNotFoundError(
            f"{run_dir / 'metrics.jsonl'}: no metrics there; is it a run directory?"
        )
    if "iteration" not in records[0]:
        raise ValueError(
            f"{run_dir} is no PPO run, and the report is of one; the curves of sft and reward are "
            f"in {run_dir / 'tensorboard'}"
        )
    check_fields(records, run_dir / "metrics.jsonl", METRICS_LINE, others=is_number)
    samples = read_jsonl(run_dir / "samples.jsonl")
    check_fields(samples, run_dir / "samples.jsonl", SAMPLES_LINE)
    held_out = read_jsonl(run_dir / "eval_samples.jsonl")
    check_fields(held_out, run_dir / "eval_samples.jsonl", EVAL_SAMPLES_LINE)
    config_file = run_dir / "config.yaml"
    config = load_yaml(config_file) if config_file.exists() else {}
    parts = read_jsonl(run_dir / "parts.jsonl")
    check_fields(parts, run_dir / "parts.jsonl", PARTS_LINE)
    return Run("/".join(run_dir.resolve().parts[-2:]), records, samples, config, held_out, parts)


def _write(path: Path, groups: Groups, **fields: Any) -> Path:
    """The page, with the charts' numbers and the library that draws them."""
    import jinja2

    page = files("fastppo.run").joinpath("page")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(page.joinpath("report.html.jinja").read_text("utf-8"))
    charts = [_as_json(chart) for _, charts in groups for chart in charts]
    html = template.render(
        groups=groups,
        # "</script>" in a name would end the block, and is in no number.
        data=json.dumps(charts, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        uplot=page.joinpath("uplot.min.js").read_text("utf-8"),
        uplot_css=page.joinpath("uplot.min.css").read_text("utf-8"),
        plots=page.joinpath("plots.js").read_text("utf-8"),
        **fields,
    )
    path.write_text(html, encoding="utf-8", errors="backslashreplace")
    return path


def _as_json(chart: Chart) -> dict[str, Any]:
    fields = {name: value for name, value in chart._asdict().items() if value is not None}
    series = [
        each | {"values": [y if y is None or math.isfinite(y) else None for y in each["values"]]}
        for each in chart.series
    ]
    return fields | {"series": series}


def _header(run: Run) -> list[str]:
    """Lines on what ran, when, for how long and on what."""
    count = len(run.records)
    lines = [f"FastPPO · {count} iteration{'' if count == 1 else 's'}"]
    if run.config.get("model"):
        lines[0] += f" · {run.config['model']}"
    laps = ((n, value) for r in run.records for n, value in r.items() if n.startswith("seconds/"))
    seconds = sum(value for _, value in laps if math.isfinite(value))
    facts = [_duration(seconds)] if seconds else []
    if run.parts:
        newest = run.parts[-1]
        facts = [run.parts[0]["started"], *facts, newest["device"]]
        lines.append(" · ".join(filter(None, facts)))
        lines.append(" · ".join(f"{name} {of}" for name, of in newest["versions"].items()))
    elif facts:
        lines.append(" · ".join(facts))
    return lines


def _duration(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{left} s"


def summary(records: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(metric, its first value, mean of the last tenth) of what people look at first."""
    shown = ["reward", *_with_prefix(records, "monitor/"), "kl", "entropy", "response_length"]
    shown += ["eos_rate", "explained_variance", "clip_fraction"]
    span = max(1, len(records) // 10)
    rows = []
    for name in shown:
        values = [record[name] for record in records if name in record]
        if values:
            # A KL of 3e-8 is the rounding of 0.
            first = values[0] if abs(values[0]) > 1e-6 else 0.0
            rows.append((name, first, _mean(values[-span:])))
    return rows


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _with_prefix(records: list[dict[str, Any]], prefix: str) -> list[str]:
    return sorted({name for record in records for name in record if name.startswith(prefix)})


class Warned(NamedTuple):
    """Warnings that differ in their numbers alone, such as those of one threshold."""

    when: str
    first: str
    last: str


def _warnings(records: list[dict[str, Any]]) -> list[Warned]:
    """What the run warned of, by the first iteration of each kind."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for record in records:
        for sentence in record.get("warnings") or ():
            kind = VALUE.sub(r"\1", sentence)
            kinds.setdefault(kind, []).append((record["iteration"], sentence))
    rows = []
    for warned in kinds.values():
        (start, first), (end, last) = warned[0], warned[-1]
        when = f"iteration {start}"
        if start != end:
            when = f"iterations {start} to {end}, {len(warned)} times"
        rows.append(Warned(when, first, last if start != end else first))
    return rows


def _groups(runs: list[Run]) -> tuple[Groups, list[tuple[str, float]]]:
    """((heading, its charts) of all panels that have data; metrics that never change)."""
    constants = _constants(runs)
    groups = []
    for heading, panels in GROUPS:
        charts = [chart for panel in panels if (chart := _panel(panel, runs, constants))]
        if heading == "Learning":  # beside the reward
            watched = [chart for chart in [_panel(WATCHED, runs, constants)] if chart]
            charts[1:1] = watched if len(runs) > 1 else _gold_against_proxy(runs[0].records)
        if charts:
            groups.append((heading, charts))
    return groups, list(constants.items())


def _constants(runs: list[Run]) -> dict[str, float]:
    """Metrics that are the same in every iteration of several, but the reward."""
    records = [record for run in runs for record in run.records]
    if len(records) < 2:
        return {}
    names = {name for record in records for name in record} - {"iteration", "warnings"}
    found = {name: {r[name] for r in records if name in r} for name in sorted(names)}
    return {
        name: values.pop()
        for name, values in found.items()
        if len(values) == 1 and name != "reward" and all(map(math.isfinite, values))
    }


def _panel(panel: Panel, runs: list[Run], constants: dict[str, float]) -> Chart | None:
    """The panel's chart, or None if no run has one of its metrics, or none that changes."""
    records = [record for run in runs for record in run.records]
    names = [name for name in panel.metrics if any(name in record for record in records)]
    for prefix in panel.prefixes:
        prefixed = _with_prefix(records, prefix)
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
            one: dict[str, Any] = {"label": label, "values": values} | _apart(values)
            if len(runs) > 1:
                one["label"] = run.name if len(names) == 1 else f"{run.name}: {label}"
                one |= {"colour": index, "dash": i % DASHES}
            series.append(one)
    return Chart(panel.title, panel.note, panel.unit, "iteration", x, series, _range(panel, series))


def _are_the_same(records: list[dict[str, Any]], name: str, other: str) -> bool:
    """Whether two metrics differ by no more than fp32 rounds off a mean."""
    both = ((record.get(name, 0.0), record.get(other, 0.0)) for record in records)
    return all(math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-6) for x, y in both)


def _apart(values: list[Any]) -> dict[str, bool]:
    """`apart` where most values have no neighbour: a line that ends at gaps shows few of them."""
    known = [False, *(value is not None for value in values), False]
    alone = sum(known[i : i + 3] == [False, True, False] for i in range(len(values)))
    return {"apart": True} if sum(known) > 1 and 2 * alone > sum(known) else {}


def _range(panel: Panel, series: list[dict[str, Any]]) -> list[float] | None:
    """Of an axis of shares: with air above, but no higher than 1."""
    if not panel.unit.startswith("share"):
        return None
    values = [y for each in series for y in each["values"] if y is not None and math.isfinite(y)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    air = 0.1 * (high - low) or 0.1
    return [max(low - air, min(low, 0.0)), min(high + air, max(high, 1.0))]


def _gold_against_proxy(records: list[dict[str, Any]]) -> list[Chart]:
    """The trained reward beside what is watched, over the iterations and over the KL.

    The second is the picture of Gao et al. 2022: against √KL a trained (proxy) reward goes on
    rising where the gold reward has turned.
    """
    monitors = _with_prefix(records, "monitor/")
    names = ["reward", *monitors]
    rows = [r for r in records if all(name in r for name in names)]
    if not monitors or not rows:
        return []
    spans = [max(r[name] for r in rows) - min(r[name] for r in rows) for name in names]
    apart = max(spans) > SPAN_RATIO * min(spans) > 0

    def series(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {"label": name, "values": [r[name] for r in rows], "colour": i}
            | ({"right": True} if apart and name != "reward" else {})
            for i, name in enumerate(names)
        ]

    title = "Gold against proxy"
    note = "the trained reward and what is only watched"
    x = [r["iteration"] for r in rows]
    charts = [Chart(title, note, "reward", "iteration", x, series(rows))]
    # A mean of sampled log-ratios may fall below 0 while the policy is near the reference.
    far = (r for r in rows if math.isfinite(r.get("kl", math.nan)))
    rows = sorted(far, key=lambda record: record["kl"])
    if rows:
        distance = [math.sqrt(max(r["kl"], 0.0)) for r in rows]
        curves, note = series(rows), "over-optimisation: where the curves part"
        if not _rises([r["kl"] for r in sorted(rows, key=lambda record: record["iteration"])]):
            # A line from left to right would go to and fro in time.
            curves = [each | {"points": True} for each in curves]
            note += "; no line, since the KL did not rise over the run"
        elif len(rows) > GOLD_GROUPS:
            points = [each | {"points": True} for each in curves]
            curves = [*points, *(each | _trend(distance, each["values"]) for each in curves)]
            note += f" (means over {GOLD_GROUPS} steps of √KL)"
        unit = "√KL to the reference, √nats"
        charts.append(Chart(f"{title}, by KL", note, "reward", unit, distance, curves))
    return charts


def _rises(values: list[float]) -> bool:
    """Whether a series goes up for the most part: the correlation with its ranks is over a half."""
    if len(values) < 3 or len({*values}) == 1:
        return True
    ranks = np.argsort(np.argsort(values))
    return bool(np.corrcoef(ranks, np.arange(len(values)))[0, 1] > 0.5)


def _trend(x: list[float], values: list[float]) -> dict[str, Any]:
    """The means over steps of equal length along a sorted x, each at the middle of its values."""
    means: list[float | None] = [None] * len(values)
    ends = np.linspace(0.0, x[-1], GOLD_GROUPS + 1)[1:-1]
    begins = [0, *np.searchsorted(x, ends).tolist(), len(x)]
    for begin, end in itertools.pairwise(begins):
        if end > begin:
            means[(begin + end) // 2] = _mean(values[begin:end])
    return {"values": means, "trend": True}


def _pick_samples(samples: list[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """A few samples of a few iterations, first and last included."""
    iterations = sorted({sample["iteration"] for sample in samples})
    if not iterations:
        return []
    last = len(iterations) - 1
    count = min(SAMPLED_ITERATIONS, len(iterations))
    picked = sorted({round(i * last / max(1, count - 1)) for i in range(count)})
    return [
        (
            iterations[i],
            [_as_chat(s) for s in samples if s["iteration"] == iterations[i]][
                :SAMPLES_PER_ITERATION
            ],
        )
        for i in picked
    ]


class HeldOut(NamedTuple):
    """What the evaluations of a run found: metrics and responses at a few of its iterations."""

    note: str
    moments: list[tuple[str, int]]
    """(first, best or last, its iteration)."""
    samplings: list[str]
    metrics: list[tuple[str, list[float | None]]]
    """(name, its values: those of each sampling at each moment)."""
    samples: list[tuple[dict[str, Any], list[tuple[str, list[dict[str, Any] | None]]]]]
    """(a record with the prompt, of each sampling its response at each moment)."""


def _held_out(run: Run) -> HeldOut | None:
    """The first, the best and the last evaluation, None of a run without any."""
    found = [record for record in run.records if "eval/reward" in record]
    if not found:
        return None
    finite = [record for record in found if math.isfinite(record["eval/reward"])]
    best = max(finite or found, key=lambda record: record["eval/reward"])
    named = (("first", found[0]), ("best", best), ("last", found[-1]))
    moments: dict[int, list[str]] = {}
    for name, record in named:
        moments.setdefault(record["iteration"], []).append(name)
    chosen = {record["iteration"]: record for _, record in named}
    samplings = [
        name
        for name, prefix in SAMPLINGS.items()
        if any(f"{prefix}response_length" in record for record in found)
    ]
    names = dict.fromkeys(
        name.removeprefix(SAMPLINGS[sampling])
        for sampling in samplings
        for record in found
        for name in record
        if name.startswith(SAMPLINGS[sampling])
        and (sampling == "greedy" or not name.startswith(SAMPLINGS["greedy"]))
    )
    metrics = [
        (
            name,
            [
                chosen[at].get(SAMPLINGS[sampling] + name)
                for sampling in samplings
                for at in moments
            ],
        )
        for name in names
    ]
    # A single reward is the reward itself.
    alone = [name for name in names if name.startswith("reward/")][:2]
    metrics = [
        (name, values)
        for name, values in metrics
        if name == "reward" or (any(values) and [name] != alone)
    ]
    count = f"{len(found)} evaluation" + ("" if len(found) == 1 else "s")
    by = "greedy " if samplings == ["greedy"] else ""
    return HeldOut(
        f"{count} on eval_prompts; the best by its {by}reward",
        [(" and ".join(at_once), at) for at, at_once in moments.items()],
        samplings,
        metrics,
        _held_out_samples(run.held_out, samplings, list(moments)),
    )


def _held_out_samples(
    samples: list[dict[str, Any]], samplings: list[str], moments: list[int]
) -> list[tuple[dict[str, Any], list[tuple[str, list[dict[str, Any] | None]]]]]:
    """Responses to the first prompts, as `HeldOut` has them."""
    by_place = {(s["row"], s["sampling"], s["iteration"]): _with_numbers(s) for s in samples}
    rows = sorted({sample["row"] for sample in samples})[:SAMPLES_PER_ITERATION]
    found = []
    for row in rows:
        responses = [
            (sampling, [by_place.get((row, sampling, at)) for at in moments])
            for sampling in samplings
        ]
        there = next((each for _, line in responses for each in line if each), None)
        if there is not None:
            found.append((_as_chat(there), responses))
    return found


def _with_numbers(sample: dict[str, Any]) -> dict[str, Any]:
    """With NaN for a reward that could not be had."""
    rewards = {name: math.nan if x is None else x for name, x in sample["rewards"].items()}
    reward = math.nan if sample["reward"] is None else sample["reward"]
    return sample | {"reward": reward, "rewards": rewards}


def _as_chat(sample: dict[str, Any]) -> dict[str, Any]:
    """With `turns`, where the prompt is a chat."""
    prompt = sample.get("prompt")
    turns = prompt if isinstance(prompt, list) else []
    if not all(isinstance(turn, dict) and {"role", "content"} <= set(turn) for turn in turns):
        turns = []
    return sample | {"turns": turns}
