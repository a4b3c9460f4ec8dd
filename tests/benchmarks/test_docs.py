"""The page, the README and the chart are those of the kept results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import docs, results


def test_page_readme_and_chart_agree_with_the_results() -> None:
    """If this fails after new results, run python -m benchmarks.docs."""
    devices = results.load()
    assert docs.PAGE.read_text("utf-8") == docs.page(devices)
    readme = docs.README.read_text("utf-8")
    for section, content in docs.sections(devices).items():
        assert docs.split(readme, section)[1] == content
    chart = docs.CHART.read_text("utf-8")
    for bar in docs.bars(devices):
        assert f">{bar.label} {bar.group}<" in chart
    assert f">{docs.machine(docs.newest_cpu(devices))}<" in chart


def test_an_unmeasured_number_is_refused() -> None:
    cpu = docs.newest_cpu(results.load())
    runs = [
        run
        for run in cpu.runs
        if not any("promised" in t["extra_info"] for t in run.tests.values())
    ]
    with pytest.raises(ValueError, match="benchmarks/results"):
        docs.sections([results.Results(runs)])
    *_, promises = [run for run in cpu.runs if run not in runs]
    some = {name: test for name, test in promises.tests.items() if "gae" not in name}
    with pytest.raises(ValueError, match="gae, faster, TRL's loop"):
        docs.sections([results.Results([*runs, promises._replace(tests=some)])])


def test_a_newer_measurement_replaces_an_older_one(tmp_path: Path, monkeypatch) -> None:
    machine = {"device": {"name": "A CPU", "type": "cpu"}}
    for name, day, tests in (("b", "01", {"one": 1.0, "two": 2.0}), ("a", "02", {"two": 3.0})):
        content = {
            "machine_info": machine,
            "datetime": f"2027-01-{day}T00:00:00",
            "benchmarks": [
                {"fullname": test, "extra_info": {"case": "gae"}, "stats": {"median": median}}
                for test, median in tests.items()
            ],
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    (device,) = results.load()
    medians = {test["fullname"]: test["stats"]["median"] for _, test in device.having("case")}
    assert medians == {"one": 1.0, "two": 3.0}
    assert device.time_of("case") == "2027-01-02T00:00:00"
    assert device.having("promised") == []
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="pytest benchmarks"):
        results.load()
