"""The studies: their settings, and a quick run of each."""

from __future__ import annotations

import importlib
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies import critic, learning_rate, recipe_curves
from benchmarks.training import iterate

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "benchmarks" / "results" / "studies"


def test_new_recipe_curves_are_added_to_the_kept_ones(
    tmp_path: Path,
) -> None:
    for folder in ("arithmetic-0", "arithmetic-3", "smollm2-tools-0"):
        run = tmp_path / folder / "ppo"
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text('{"reward": 0.5}\n{"reward": 0.75}\n')
    kept = tmp_path / "kept.json"
    kept.write_text('{"guess": {"1": [0.1, 0.2]}, "arithmetic": {"2": [0.25], "3": [0.0]}}')
    figure = recipe_curves.add(tmp_path, kept)
    assert json.loads(kept.read_text()) == {
        "arithmetic": {"0": [0.5, 0.75], "2": [0.25], "3": [0.5, 0.75]},
        "guess": {"1": [0.1, 0.2]},
        "smollm2-tools": {"0": [0.5, 0.75]},
    }
    drawn = figure.read_text()
    assert [drawn.count(f"<!-- {name} -->") for name in ("guess", "smollm2-tools")] == [1, 1]
    assert drawn.count("<!-- seed") == 5


def _curves_of_the_demo() -> dict[str, list[Any]]:
    """Return the records of each setting, by seed."""
    seeds = json.loads((STUDIES / "critic.json").read_text())
    return {
        label: [_records(curves[label]) for curves in seeds]
        for label in critic.TASKS["demo"].settings
    }


def _curves_of_key_and_door() -> dict[str, list[Any]]:
    runs = json.loads((STUDIES / "credit-key-and-door.json").read_text())["runs"]
    return {label: [_records(curves) for curves in seeds] for label, seeds in runs.items()}


def _records(curves: Any) -> list[dict[str, float]]:
    """Return a run's records from a list of them or from a list per metric."""
    if isinstance(curves, list):
        return curves
    iterations = range(len(curves["processor_seconds"]))
    return [{name: curves[name][i] for name in curves if curves[name]} for i in iterations]


@pytest.mark.parametrize(
    ("name", "curves"), [("demo", _curves_of_the_demo), ("key-and-door", _curves_of_key_and_door)]
)
def test_the_tables_of_the_page_follow_from_the_kept_curves(
    name: str, curves: Callable[[], dict[str, list[Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    task = critic.TASKS[name]
    critic.print_tables(task, curves(), task.seconds)
    lines = capsys.readouterr().out.splitlines()
    for label in task.settings:
        (row,) = [line for line in lines if re.match(rf"\| {label} \| [01]\.\d+ ± ", line)]
        rewards = " | ".join(row.split(" | ")[:4])
        assert f"{rewards} |" in page


def test_the_table_of_the_value_loss_follows_from_the_kept_curves() -> None:
    page = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    with_loss = json.loads((STUDIES / "value-loss.json").read_text())
    default = json.loads((STUDIES / "learning-rate.json").read_text())
    for task in ("demo", "dense", "needle", "outliers", "choice"):
        cells = []
        for iterations in (15, 60):
            for curves in (
                [seed["judged"] for seed in default[task]["auto"].values()],
                with_loss[task].values(),
            ):
                ends = [statistics.mean(x[:iterations][-(iterations // 5) :]) for x in curves]
                cells.append(f"{statistics.mean(ends):.3f} ± {statistics.stdev(ends):.3f}")
        assert f"| {task} | {' | '.join(cells)} |" in page


def test_the_study_of_the_rate_compares_auto_with_the_best_fixed_rate(tmp_path: Path) -> None:
    store = learning_rate.Store(tmp_path, tmp_path)
    ends = {"auto": 0.6, "1e-4": 0.5, "1e-3": 0.8}
    for setting, end in ends.items():
        run = learning_rate.Run("bandit", setting, 0)
        # A batch of 1e-4 takes half the time; its reward at the time of the others is lower.
        seconds = 0.5 if setting == "1e-4" else 1.0
        rows = [
            {"judged": end if i >= 8 else 0.7, "deviation": 0.4, "size": 64, "seconds": seconds * i}
            for i in range(1, 16)
        ]
        run.path(tmp_path).parent.mkdir(exist_ok=True)
        run.path(tmp_path).write_text(json.dumps(rows))
    records = store.read(learning_rate.grid(["bandit"], list(ends), 1))
    (comparison,) = learning_rate.compare(records)
    assert comparison.best == "1e-3"
    assert comparison.share("auto") == pytest.approx(0.75)
    # Two standard errors of 64 responses are 0.1.
    assert comparison.below == {"auto": 0, "1e-4": 1, "1e-3": 0}
    (timed,) = learning_rate.compare(learning_rate.at_equal_time(records))
    assert [timed.mean(setting) for setting in ends] == pytest.approx([0.7, 0.5, 0.7])


@pytest.mark.parametrize("name", learning_rate.SETS)
def test_the_tables_of_auto_follow_from_the_kept_curves(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    learning_rate.print_comparison(learning_rate.read(learning_rate.RESULTS, name), "auto")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) > 10
    for row in rows:
        assert row in page


def test_runs_of_the_study_of_the_rate_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(learning_rate.LENGTHS, "long", 5)
    bandit = ["--tasks", "bandit", "--seeds", "1", "--settings", "auto"]
    learning_rate.main([str(tmp_path / "alone"), *bandit])
    assert "| bandit |" not in capsys.readouterr().out, "there is nothing to compare with"
    flags = [str(tmp_path), *bandit, "1e-3"]
    learning_rate.main([*flags, "--label", "new"])
    printed = capsys.readouterr().out
    assert "| bandit |" in printed
    records = json.loads((tmp_path / "bandit" / "auto-new-0.json").read_text())
    assert len(records) == 5
    assert {"judged", "seconds", "approx_kl", "update_kl", "learning_rate"} <= set(records[-1])
    assert (tmp_path / "bandit" / "1e-3-0.json").exists()
    monkeypatch.setattr(learning_rate, "trained", None)
    learning_rate.main([*flags, "--label", "new"])
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    "task", ["needle", "dense", "bandit", "switch", "lock", "ragged", "coins", "fines", "rubric"]
)
def test_a_task_from_random_weights_trains(task: str, tmp_path: Path) -> None:
    run = learning_rate.Run(task, "1e-3", 0)
    trainer, judged = learning_rate.make_trainer(run, tmp_path, str(tmp_path / "unused"))
    mean, deviation = judged(iterate(trainer))
    assert 0 <= mean <= 0.5
    assert deviation >= 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("learning_rate", [], ["| bandit |", "share, equal CPU time", "lowest share"]),
        ("critic", [], ["| critic, closed form |", "| GRPO |", "form, ahead of |", "| seeds lost"]),
        ("critic", ["--task", "key-and-door"], ["| RLOO |", "PPO: correlation of the advant"]),
    ],
)
def test_a_quick_study_prints_a_table_draws_and_keeps_its_runs(
    name: str, flags: list[str], words: list[str], tmp_path: Path, capsys
) -> None:
    study: Any = importlib.import_module(f"benchmarks.studies.{name}")
    study.main([str(tmp_path), "--quick", *flags])
    printed = capsys.readouterr().out
    for word in words:
        assert word in printed
    (picture,) = tmp_path.glob("*.png")
    assert picture.stat().st_size > 10_000
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    study.main([str(tmp_path), "--quick", *flags])
    assert capsys.readouterr().out == printed
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == files
