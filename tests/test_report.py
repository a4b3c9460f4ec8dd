"""The report: one file, every plot that has data, samples escaped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastppo.report import PANELS, summary, write_report
from fastppo.run_log import read_jsonl

METRICS = {
    **{name: 0.5 for panel in PANELS for name in panel.metrics},
    "reward/brief": 1.0,
    "reward/kind": 0.2,
    "monitor/gold": 0.3,
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
    assert html.count("<svg") == len(PANELS)
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
    assert "Explained variance" not in html


def test_the_summary_compares_the_first_with_the_last_tenth(run: Path) -> None:
    rows = {name: (first, last) for name, first, last in summary(read_jsonl(run / "metrics.jsonl"))}
    assert rows["reward"] == pytest.approx((0.05, 1.85))
    assert "monitor/gold" in rows


def test_a_line_cut_off_while_being_written_is_left_out(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 20, "rew')
    assert len(read_jsonl(run / "metrics.jsonl")) == 20
    write_report(run)
