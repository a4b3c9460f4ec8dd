"""Several runs on one page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastppo.cli import main
from fastppo.run.report.comparison import write_comparison


def _run(directory: Path, rewards: list[float], **options: Any) -> Path:
    directory.mkdir(parents=True)
    records = [{"iteration": i, "reward": reward, "kl": 1.0} for i, reward in enumerate(rewards)]
    records[0] |= {"before/reward": 0.5}
    records[-1] |= {"eval/reward": 0.75}
    lines = [json.dumps(record) + "\n" for record in records]
    (directory / "metrics.jsonl").write_text("".join(lines))
    config = {"model": "sft", "output_dir": str(directory), **options}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    first = _run(tmp_path / "a" / "ppo", [0.0, 0.5, 1.0], objective="clip", warn_if=["kl > 5"])
    second = _run(tmp_path / "b" / "ppo", [0.25, 0.5], objective="cispo", warn_if=["kl > 5"])
    return [first, second]


def _charts(html: str) -> dict[str, dict[str, Any]]:
    (data,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', html, re.S)
    return {chart["title"]: chart for chart in json.loads(data)}


def test_the_curves_of_a_metric_lie_over_each_other(runs: list[Path]) -> None:
    charts = _charts(write_comparison(runs).read_text())
    reward = charts["Reward"]
    assert reward["x"] == [1, 2, 3]
    assert {curve["label"]: curve["values"] for curve in reward["series"]} == {
        "a/ppo": [0.0, 0.5, 1.0],
        "b/ppo": [0.25, 0.5, None],
    }
    held_out = charts["eval/reward"]
    assert held_out["x"] == [0, 2, 3]
    assert [curve["values"] for curve in held_out["series"]] == [
        [0.5, None, 0.75],
        [0.5, 0.75, None],
    ]
    assert all(curve["joined"] for curve in held_out["series"])


def test_the_monitored_rewards_have_curves(tmp_path: Path) -> None:
    runs = [_run(tmp_path / name, [0.0, 1.0]) for name in ("a", "b")]
    path = runs[1] / "metrics.jsonl"
    lines = [json.loads(line) | {"monitor/gold": 0.5} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    gold = _charts(write_comparison(runs).read_text())["monitor/gold"]
    assert gold["note"] == "Monitored rewards"
    assert [curve["values"] for curve in gold["series"]] == [[None, None], [0.5, 0.5]]


def test_a_run_that_goes_on_says_how_far_it_is(tmp_path: Path) -> None:
    runs = [_run(tmp_path / name, [0.0, 1.0], iterations=n) for name, n in {"a": 9, "b": 2}.items()]
    cells = re.findall(r'<td class="number">([^<]*)</td>', write_comparison(runs).read_text())
    assert cells[0] == "2 of 9"
    assert cells[2] == "2"


def test_only_options_that_differ_are_listed(runs: list[Path]) -> None:
    (runs[0] / "report.html").write_text("")
    html = write_comparison(runs).read_text()
    assert re.search(r"<td>objective</td>\s*<td>clip</td>\s*<td>cispo</td>", html)
    assert "<td>model</td>" not in html
    assert "<td>output_dir</td>" not in html
    assert 'href="a/ppo/report.html"' in html
    assert "b/ppo/report.html" not in html


def test_the_command_compares_several_runs(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *map(str, runs)]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == runs[0].parents[1] / "comparison.html"
    assert "Comparison of 2 runs" in page.read_text()
    assert main(["report", str(runs[0])]) == 0
    assert Path(capsys.readouterr().out.strip()) == runs[0] / "report.html"
    assert main(["report", str(runs[0]), "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
