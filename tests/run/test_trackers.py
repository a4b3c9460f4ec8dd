"""Logging to W&B.

A fake wandb records the calls. If wandb is installed, one test runs it offline.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastppo.run.trackers import TrackedRun, load_tracker
from fastppo.trackers.wandb import table
from runs import make_trainer, records

Heard = list[tuple[str, Any]]

FAKE = {
    "__init__.py": """
from types import SimpleNamespace
heard = []
run = None
def init(**options):
    global run
    heard.append(("init", options))
    run = SimpleNamespace(id=options["id"] or "new", _label=lambda **_: None, summary={})
    return run
def finish():
    global run
    run = None
    heard.append(("finish", None))
def log(values, **_):
    heard.append(("log", values))
def define_metric(*_, **__):
    pass
class Config(dict):
    def update(self, values, allow_val_change=False):
        super().update(values)
config = Config()
class Table:
    def __init__(self, columns, data):
        self.columns, self.data = columns, data
""",
    "sdk/__init__.py": "",
    "sdk/lib/__init__.py": "",
    "sdk/lib/config_util.py": "class ConfigError(Exception): ...\n",
}


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    """Replace wandb by a fake, and return the list of its calls."""
    folder = tmp_path / "packages"
    monkeypatch.syspath_prepend(str(folder))

    def forget() -> dict[str, Any]:
        modules = [name for name in sys.modules if name.split(".")[0] == "wandb"]
        return {name: sys.modules.pop(name) for name in modules}

    theirs = forget()
    for file, source in FAKE.items():
        (folder / "wandb" / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / "wandb" / file).write_text(source)
    importlib.invalidate_caches()
    yield importlib.import_module("wandb").heard
    forget()
    sys.modules.update(theirs)


def _of(heard: Heard, name: str) -> list[Any]:
    return [value for each, value in heard if each == name]


def test_a_resumed_run_continues_the_same_wandb_run(heard: Heard, tmp_path: Path) -> None:
    options = {"report_to": ["wandb"]}
    trainer = make_trainer(tmp_path, **options)
    trainer.train()
    (begun,) = _of(heard, "init")
    assert (begun["project"], begun["id"], begun["resume"]) == ("fastppo", None, "allow")
    assert begun["name"].startswith("run-")
    assert begun["dir"] == str(tmp_path / "run")
    metrics = [line for line in _of(heard, "log") if "samples" not in line]
    for line, written in zip(metrics, records(trainer), strict=True):
        assert line["train/reward"] == written["reward"]
        assert line["train/global_step"] == written["iteration"] + 1
    tables = [line for line in _of(heard, "log") if "samples" in line]
    assert [line["train/global_step"] for line in tables] == [1, 2]
    columns, rows = tables[0]["samples"].columns, tables[0]["samples"].data
    assert len(rows) == 8
    assert {"prompt", "completion", "reward", "rewards/count_w7", "kl"} <= {*columns}
    assert heard[-1] == ("finish", None)

    heard.clear()
    make_trainer(tmp_path, **options, iterations=3, resume=True).train()
    (again,) = _of(heard, "init")
    assert (again["id"], again["name"]) == ("new", begun["name"])
    assert _of(heard, "log")[0]["train/global_step"] == 3


def test_a_failed_run_is_closed_in_the_tracker(heard: Heard, tmp_path: Path) -> None:
    def fails(prompts, completions):
        raise ValueError("no")

    with pytest.raises(RuntimeError):
        make_trainer(tmp_path, report_to=["wandb"], rewards=[fails]).train()
    assert heard[-1] == ("finish", None)


def test_a_missing_package_is_an_error_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"report_to=wandb .*pip install wandb"):
        load_tracker("wandb")


def test_the_name_of_a_run_is_kept_for_a_resume(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path / "a" / "ppo")
    run.keep(wandb="one")
    assert run.name.startswith("ppo-")
    resumed = TrackedRun(tmp_path / "a" / "ppo")
    assert (resumed.name, resumed.ids) == (run.name, {"wandb": "one"})
    assert TrackedRun(tmp_path / "b" / "ppo").ids == {}


def test_samples_become_a_table() -> None:
    chat = [{"role": "user", "content": "é"}]
    columns, rows = table(
        [
            {"prompt": "a", "rewards": {"x": 1.0, "y": 2.0}, "kl": None},
            {"prompt": chat, "rewards": {"x": 3.0}, "kl": 0.5},
        ]
    )
    assert columns == ["prompt", "rewards/x", "rewards/y", "kl"]
    assert rows == [["a", 1.0, 2.0, None], [json.dumps(chat, ensure_ascii=False), 3.0, None, 0.5]]


def test_wandb_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for resume in (False, True):
        make_trainer(tmp_path, report_to=["wandb"], iterations=1 + resume, resume=resume).train()
    assert wandb.run is None
    known = json.loads((tmp_path / "run" / "trackers.json").read_text())["wandb"]
    actual = [path.name for path in (tmp_path / "run" / "wandb").glob("offline-run-*")]
    assert len(actual) == 2
    # W&B names the directory by time and id, and appends "-1" within the same second.
    assert all(name.split("-")[3] == known for name in actual)
