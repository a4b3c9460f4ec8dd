"""Adapters of other packages, found by entry point."""

from __future__ import annotations

import json
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from distributions import ROOT, write_metadata

from fastppo.data.datasets import DataError
from fastppo.environments.loading import load_environment
from fastppo.plugins import entry_points
from fastppo.plugins.adapters import is_address, load_prompts
from fastppo.rewards.loading import load_reward, make_terms
from fastppo.run.options import SharingOptions
from runs import make_trainer, records

PACKAGE = """
from fastppo.plugins.adapters import Adapter, Address, seeded_prompts


class Counting:
    def __init__(self, last):
        self.last = last

    def reset(self, prompt, seed):
        self.number = seed
        return f"w{seed}"

    def step(self, text):
        self.number += 1
        return f"w{self.number}", 1.0, self.number >= self.last


def environment(target):
    name, options = Address.of(target)
    if name != "up":
        raise ValueError(f"no task {name!r}")
    return lambda: Counting(**options)


def needs(target):
    import a_package_that_is_missing


ADAPTER = Adapter(
    prompts=lambda target: seeded_prompts(Address.of(target)),
    environment=environment,
    rewards={"length": lambda prompts, completions: [float(len(c)) for c in completions]},
)
INCOMPLETE = Adapter(requirement="a-package-that-is-missing>=2", environment=needs)
"""
TRACKER = """
import json
from fastppo.run.trackers import Tracker


class Lines(Tracker):
    def __init__(self, run, config, *, first=0):
        self.file = open(run.directory / "lines.txt", "w")

    def metrics(self, number, metrics, warnings):
        self.file.write(json.dumps([number, metrics["reward"]]) + "\\n")

    def close(self):
        self.file.close()
"""


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution `counting` with adapters and a tracker."""
    site = tmp_path / "site"
    groups = {
        entry_points.ENVIRONMENTS: {
            "counting": "counting_adapter:ADAPTER",
            "incomplete": "counting_adapter:INCOMPLETE",
        },
        entry_points.TRACKERS: {"lines": "counting_tracker:Lines"},
    }
    write_metadata(site, "counting", groups)
    (site / "counting_adapter.py").write_text(PACKAGE)
    (site / "counting_tracker.py").write_text(TRACKER)
    monkeypatch.syspath_prepend(str(site))


@pytest.mark.usefixtures("other_package")
def test_another_package_provides_prompts_environment_and_rewards() -> None:
    assert is_address("counting:up")
    assert [row["seed"] for row in load_prompts("counting:up?size=2&seed=7")] == [7, 8]
    term = load_environment("counting:up?last=9")
    assert term is not None
    game = term.function()
    assert game.reset("counting", 8) == "w8"
    assert game.step("x") == ("w9", 1.0, True)
    assert load_reward("counting:length")(["a"], ["four"]) == [4.0]
    (reward,) = make_terms(["counting:length"])
    assert reward.name == "length"


def test_the_adapter_of_the_docs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "environments.md").read_text("utf-8")
    (metadata_of,) = re.findall(r"```toml\n# pyproject.toml\n(.*?)^```", page, re.M | re.S)
    (module,) = re.findall(r"```py\n(# chess_tasks.py\n.*?)^```", page, re.M | re.S)
    project = tomllib.loads(metadata_of)["project"]
    write_metadata(tmp_path, project["name"], project["entry-points"])
    (tmp_path / "chess_tasks.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = yaml.safe_load(re.findall(r"^prompts: chess.*\n.*\n", page, re.M)[0])
    rows = load_prompts(options["prompts"])
    assert (len(rows), rows[0]["seed"]) == (200, 1)
    term = load_environment(options["environment"])
    assert term is not None
    assert term.function().level == 3
    with pytest.raises(DataError, match="expected chess:puzzles"):
        load_environment("chess:openings")


@pytest.mark.usefixtures("other_package")
def test_a_run_trains_on_the_tasks_of_another_package(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        prompts=load_prompts("counting:up?size=8"),
        environment=load_environment("counting:up?last=2").function,
        rewards=None,
        max_turns=2,
        max_new_tokens=4,
        stop_token_ids=list(range(3, 23)),
        report_to=["lines"],
    )
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "lines.txt").read_text().splitlines()]
    assert lines == [[line["iteration"], line["reward"]] for line in records(trainer)]


@pytest.mark.usefixtures("other_package")
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("counting:down?last=9", "no task 'down'"),
        ("incomplete:x", 'pip install "a-package-that-is-missing>=2"'),
    ],
)
def test_an_error_of_an_adapter_names_the_address(spec: str, says: str) -> None:
    with pytest.raises(DataError, match=f"environment {spec.replace('?', '.')}: .*{says}"):
        load_environment(spec)


def test_an_unknown_name_is_no_address() -> None:
    assert not is_address("counting:up")
    assert not is_address("https://host/path")
    with pytest.raises(ValueError, match="report_to"):
        SharingOptions(report_to=["lines"]).check_sharing()


def test_a_checkout_finds_its_parts_without_being_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The metadata of an earlier installation may be older than the code, too."""
    monkeypatch.setattr(metadata, "entry_points", lambda group: metadata.EntryPoints())
    assert is_address("gym:gymnasium:CartPole-v1")
    assert entry_points.names(entry_points.TRACKERS) == ["tensorboard", "wandb"]


def test_every_declared_part_of_fastppo_can_be_imported() -> None:
    for group in (entry_points.ENVIRONMENTS, entry_points.TRACKERS, entry_points.CALLBACKS):
        for name in entry_points.names(group):
            assert entry_points.load(group, name) is not None, name
