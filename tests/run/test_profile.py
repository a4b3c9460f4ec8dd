"""A profile has the phases of the iterations asked for, and a run without one is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny

from fastppo import cli
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from fastppo.run.log import read_jsonl
from fastppo.run.profile import PHASES, PREFIX, profiled


def make_trainer(tmp_path: Path) -> PPOTrainer:
    config = PPOConfig(**tiny.options(tmp_path))
    return PPOTrainer(config, model=tiny.model(), tokenizer=tiny.tokenizer())


def test_a_profile_of_the_command_has_the_phases_of_its_iterations(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny.PROMPTS))
    options = tiny.options(tmp_path, model=tiny.saved_model(tmp_path / "sft"), max_new_tokens=2)
    options |= {"prompts": tmp_path / "p.jsonl", "rewards": "tiny:count_w7", "iterations": 3}
    options |= {"ppo_epochs": 1, "profile": 1}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    assert cli.main(["train", *flags]) == 0
    trace = json.loads((tmp_path / "run" / "profile.json").read_text())
    ranges = [each for each in trace["traceEvents"] if each.get("cat") == "user_annotation"]
    names = [each["name"].removeprefix(PREFIX) for each in ranges if PREFIX in each["name"]]
    assert names == [*PHASES], "of the second iteration alone"
    table = (tmp_path / "run" / "profile.txt").read_text()
    assert "aten::mm" in table
    assert f"{PREFIX}update" in table
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 3


def test_a_run_without_a_profile_is_left_alone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    before = dict(vars(trainer)), dict(vars(trainer.engine))
    with profiled(trainer, 0):
        assert (vars(trainer), vars(trainer.engine)) == before
    assert not (tmp_path / "run").exists()


def test_names_are_taken_back_even_when_a_run_fails(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    before = {*vars(trainer)}, {*vars(trainer.engine)}

    def fail() -> None:
        with profiled(trainer, 1):
            assert {"iterate", "update"} <= {*vars(trainer)}
            raise KeyError("a failure")

    with pytest.raises(KeyError):
        fail()
    assert ({*vars(trainer)}, {*vars(trainer.engine)}) == before


@pytest.mark.parametrize("wanted", ["-1", "some"])
def test_a_number_that_is_none_is_refused(wanted: str, tmp_path: Path, capsys) -> None:
    flags = ["train", "--model", "m", "--prompts", "p", "--rewards", "a.py:f"]
    with pytest.raises(SystemExit):
        cli.main([*flags, "--profile", wanted])
    assert "argument --profile" in capsys.readouterr().err
