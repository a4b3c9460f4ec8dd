"""The report of a run: one HTML file with plots and samples.

The file is self-contained: it has the numbers, the plotting library (uPlot, MIT licence) and the
script that calls it (page/plots.js).
"""

from __future__ import annotations

import json
import math
import os
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from fastppo.data.files import write_whole
from fastppo.functional.scalars import counted
from fastppo.run.log import read_jsonl
from fastppo.run.options import load_yaml
from fastppo.run.report.charts import (
    Chart,
    Groups,
    Run,
    is_finite,
    make_charts,
    number_of,
    with_prefix,
)
from fastppo.run.report.summary import critic_summary, summarize
from fastppo.run.watch import advice, kind_of

LINKED = ("metrics.jsonl", "samples.jsonl", "eval_samples.jsonl", "config.yaml")
"""Files of a run that its report links to."""

STOPPED = "stopped: "
"""Begins a run's warning that says why it ended."""

LEAST_KL = 1e-6
"""Nats. A sampled KL below it is the rounding of 0."""

SAMPLES_PER_ITERATION = 4
SAMPLED_ITERATIONS = 6


def write_report(run_dir: str | Path, path: str | Path | None = None) -> Path:
    """Builds a page from the records of a run directory: its `report.html`, or `path`.

    Raises:
        FileNotFoundError: there is no metrics.jsonl, or it is empty.
        ValueError: it is not a PPO run, or a line of a file is no JSON object; both are named.
    """
    run = read_run(run_dir)
    groups, constants = make_charts(run.records)
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
        header=_header(run) + _ending(run),
        # A path is no address: `javascript:` or `#` in it would be taken for the address's parts.
        links=[(quote(Path(file).as_posix()), file) for file in files],
        verdict=summarize(run.records),
        notes={"Critic": critic_summary(run.records)},
        summary=summary(run.records),
        warnings=_warnings(run.records),
        constants=constants,
        samples=_pick_samples(run.samples),
        config=run.config,
    )


def read_run(run_dir: str | Path) -> Run:
    """A run directory's records."""
    run_dir = Path(run_dir)
    records = read_jsonl(run_dir / "metrics.jsonl")
    if not records:
        raise FileNotFoundError(
            f"{run_dir / 'metrics.jsonl'}: no metrics there; is it a run directory?"
        )
    if not all("iteration" in record for record in records):
        raise ValueError(
            f"{run_dir} is not a PPO run, and only those have a report; the curves of sft and "
            f"reward are in {run_dir / 'tensorboard'}"
        )
    for record in records:
        if abs(record.get("kl", math.inf)) < LEAST_KL:
            record["kl"] = 0.0
    config_file = run_dir / "config.yaml"
    return Run(
        name="/".join(run_dir.resolve().parts[-2:]),
        records=records,
        samples=read_jsonl(run_dir / "samples.jsonl"),
        config=load_yaml(config_file) if config_file.exists() else {},
        parts=read_jsonl(run_dir / "parts.jsonl"),
    )


def _write(path: Path, groups: Groups, **fields: Any) -> Path:
    """The page, with the charts' numbers and the library that draws them."""
    import jinja2

    page = files("fastppo.run.report").joinpath("page")
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
    write_whole(path, html)
    return path


def _as_json(chart: Chart) -> dict[str, Any]:
    """The chart without what is not set, NaN and infinities as gaps: JSON has neither."""
    fields = {name: value for name, value in chart._asdict().items() if value is not None}
    fields["series"] = [
        curve | {"values": [y if is_finite(y) else None for y in curve["values"]]}
        for curve in chart.series
    ]
    return fields


def _header(run: Run) -> list[str]:
    """Lines on what ran, when, for how long and on what."""
    title = f"FastPPO · {counted(len(run.records), 'iteration')}"
    if run.config.get("model"):
        title += f" · {run.config['model']}"
    seconds = sum(
        value
        for record in run.records
        for name, value in record.items()
        if name.startswith("seconds/") and math.isfinite(value)
    )
    duration = _duration(seconds) if seconds else ""
    if not run.parts:
        return [title, duration] if duration else [title]
    newest = run.parts[-1]
    facts = [run.parts[0]["started"], duration, newest["device"]]
    versions = [f"{package} {version}" for package, version in newest["versions"].items()]
    return [title, " · ".join(filter(None, facts)), " · ".join(versions)]


def _ending(run: Run) -> list[str]:
    """A line on why the run ended before its last iteration: its newest part or its last record has
    it."""
    warnings = run.records[-1].get("warnings") or ()
    reasons = [warning.removeprefix(STOPPED) for warning in warnings if warning.startswith(STOPPED)]
    if run.parts and run.parts[-1].get("ended"):
        reasons = [str(run.parts[-1]["ended"])]
    if not reasons:
        return []
    done = f"{len(run.records)} of {run.config.get('iterations', '?')} iterations"
    return [f"Ended after {done}: {'; '.join(reasons)}"]


def _duration(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{left} s"


def summary(records: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(metric, its first value, mean of the last tenth) of what people look at first. What is held
    out comes first: before the first update, and in the last evaluation."""
    rows = []
    for name in ("eval/reward", "eval/greedy/reward"):
        evaluated = [record[name] for record in records if name in record]
        if evaluated:
            before = records[0].get(name.replace("eval/", "before/"), evaluated[0])
            rows.append((name, before, evaluated[-1]))
    names = [
        "reward",
        *with_prefix(records, "monitor/"),
        "kl",
        "entropy",
        "response_length",
        "eos_rate",
        "explained_variance",
        "clip_fraction",
    ]
    tenth = max(1, len(records) // 10)
    for name in names:
        values = [record[name] for record in records if name in record]
        if values:
            last = values[-tenth:]
            rows.append((name, values[0], sum(last) / len(last)))
    return rows


class Warned(NamedTuple):
    """Warnings that differ in their numbers alone, such as those of one threshold."""

    when: str
    first: str
    last: str
    advice: str
    """What the first means and where a page helps, as the console says it."""


def _warnings(records: list[dict[str, Any]]) -> list[Warned]:
    """What the run warned of, by the first iteration of each kind."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for record in records:
        for sentence in record.get("warnings") or ():
            kinds.setdefault(kind_of(sentence), []).append((number_of(record), sentence))
    rows = []
    for warned in kinds.values():
        start, first = warned[0]
        end, last = warned[-1]
        when = f"iteration {start}"
        if start != end:
            when = f"iterations {start} to {end}, {len(warned)} times"
        rows.append(Warned(when, first, last if start != end else first, advice(first)))
    return rows


def _pick_samples(samples: list[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """A few samples of a few iterations, first and last included."""
    iterations = sorted(set(map(number_of, samples)))
    count = min(SAMPLED_ITERATIONS, len(iterations))
    last = len(iterations) - 1
    places = sorted({round(i * last / max(1, count - 1)) for i in range(count)})
    picked = []
    for place in places:
        of_iteration = [s for s in samples if number_of(s) == iterations[place]]
        picked.append(
            (iterations[place], list(map(_as_chat, of_iteration))[:SAMPLES_PER_ITERATION])
        )
    return picked


def _as_chat(sample: dict[str, Any]) -> dict[str, Any]:
    """With `turns`, which hold what the policy read first too, or with the `messages` of a prompt
    that is a chat."""
    prompt = sample.get("prompt")
    turns = sample.get("turns", [])
    messages = prompt if isinstance(prompt, list) and not turns else []
    if not all(isinstance(turn, dict) and {"role", "content"} <= set(turn) for turn in messages):
        messages = []
    return sample | {"messages": messages, "turns": turns}
