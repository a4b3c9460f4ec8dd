"""The report of a run: one HTML file with its plots and samples, loading nothing else."""

from __future__ import annotations

import io
import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fastppo.run.log import read_jsonl


class Panel(NamedTuple):
    """One plot: a title, the axis label with its unit, and the metrics drawn in it."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    prefixes: tuple[str, ...] = ()
    note: str = ""


GROUPS = (
    (
        "Learning",
        (
            Panel("Reward", "reward", ("reward",), ("reward/",), "what is trained on"),
            Panel(
                "Held-out reward",
                "reward",
                ("eval/reward", "eval/greedy/reward"),
                ("eval/reward/",),
                "on eval_prompts",
            ),
            Panel(
                "Agreement with the gold reward",
                "correlation over responses",
                (),
                ("correlation/",),
                "of each monitored reward and the trained one",
            ),
            Panel(
                "Disagreement of the ensemble",
                "reward",
                ("ensemble_disagreement",),
                (),
                "standard deviation over its members",
            ),
            Panel("Loss", "as a step follows it", ("loss",)),
            Panel("Value loss", "½(V − R)²", ("value_loss",)),
            Panel("Explained variance", "1 is perfect", ("explained_variance",)),
            Panel("Deviation of the advantages", "before whitening", ("advantage_std",)),
            Panel("Loss on pretraining text", "nats per token", ("ptx_loss",)),
            Panel("Learning rate", "", ("learning_rate",)),
            Panel("Schedules", "coefficient", (), ("schedule/",)),
        ),
    ),
    (
        "Policy movement",
        (
            Panel("KL to the reference", "nats per sequence", ("kl",)),
            Panel("Slope of the KL", "nats per iteration", ("kl_slope",)),
            Panel("β of the KL to the reference", "per nat", ("kl_coef",)),
            Panel("KL to the rollout policy", "nats per token", ("approx_kl",)),
            Panel("β of the KL to the rollout policy", "per nat", ("policy_kl_coef",)),
            Panel("Early stops", "stopped", ("early_stopped",), (), "on the KL to the rollout"),
            Panel("Ratio", "new / old probability", ("ratio_mean", "ratio_max")),
            Panel("Clip fraction", "share of tokens", ("clip_fraction",)),
            Panel(
                "Beyond the clip range",
                "share of tokens",
                (
                    *("ratio_above_positive", "ratio_below_positive"),
                    *("ratio_above_negative", "ratio_below_negative"),
                ),
                (),
                "by the sign of the advantage A",
            ),
            Panel("Entropy", "nats per token", ("entropy",)),
        ),
    ),
    (
        "Health",
        (
            Panel("Response length", "tokens", ("response_length",)),
            Panel("EOS rate", "share of responses", ("eos_rate",)),
            Panel(
                "Reward and length",
                "correlation over responses",
                ("length_correlation",),
                (),
                "near 1, length is what pays",
            ),
            Panel(
                "Variety of the responses",
                "share",
                ("distinct_1", "distinct_2", "unique_responses"),
                (),
                "distinct n-grams within one; distinct ones of all",
            ),
            Panel("Gradient norm", "before clipping", ("grad_norm", "value_grad_norm")),
            Panel(
                "Skipped steps",
                "steps",
                ("skipped_steps",),
                (),
                "loss or gradient not finite",
            ),
            Panel("Loss spikes", "steps", ("loss_spikes",), (), "far from the losses before"),
        ),
    ),
    (
        "Speed",
        (
            Panel("Speed", "response tokens per second", ("tokens_per_second",)),
            Panel("Time of an iteration", "seconds", (), ("seconds/",)),
        ),
    ),
)
"""The panels under their headings. A panel without data is left out, and so is an empty heading."""

PANELS = tuple(panel for _, panels in GROUPS for panel in panels)

LABELS = {
    "ratio_above_positive": "A > 0, above: clipped",
    "ratio_below_positive": "A > 0, below",
    "ratio_above_negative": "A < 0, above",
    "ratio_below_negative": "A < 0, below: clipped",
}
"""Legends of metrics whose names need the context of their panel."""

COLOURS = ("#1f5fa8", "#c8553d", "#3a8d5d", "#8a5a9e", "#b8892b", "#4c6b7a")
SAMPLES_PER_ITERATION = 4
SAMPLED_ITERATIONS = 6
VALUE = re.compile(r"(= |step[ -])[-+.\w]+")
"""What differs between two warnings of one kind: a metric's value, an optimiser step."""
GOLD_POINTS = 40
"""Points of a curve against KL: a rollout's noise in both axes would hide where it bends."""
LEGEND_WIDTH = 50
"""Characters that one line of a legend holds."""
SPAN_RATIO = 4.0
"""Rewards whose spans differ by more get an axis each, or the smaller would be a flat line."""


