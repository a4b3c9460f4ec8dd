"""The report: one file, every plot that has data, warnings in short, samples escaped."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from fastppo_kernels.records import SUMS

from fastppo.functional.losses import loss_metrics
from fastppo.run.log import read_jsonl
from fastppo.run.report import GOLD_POINTS, GROUPS, LABELS, PANELS, summary, write_report

METRICS = {
    **{name: 0.5 for panel in PANELS for name in panel.metrics},
    "reward/brief": 1.0,
    "reward/kind": 0.2,
    "monitor/gold": 0.3,
    "correlation/gold": 0.9,
    "schedule/entropy_coef": 0.01,
    "kl": 4.0,
    "seconds/generate": 0.1,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [{"iteration": i, **METRICS, "reward": i / 10} for i in range(20)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    sample = {
        "iteration": 0,
        "prompt": "a <b> prompt",
        "completion": "<script>alert(1)</script>",
        "reward": 1.0,
        "rewards": {"brief": 1.0},
        "monitors": {"gold": 0.25},
        "kl": None,
        "tokens": 3,
        "finish_reason": "length",
    }
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (tmp_path / "config.yaml").write_text("model: my/model\nseed: 3\n")
    return tmp_path


def test_the_report_draws_every_panel_and_loads_nothing(run: Path) -> None:
    html = write_report(run).read_text()
    assert html.count("<svg") == len(PANELS) + 2  # and gold against proxy, twice
    for panel in PANELS:
        assert panel.title in html
    for name in ("monitor/gold", "reward/kind", "my/model", "seed: 3"):
        assert name in html
    for loads in ("<script", "<link", "src="):
        assert loads not in html


def test_text_of_the_model_is_escaped(run: Path) -> None:
    html = write_report(run).read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_panels_without_data_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0, "reward": 1.0}\n')
    html = write_report(tmp_path).read_text()
    assert html.count("<svg") == 1
    for absent in ("Explained variance", "Gold against proxy", "Warnings", "Speed", "Health"):
        assert absent not in html


def test_the_summary_compares_the_first_with_the_last_tenth(run: Path) -> None:
    rows = {name: (first, last) for name, first, last in summary(read_jsonl(run / "metrics.jsonl"))}
    assert rows["reward"] == pytest.approx((0.05, 1.85))
    assert "monitor/gold" in rows


def test_a_line_cut_off_while_being_written_is_left_out(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 20, "rew')
    assert len(read_jsonl(run / "metrics.jsonl")) == 20
    write_report(run)


def _write(directory: Path, records: list[dict]) -> str:
    lines = [json.dumps({"iteration": i, **record}) for i, record in enumerate(records)]
    (directory / "metrics.jsonl").write_text("\n".join(lines))
    return write_report(directory).read_text()


def _plots(html: str) -> dict[str, str]:
    """Title to SVG, without what matplotlib writes of itself."""
    found = re.findall(r"<figcaption>([^<]*?) ?<.*?(<svg.*?</svg>)", html, re.S)
    return dict(found)


def test_panels_stand_under_their_headings(run: Path) -> None:
    html = write_report(run).read_text()
    places = [(html.index(f"<h2>{heading}</h2>"), panels) for heading, panels in GROUPS]
    ends = [place for place, _ in places[1:]] + [html.index("<h2>Samples</h2>")]
    for (start, panels), end in zip(places, ends, strict=True):
        for panel in panels:
            assert f"<figcaption>{panel.title}" in html[start:end], panel.title


def test_no_metric_is_drawn_twice() -> None:
    names = [name for panel in PANELS for name in (*panel.metrics, *panel.prefixes)]
    assert len(names) == len(set(names))


def test_the_clip_corners_are_those_that_the_loss_counts() -> None:
    corners = {name for name in loss_metrics(torch.ones(len(SUMS))) if name in LABELS}
    assert corners == LABELS.keys()
    assert any(set(panel.metrics) == corners for panel in PANELS)


def test_gold_against_proxy_is_drawn_over_iterations_and_over_the_root_of_the_kl(tmp_path) -> None:
    records = [{"reward": i / 9, "monitor/gold": 0.5, "kl": float(i**2)} for i in range(10)]
    plots = _plots(_write(tmp_path, records))
    assert "reward" in plots["Gold against proxy"]
    by_kl = plots["Gold against proxy, by KL"]
    assert "√KL to the reference, √nats" in by_kl
    ticks = [float(t) for t in re.findall(r"<text[^>]*>([\d.]+)</text>", by_kl)]
    assert 8.0 in ticks  # √81 is drawn, not 81
    assert max(ticks) < 10


def test_without_a_kl_gold_is_drawn_over_iterations_alone(tmp_path: Path) -> None:
    html = _write(tmp_path, [{"reward": 1.0, "monitor/gold": 0.5}] * 3)
    assert html.count("<figcaption>Gold against proxy") == 1


def test_rewards_of_unlike_spans_get_an_axis_each(tmp_path: Path) -> None:
    """A gold reward from 0 to 1 beside a proxy that rises by 10 would be a flat line."""
    unlike = [{"reward": float(i), "monitor/gold": i / 100} for i in range(10)]
    alike = [{"reward": float(i), "monitor/gold": i / 3} for i in range(10)]
    (tmp_path / "alike").mkdir()
    assert "monitor/gold (right)" in _write(tmp_path, unlike)
    assert "(right)" not in _write(tmp_path / "alike", alike)


def test_a_long_run_is_averaged_against_its_kl(tmp_path: Path) -> None:
    count = 3 * GOLD_POINTS
    records = [{"reward": float(i), "monitor/gold": 1.0, "kl": 1.0 + i} for i in range(count)]
    html = _write(tmp_path, records)
    assert "(means of 3 iterations)" in html
    by_kl = _plots(html)["Gold against proxy, by KL"]
    assert by_kl.count("<use") >= 2 * GOLD_POINTS  # a marker each, and the ticks'
    assert by_kl.count("<use") < 2 * count


@pytest.mark.parametrize("kl", [-0.2, 0.0])
def test_a_kl_estimate_below_0_is_no_distance(kl: float, tmp_path: Path) -> None:
    html = _write(tmp_path, [{"reward": 1.0, "monitor/gold": 0.5, "kl": kl}] * 2)
    assert "by KL" in html


def test_what_is_not_finite_does_not_stop_the_report(tmp_path: Path) -> None:
    html = _write(tmp_path, [{"reward": 1.0, "grad_norm": math.nan}, {"reward": 2.0}] * 3)
    assert "Gradient norm" in html


def test_warnings_are_listed_with_their_iterations(tmp_path: Path) -> None:
    """Those that differ in the value alone are one line: the first, the last, and how many."""
    records: list[dict] = [{"reward": 1.0} for _ in range(8)]
    for i in (3, 4, 6):
        records[i]["warnings"] = [f"kl = {20 + i} > 20"]
    records[4]["warnings"] += ["kl = 24 > 22", "optimiser step 17: gradient norm nan, <skipped>"]
    html = _write(tmp_path, records)
    section = html[html.index("<h2>Warnings</h2>") : html.index("<h2>Learning</h2>")]
    rows = re.findall(r"<tr><td>(.*?)</td><td[^>]*>(.*?)</td></tr>", section)
    assert rows == [
        ("iterations 3 to 6, 3 times", "kl = 23 &gt; 20 … kl = 26 &gt; 20"),
        ("iteration 4", "kl = 24 &gt; 22"),
        ("iteration 4", "optimiser step 17: gradient norm nan, &lt;skipped&gt;"),
    ]
