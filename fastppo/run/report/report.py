"""Write the report of a run: one HTML file with plots and samples.

`fastppo.run.report.comparison` compares several runs.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from fastppo.data.chat import is_chat, text_of
from fastppo.functional.scalars import counted
from fastppo.run.log import read_jsonl
from fastppo.run.options import load_yaml
from fastppo.run.report.charts import (
    Run,
    make_charts,
    number_of,
    with_initial_evaluation,
    with_prefix,
)
from fastppo.run.report.page import write_page
from fastppo.run.report.summary import summarize, summarize_critic
from fastppo.run.watch import advice, kind_of

LINKED = ("metrics.jsonl", "samples.jsonl", "eval_samples.jsonl", "config.yaml")
"""Files of a run that the report links to."""

LEAST_KL = 1e-4
"""Smallest KL shown, in nats per sequence. A smaller sampled KL is shown as 0, because it may be
the sum of the rounding errors of the tokens' logprobs."""

SAMPLES_PER_ITERATION = 4
SAMPLED_ITERATIONS = 6


def write_report(run_dir: str | Path, path: str | Path | None = None) -> Path:
    """Write the report of a run directory and return its path.

    Args:
        path: the report's path; by default `report.html` in the run directory.

    Raises:
        FileNotFoundError: metrics.jsonl is missing or empty.
        ValueError: it is not a PPO run, or a line of a file is not a JSON object.
    """
    run = read_run(run_dir)
    groups, constants = make_charts(run.records)
    ending = ending_of(run)
    page = Path(run_dir) / "report.html" if path is None else Path(path)
    files = [
        os.path.relpath(Path(run_dir) / name, page.parent)
        for name in LINKED
        if (Path(run_dir) / name).exists()
    ]
    samples = _pick_samples(run.samples)
    return write_page(
        page,
        "report.html.jinja",
        groups,
        name=run.name,
        header=_header(run),
        ending=ending,
        shared=_take_shared(samples),
        links=[(quote(Path(file).as_posix()), file) for file in files],
        summary=summarize(run.records),
        notes={"Critic": summarize_critic(run.records)},
        changes=first_and_last(run.records),
        iterations=completed(run),
        warnings=_warnings(run.records, ending),
        constants=constants,
        samples=samples,
        config=run.config,
    )


def read_run(run_dir: str | Path) -> Run:
    """Read the records of a run directory."""
    run_dir = Path(run_dir)
    records = read_jsonl(run_dir / "metrics.jsonl")
    if not records:
        raise FileNotFoundError(
            f"{run_dir / 'metrics.jsonl'} is missing or empty; is {run_dir} a run directory?"
        )
    if not all("iteration" in record for record in records):
        raise ValueError(
            f"{run_dir} is not a PPO run, and only those have a report. The curves of SFT and "
            f"reward models are in {run_dir / 'tensorboard'}"
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


def _header(run: Run) -> list[str]:
    """Return lines with the model, start, duration, device and versions."""
    title = f"FastPPO · {counted(completed(run), 'iteration')}"
    if run.config.get("model"):
        title += f" · {run.config['model']}"
    duration = duration_of(run)
    if not run.parts:
        return [title, duration] if duration else [title]
    newest = run.parts[-1]
    facts = [run.parts[0]["started"], duration, newest["device"]]
    versions = [f"{package} {version}" for package, version in newest["versions"].items()]
    return [title, " · ".join(filter(None, facts)), " · ".join(versions)]


def ending_of(run: Run) -> str:
    """Return a sentence on why the run ended before its last iteration; "" if it did not."""
    reason = run.parts[-1].get("ended") if run.parts else None
    if not reason:
        return ""
    done = f"{completed(run)} of {run.config.get('iterations', '?')} iterations"
    return f"Ended after {done}: {reason}"


def completed(run: Run) -> int:
    """Return the number of complete iterations. One that failed in its update has no reward."""
    return sum("reward" in record for record in run.records)


def duration_of(run: Run) -> str:
    """Return the time of the run's iterations, or "" if it is unknown."""
    seconds = sum(
        value
        for record in run.records
        for name, value in record.items()
        if name.startswith("seconds/") and math.isfinite(value)
    )
    if not seconds:
        return ""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{left} s"


def first_and_last(records: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Return (metric, first value, mean of the last tenth) of the most important metrics.

    Held-out rewards come first, with their values before training and in the last evaluation.
    """
    rows = []
    evaluated = with_initial_evaluation(records)
    for name in ("eval/reward", *with_prefix(evaluated, "eval/monitor/")):
        values = [record[name] for record in evaluated if name in record]
        if len(values) > 1:
            rows.append((name, values[0], values[-1]))
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
    """Warnings that differ only in their numbers, such as those of one threshold."""

    when: str
    first: str
    last: str
    advice: str
    """Explanation and link to the documentation, as on the console."""


def _warnings(records: list[dict[str, Any]], ending: str) -> list[Warned]:
    """Return the warnings of a run by kind, in the order of their first iterations.

    Args:
        ending: why the run ended; warnings do not repeat it.
    """
    kinds: dict[str, list[tuple[int, str]]] = {}
    for record in records:
        for sentence in record.get("warnings") or ():
            if sentence.startswith("stopped: ") and sentence.removeprefix("stopped: ") in ending:
                continue
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
    """Return a few samples of a few iterations, including the first and the last."""
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


def _take_shared(samples: list[tuple[int, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Remove the turns with which all samples begin, and return them.

    They are a system message, for example with the list of tools.
    """
    rows = [row for _, rows in samples for row in rows]
    shared: list[dict[str, Any]] = []
    while len(rows) > 1 and all(row["turns"] for row in rows):
        first = rows[0]["turns"][0]
        if first["role"] != "system" or any(row["turns"][0] != first for row in rows):
            break
        shared.append(first)
        for row in rows:
            row["turns"] = row["turns"][1:]
    return shared


def _as_chat(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the sample with its `turns`, or with the `messages` of a chat prompt."""
    prompt = sample.get("prompt")
    turns = sample.get("turns", [])
    messages = prompt if isinstance(prompt, list) and not turns else []
    if not is_chat(messages):
        messages = []
    messages = [{**message, "content": text_of(message["content"])} for message in messages]
    return sample | {"messages": messages, "turns": turns}