class Figure(NamedTuple):
    """A drawn plot."""

    title: str
    note: str
    svg: str


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
    if "iteration" not in records[0]:
        raise ValueError(
            f"{run_dir} is no PPO run, and the report is of one; the curves of sft and reward are "
            f"in {run_dir / 'tensorboard'}"
        )
    samples = read_jsonl(run_dir / "samples.jsonl")
    config_file = run_dir / "config.yaml"
    config = yaml.safe_load(config_file.read_bytes()) if config_file.exists() else {}
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        files("fastppo.run").joinpath("report.html.jinja").read_text(encoding="utf-8")
    )
    html = template.render(
        name="/".join(run_dir.resolve().parts[-2:]),
        iterations=len(records),
        summary=summary(records),
        groups=_groups(records),
        warnings=_warnings(records),
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


def _groups(records: list[dict[str, Any]]) -> list[tuple[str, list[Figure]]]:
    """(heading, its plots) of all panels that have data."""
    groups = []
    for heading, panels in GROUPS:
        figures = [figure for panel in panels if (figure := _panel(panel, records)) is not None]
        if heading == "Learning":
            figures[1:1] = _gold_against_proxy(records)  # beside the reward
        if figures:
            groups.append((heading, figures))
    return groups


def _panel(panel: Panel, records: list[dict[str, Any]]) -> Figure | None:
    """The panel's plot, or None if the run has none of its metrics."""
    names = [name for name in panel.metrics if any(name in record for record in records)]
    for prefix in panel.prefixes:
        prefixed = _with_prefix(records, prefix)
        # A single trained reward is the reward itself: one line is enough.
        names += prefixed if prefix != "reward/" or len(prefixed) > 1 else []
    if not names:
        return None
    series = {
        LABELS.get(name, name): [(r["iteration"], r[name]) for r in records if name in r]
        for name in names
    }
    return Figure(panel.title, panel.note, _draw(series, "iteration", panel.unit))


def _gold_against_proxy(records: list[dict[str, Any]]) -> list[Figure]:
    """The trained reward beside what is watched, over the iterations and over the KL.

    The second is the picture of Gao et al. 2022: against √KL a trained (proxy) reward goes on
    rising where the gold reward has turned.
    """
    monitors = _with_prefix(records, "monitor/")
    names = ["reward", *monitors]
    rows = [r for r in records if all(name in r for name in names)]
    if not monitors or not rows:
        return []

    def series(x: list[float], rows: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
        return {name: [(a, r[name]) for a, r in zip(x, rows, strict=True)] for name in names}

    spans = [max(r[name] for r in rows) - min(r[name] for r in rows) for name in names]
    apart = max(spans) > SPAN_RATIO * min(spans) > 0
    right = tuple(monitors) if apart else ()
    by_iteration = series([r["iteration"] for r in rows], rows)
    figures = [
        Figure(
            "Gold against proxy",
            "the trained reward and what is only watched",
            _draw(by_iteration, "iteration", "reward", right),
        )
    ]
    rows = [r for r in rows if "kl" in r]
    if rows:
        # A mean of sampled log-ratios may fall below 0 while the policy is near the reference.
        distance = [math.sqrt(max(r["kl"], 0.0)) for r in rows]
        size = math.ceil(len(rows) / GOLD_POINTS)
        binned = {name: _binned(points, size) for name, points in series(distance, rows).items()}
        note = "over-optimisation: where the curves part"
        note += f" (means of {size} iterations)" if size > 1 else ""
        svg = _draw(binned, "√KL to the reference, √nats", "reward", right, marker=".")
        figures.append(Figure("Gold against proxy, by KL", note, svg))
    return figures


def _binned(points: list[tuple[float, float]], size: int) -> list[tuple[float, float]]:
    """Means of `size` points after one another."""
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(_mean([x for x, _ in group]), _mean([y for _, y in group])) for group in groups]


def _draw(
    series: dict[str, list[tuple[float, float]]],
    xlabel: str,
    ylabel: str,
    right: tuple[str, ...] = (),
    marker: str = "",
) -> str:
    """Lines as inline SVG; those in `right` have an axis of their own on that side."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}):
        # Fixed margins: fitting them to the labels would draw each plot twice.
        figure = plt.figure(figsize=(4.4, 2.5))
        height = 0.76 if len(series) == 1 else 0.66
        left_axes = figure.add_axes((0.16, 0.19, 0.67 if right else 0.81, height))
        right_axes = left_axes.twinx() if right else left_axes
        lines = []
        for (name, points), colour in zip(series.items(), COLOURS * len(series), strict=False):
            axes = right_axes if name in right else left_axes
            plain = name.replace("$", r"\$")  # between two of them matplotlib reads a formula
            label = f"{plain} (right)" if name in right else plain
            shown = marker or ("o" if len(points) == 1 else "")
            lines += axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.4)
            lines[-1].set(label=label, marker=shown)
        left_axes.locator_params(nbins=5)
        left_axes.set_xlabel(xlabel)
        left_axes.set_ylabel(ylabel)
        left_axes.spines[["top", "right"]].set_visible(False)
        left_axes.grid(alpha=0.25, linewidth=0.6)
        if right:
            right_axes.locator_params(axis="y", nbins=5)
            right_axes.spines[["top", "left"]].set_visible(False)
        if len(series) > 1:
            # Above the plot: inside it would hide a curve's end in one run or another.
            rows = 2 if sum(len(str(line.get_label())) for line in lines) > LEGEND_WIDTH else 1
            figure.legend(
                handles=lines,
                loc="upper left",
                bbox_to_anchor=(0.14, 1.02),
                ncols=math.ceil(len(lines) / rows),
                frameon=False,
                fontsize=7.5,
                handlelength=1.2,
                columnspacing=1.0,
            )
        if all(y == 0 for points in series.values() for _, y in points):
            left_axes.set_ylim(0, 1)  # a count of nothing, not a close-up of it
        elif ylabel.startswith("share"):
            left_axes.set_ylim(top=min(left_axes.get_ylim()[1], 1.01))  # no share is above 1
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
