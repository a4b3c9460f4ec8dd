"""The report is one file with every plot that has data, warnings and escaped samples."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fastppo.run.log import read_jsonl
from fastppo.run.report.panels import GROUPS, PANELS
from fastppo.run.report.report import first_and_last, write_report
from fastppo.run.report.summary import summarize, summarize_critic

METRICS = {
    **{name: 0.5 for panel in PANELS for name in panel.metrics},
    "reward/brief": 1.0,
    "reward/kind": 0.2,
    "monitor/gold": 0.3,
    "correlation/gold": 0.9,
    "schedule/entropy_coef": 0.01,
    "kl": 4.0,
    "seconds/generate": 0.1,
    "finish/stop": 0.5,
    "tools/ok": 0.5,
    "outcome/success": 0.25,
    "eval/reward/brief": 0.9,
    "eval/monitor/gold": 0.4,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [
        {"iteration": i, **{name: value + i for name, value in METRICS.items()}, "reward": i / 10}
        for i in range(20)
    ]
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


def test_the_report_has_every_panel_and_loads_nothing(run: Path) -> None:
    html = write_report(run).read_text()
    charts = _charts(html)
    assert len(charts) == html.count('<div id="chart-') == len(PANELS) + 1  # proxy and gold rewards
    places = [(html.index('class="plots overview"'), GROUPS[0][1])]
    for heading, panels in GROUPS[1:]:
        places.append((html.index(f"<details><summary><h2>{heading}</h2>"), panels))
    ends = [place for place, _ in places[1:]] + [html.index("<h2>Samples</h2>")]
    assert len(GROUPS[0][1]) == 4
    for (start, panels), end in zip(places, ends, strict=True):
        for panel in panels:
            assert panel.title in charts
            assert f"<figcaption>{panel.title}" in html[start:end], panel.title
    for name in ("monitor/gold", "reward/kind", "my/model", "seed: 3"):
        assert name in html
    for loads in ("<link", "src=", "@import", "url("):
        assert loads not in html
    assert html.count("<script") == 3  # numbers, uPlot, plots.js
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_panels_without_data_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0, "reward": 1.0}\n')
    html = write_report(tmp_path).read_text()
    assert len(_charts(html)) == 1
    for absent in ("Critic", "Proxy and gold rewards", "Warnings", "Speed", "Responses"):
        assert absent not in html


def test_the_first_iteration_is_compared_with_the_last_tenth(run: Path) -> None:
    rows = {
        name: (first, last)
        for name, first, last in first_and_last(read_jsonl(run / "metrics.jsonl"))
    }
    assert rows["reward"] == pytest.approx((0.0, 1.85))
    assert "monitor/gold" in rows


BEFORE = {"before/reward": -1.0, "before/reward_error": 0.06, "reward": 0.0, "kl": 0.0}
MONITORED = {"before/monitor/gold": 0.5, "before/monitor_error/gold": 0.03}
HELD_OUT = {"eval/reward": 0.6, "eval/reward_error": 0.08, "eval/kl": 4.66}


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        pytest.param(
            [BEFORE, HELD_OUT],
            "Held-out reward +1.6 ± 0.1, KL 4.7 nats",
            id="held-out",
        ),
        pytest.param(
            [
                BEFORE | MONITORED,
                HELD_OUT | {"eval/monitor/gold": 0.2, "eval/monitor_error/gold": 0.04},
            ],
            "Held-out reward +1.6 ± 0.1, monitored gold -0.30 ± 0.05, KL 4.7 nats",
            id="held-out-monitored",
        ),
        pytest.param(
            [
                BEFORE | {"before/reward_error": math.nan},
                {"eval/reward": 0.6, "eval/reward_error": math.nan, "kl": 3.0},
            ],
            "Held-out reward +1.6 (too few to tell), KL 3.0 nats",
            id="one-prompt",
        ),
        pytest.param(
            [{"reward": float(i) + 0.5 * (-1) ** i} for i in range(40)],
            "Reward +36.0 ± 0.7",
            id="trained",
        ),
        pytest.param(
            [{"reward": (-1.0) ** i, "kl": i / 10} for i in range(20)],
            "Reward +0 ± 1 (no change beyond noise), KL 1.9 nats",
            id="trained-noise",
        ),
        pytest.param(
            [
                {"reward": 0.08, "reward_error": 0.05},
                *({"reward": 0.5, "reward_error": 0.09} for _ in range(4)),
                {"reward": 0.89, "reward_error": 0.06},
                {"skipped_steps": 5.0},  # an incomplete iteration
            ],
            "Reward +0.81 ± 0.08",
            id="few-iterations",
        ),
        pytest.param(
            [
                {"reward": 0.5, "reward_error": 0.09, "monitor/gold": 0.25},
                {"reward": 0.625, "reward_error": 0.09, "monitor/gold": 0.5},
            ],
            "Reward +0.1 ± 0.1 (no change beyond noise), monitored gold +0.25 (too few to tell)",
            id="few-iterations-noise",
        ),
        pytest.param([{"reward": 0.5}], "Reward 0.5 in the only iteration", id="one-iteration"),
        pytest.param([{"skipped_steps": 5.0}], "No complete iteration", id="no-iteration"),
        pytest.param([{"reward": math.nan}] * 10, "Reward +nan", id="nan"),
        pytest.param(
            [{"reward": 0.5, "reward_std": 3e-8, "kl": 1.0}] * 3,
            "All responses got the same reward, 0.5 (see docs/troubleshooting.md, item 2)",
            id="equal",
        ),
    ],
)
def test_the_summary_is_a_change_with_its_error(records: list[dict], sentence: str) -> None:
    assert summarize(records) == sentence


def test_the_critic_is_compared_with_a_constant(run: Path) -> None:
    last = {"explained_variance": 0.416}
    assert "explains 42 % of the variance" in summarize_critic([{"explained_variance": 0.0}, last])
    assert "no better than a constant" in summarize_critic([{"explained_variance": -0.2}])
    assert summarize_critic([{"reward": 1.0}]) == ""
    html = write_report(run).read_text()
    assert "At the end, the critic explains" in html[html.index("<h2>Critic</h2>") :]
    assert '<p class="summary">Reward' in html


def test_a_constant_metric_is_a_flat_line(tmp_path: Path) -> None:
    """A sampled KL of 3e-8 is rounding error."""
    chart = _charts(_write(tmp_path, [{"reward": 1.0, "kl": 3e-8 * (-1) ** i} for i in range(6)]))
    assert _curves(chart["KL to the reference"]) == {"kl": [0.0] * 6}
    assert chart["KL to the reference"]["range"] == [-1.0, 1.0]


def test_held_out_rewards_come_first_and_start_before_training() -> None:
    records = [
        {"iteration": 0, "reward": 0.1, "before/reward": 0.5, "before/monitor/gold": 0.7},
        {"iteration": 1, "reward": 0.2, "eval/reward": 1.5, "eval/monitor/gold": 0.6},
    ]
    assert first_and_last(records) == [
        ("eval/reward", 0.5, 1.5),
        ("eval/monitor/gold", 0.7, 0.6),
        ("reward", 0.1, 0.2),
    ]


def test_a_kl_near_0_is_shown_as_0(tmp_path: Path) -> None:
    html = _write(tmp_path, [{"reward": 1.0, "kl": kl} for kl in (-3.9e-06, 0.5, 2.0)])
    assert "<span>kl 0.00 → <b>2.00</b></span>" in html
    assert _curves(_charts(html)["KL to the reference"]) == {"kl": [0.0, 0.5, 2.0]}


def _write(directory: Path, records: list[dict]) -> str:
    lines = [json.dumps({"iteration": i, **record}) for i, record in enumerate(records)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return write_report(directory).read_text()


def _charts(html: str) -> dict[str, dict]:
    """The data of the charts by title."""
    (data,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', html, re.S)
    return {chart["title"]: chart for chart in json.loads(data)}


def _curves(chart: dict) -> dict[str, list]:
    return {curve["label"]: curve["values"] for curve in chart["series"]}


def test_evaluations_are_joined_over_the_iterations_between(tmp_path: Path) -> None:
    records = [{"reward": i / 10} | ({"eval/reward": i} if i % 5 == 4 else {}) for i in range(20)]
    charts = _charts(_write(tmp_path, records))
    trained, held_out = charts["Reward"]["series"]
    assert held_out["joined"] is True
    assert "joined" not in trained


def test_the_evaluation_before_training_is_at_0(tmp_path: Path) -> None:
    records: list[dict] = [{"reward": 0.1, "kl": 0.0}, {"reward": 0.2, "kl": 1.0}]
    records[0] |= {"before/reward": 0.5, "before/monitor/gold": 0.7, "before/eos_rate": 1.0}
    records[1] |= {"eval/reward": 1.5, "eval/monitor/gold": 0.6, "eval/eos_rate": 0.9}
    html = _write(tmp_path, records)
    charts = _charts(html)
    assert charts["Reward"]["x"] == [0, 1, 2]
    assert _curves(charts["Reward"]) == {
        "reward": [None, 0.1, 0.2],
        "eval/reward": [0.5, None, 1.5],
    }
    monitored = charts["Monitored held-out rewards"]
    assert (monitored["x"], _curves(monitored)) == (
        [0, 1, 2],
        {"eval/monitor/gold": [0.7, None, 0.6]},
    )
    assert charts["KL to the reference"]["x"] == [1, 2]
    assert "Constant metrics" not in html


def test_an_evaluated_run_of_one_iteration_has_its_charts(tmp_path: Path) -> None:
    html = _write(tmp_path, [{"reward": 0.1, "before/reward": 0.5, "entropy": 2.0}])
    assert _charts(html).keys() == {"Reward", "Entropy"}


def test_a_single_reward_is_drawn_once(tmp_path: Path) -> None:
    """The mean is in fp64 and the reward in fp32, as in every run."""
    means = [0.1, 0.2, -0.3, 1 / 3]
    records = [{"reward": torch.tensor(mean).item(), "reward/r": mean} for mean in means]
    assert any(record["reward"] != record["reward/r"] for record in records)
    charts = _charts(_write(tmp_path, records))
    assert _curves(charts["Reward"]) == {"reward": [record["reward"] for record in records]}
    assert "Rewards" not in charts
    weighted = [{"reward": mean / 2, "reward/r": mean} for mean in means]
    assert _curves(_charts(_write(tmp_path, weighted))["Rewards"]) == {"reward/r": means}


def test_rewards_of_different_ranges_get_separate_axes(tmp_path) -> None:
    records = [{"reward": i / 9, "monitor/gold": i / 99, "kl": float(i**2)} for i in range(10)]
    charts = _charts(_write(tmp_path, records))
    assert _curves(charts["Proxy and gold rewards"])["reward"] == [i / 9 for i in range(10)]
    right = [curve["right"] for curve in charts["Proxy and gold rewards"]["series"]]
    assert right == [False, True]


def test_values_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    html = _write(tmp_path, [{"reward": 1.0, "grad_norm": math.nan}, {"reward": 2.0}] * 3)
    chart = _charts(html)["Gradient norm"]
    assert _curves(chart) == {"grad_norm": [None] * 6}


def test_warnings_are_listed_with_their_iterations(tmp_path: Path) -> None:
    """Warnings that differ only in the value share a line: first, last, count.

    The reason why the run ended is at the top.
    """
    records: list[dict] = [{"reward": 1.0} for _ in range(8)]
    for i in (3, 4, 6):
        records[i]["warnings"] = [f"kl = {20 + i} > 20"]
    records[4]["warnings"] += ["kl = 24 > 22", "optimizer step 17: gradient norm nan, <skipped>"]
    records[7]["warnings"] = ["stopped: entropy = 0.1 < 0.2"]
    ending = {"device": "", "started": "", "versions": {}, "ended": "entropy = 0.1 < 0.2"}
    (tmp_path / "parts.jsonl").write_text(json.dumps(ending) + "\n")
    html = _write(tmp_path, records)
    assert "Ended after 8 of ? iterations: entropy = 0.1 &lt; 0.2" in html
    section = html[html.index("<h2>Warnings</h2>") : html.index("<h2>More charts</h2>")]
    rows = re.findall(r"<tr><td>(.*?)</td><td[^>]*>(.*?)</td></tr>", section)
    help_with_kl = " (see docs/troubleshooting.md, item 5)"
    assert rows == [
        ("iterations 4 to 7, 3 times", f"kl = 23 &gt; 20 … kl = 26 &gt; 20{help_with_kl}"),
        ("iteration 5", f"kl = 24 &gt; 22{help_with_kl}"),
        ("iteration 5", "optimizer step 17: gradient norm nan, &lt;skipped&gt;"),
    ]


def test_constant_metrics_have_no_chart(tmp_path: Path) -> None:
    html = _write(tmp_path, [{"reward": 1.0, "kl": float(i), "eos_rate": 1.0} for i in range(3)])
    assert list(_charts(html)) == ["Reward", "KL to the reference"]
    assert "<span>eos_rate <b>1</b></span>" in html


def test_a_chat_is_shown_as_turns(run: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why <b>?"}]
    sample = json.loads((run / "samples.jsonl").read_text()) | {"prompt": chat}
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    html = write_report(run).read_text()
    assert '<div class="turn text"><b>system</b>Be brief.</div>' in html
    assert '<div class="turn text"><b>user</b>Why &lt;b&gt;?</div>' in html
    assert "{&#39;role&#39;" not in html


def test_a_chat_of_parts_is_shown_as_text(run: Path) -> None:
    sample = json.loads((run / "samples.jsonl").read_text())
    parts = [{"type": "text", "text": "Hello"}, {"type": "image"}]
    sample["prompt"] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
    ]
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    html = write_report(run).read_text()
    assert "Hello[image]" in html
    assert "{&#39;type&#39;" not in html


def test_a_run_that_diverged_at_first_has_a_report(run: Path) -> None:
    record = {"iteration": 0, "skipped_steps": 5.0, "warnings": ["stopped: not finite"]}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert "stopped: not finite" in write_report(run).read_text()


def test_an_episode_is_shown_as_turns_with_their_rewards(run: Path) -> None:
    turns = [
        {"role": "system", "text": "Be <b>brief</b>."},
        {"role": "policy", "text": "add 2 <b>3</b>", "reward": 0.5},
        {"role": "environment", "text": "\n5\n"},
    ]
    sample = json.loads((run / "samples.jsonl").read_text()) | {"turns": turns}
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    html = write_report(run).read_text()
    assert '<div class="turn  text"><b>system</b>Be &lt;b&gt;brief&lt;/b&gt;.</div>' in html
    assert html.count("a &lt;b&gt; prompt") == 0
    policy = '<div class="turn drawn text"><b>policy · reward 0.500</b>add 2 &lt;b&gt;3&lt;/b&gt;'
    assert policy in html
    assert '<div class="turn answer text"><b>environment</b>5</div>' in html


def test_the_header_has_start_duration_and_device(run: Path) -> None:
    part = {"first": 0, "started": "2026-11-22 09:30+00:00", "device": "A GPU"}
    part |= {"versions": {"torch": "2.13.0"}}
    (run / "parts.jsonl").write_text(json.dumps(part) + "\n")
    html = write_report(run).read_text()
    seconds = sum(0.1 + i for i in range(20))
    assert (
        f"2026-11-22 09:30+00:00 · {int(seconds // 60)} min {round(seconds % 60)} s · A GPU" in html
    )
    assert "torch 2.13.0" in html
    assert '<a href="samples.jsonl">' in html


def _in_browser(path: Path) -> str:
    """The page in a browser, without console messages."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += ["--virtual-time-budget=3000", "--dump-dom", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in shown.stderr
    return shown.stdout


def test_a_browser_draws_every_chart(run: Path) -> None:
    path = write_report(run)
    path.write_text(path.read_text().replace("<details>", "<details open>"))
    assert _in_browser(path).count("<canvas") == len(PANELS) + 1


def test_a_single_iteration_fills_its_chart(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    page = write_report(run)
    told = "document.title = JSON.stringify(entries.map(({plot}) => plot?.scales.x.max))"
    page.write_text(page.read_text() + f"<script>setTimeout(() => {{ {told} }}, 1000)</script>")
    assert "<title>[1.5,1.5,1.5," in _in_browser(page)


def test_the_list_of_tools_is_shown_once(run: Path) -> None:
    """A system message with which all samples begin; other turns stay."""
    sample = json.loads((run / "samples.jsonl").read_text())
    turns = [{"role": "system", "text": "The tools: add"}, {"role": "user", "text": "1 + 1?"}]
    rows = [sample | {"iteration": i, "turns": turns} for i in range(3)]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = write_report(run).read_text()
    assert html.count("The tools: add") == 1
    assert html.count("1 + 1?") == 3
    rows[1]["turns"] = [{"role": "system", "text": "Other tools"}, turns[1]]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert write_report(run).read_text().count("The tools: add") == 2
