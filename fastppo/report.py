"""The report of a run: one HTML file with its plots and samples, loading nothing else."""

from __future__ import annotations

import io
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fastppo.run_log import read_jsonl


class Panel(NamedTuple):
    """One plot: a title, the axis label with its unit, and the metrics drawn in it."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    prefixes: tuple[str, ...] = ()
    note: str = ""


PANELS = (
    Panel(
        "Reward",
        "reward",
        ("reward",),
        ("reward/", "monitor/"),
        "what is trained on, and what is watched",
    ),
    Panel("KL to the reference", "nats per sequence", ("kl",)),
    Panel("Entropy", "nats per token", ("entropy",)),
    Panel("Value loss", "½(V − R)²", ("value_loss",)),
    Panel("Explained variance", "1 is perfect", ("explained_variance",)),
    Panel("Clip fraction", "share of tokens", ("clip_fraction",)),
    Panel("Ratio", "new / old probability", ("ratio_mean", "ratio_max")),
    Panel("KL to the rollout policy", "nats per token", ("approx_kl",)),
    Panel("Response length", "tokens", ("response_length",)),
    Panel("EOS rate", "share of responses", ("eos_rate",)),
    Panel("β of the KL penalty", "per nat", ("kl_coef",)),
    Panel("Gradient norm", "before clipping", ("grad_norm",)),
    Panel("Learning rate", "", ("learning_rate",)),
    Panel("Speed", "response tokens per second", ("tokens_per_second",)),
    Panel("Time of an iteration", "seconds", (), ("seconds/",)),
)

COLOURS = ("#1f5fa8", "#c8553d", "#3a8d5d", "#8a5a9e", "#b8892b", "#4c6b7a")
SAMPLES_PER_ITERATION = 4
SAMPLED_ITERATIONS = 6


def write_report(run_dir: str | Path) -> Path:
    """Builds `report.html` from the records of a run directory.

    Raises:
        FileNotFoundError: there is no metrics.jsonl, or it is empty.
    """
    import jinja2

    run_dir = Path(run_dir)
    records = read_jsonl(run_dir / "metrics.jsonl")
    if not records:
        raise FileNotFoundError(
            f"{run_dir / 'metrics.jsonl'}: no metrics there; is it a run directory?"
        )
    samples = read_jsonl(run_dir / "samples.jsonl")
    config_file = run_dir / "config.yaml"
    config = yaml.safe_load(config_file.read_text()) if config_file.exists() else {}
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        files("fastppo").joinpath("report.html.jinja").read_text(encoding="utf-8")
    )
    html = template.render(
        name="/".join(run_dir.resolve().parts[-2:]),
        iterations=len(records),
        summary=summary(records),
        plots=[(panel, svg) for panel in PANELS if (svg := _plot(panel, records)) is not None],
        samples=_pick_samples(samples),
        config=config,
    )
    path = run_dir / "report.html"
    path.write_text(html, encoding="utf-8")
    return path


def summary(records: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(metric, mean of the first tenth, mean of the last tenth) of what people look at first."""
    shown = ["reward", *_with_prefix(records, "monitor/"), "kl", "entropy", "response_length"]
    shown += ["eos_rate", "explained_variance", "clip_fraction"]
    span = max(1, len(records) // 10)
    rows = []
    for name in shown:
        values = [record[name] for record in records if name in record]
        if values:
            rows.append((name, _mean(values[:span]), _mean(values[-span:])))
    return rows


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _with_prefix(records: list[dict[str, Any]], prefix: str) -> list[str]:
    return sorted({name for record in records for name in record if name.startswith(prefix)})


def _plot(panel: Panel, records: list[dict[str, Any]]) -> str | None:
    """The panel as inline SVG, or None if the run has none of its metrics."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    names = [name for name in panel.metrics if any(name in record for record in records)]
    for prefix in panel.prefixes:
        found = _with_prefix(records, prefix)
        # A single trained reward is the reward itself: one line is enough.
        names += found if prefix != "reward/" or len(found) > 1 else []
    if not names:
        return None
    with plt.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}):
        # Fixed margins: fitting them to the labels would draw each plot twice.
        figure = plt.figure(figsize=(4.4, 2.5))
        axes = figure.add_axes((0.16, 0.19, 0.81, 0.76))
        axes.locator_params(nbins=5)
        for name, colour in zip(names, COLOURS * len(names), strict=False):
            points = [(r["iteration"], r[name]) for r in records if name in r]
            x, y = zip(*points, strict=True)
            axes.plot(
                x, y, color=colour, linewidth=1.4, label=name, marker="" if len(x) > 1 else "o"
            )
        axes.set_xlabel("iteration")
        axes.set_ylabel(panel.unit)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        if len(names) > 1:
            axes.legend(frameon=False, fontsize=8)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg")
        plt.close(figure)
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]


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
            [s for s in samples if s["iteration"] == iterations[i]][:SAMPLES_PER_ITERATION],
        )
        for i in picked
    ]
