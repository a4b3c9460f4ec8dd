"""The way over from TRL: the page, its YAML, and what the command line says to TRL's names."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fastppo import cli
from fastppo.ppo.config import PPOConfig
from fastppo.run.counterparts import TRL
from fastppo.run.options import read_yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "from-trl.md").read_text(encoding="utf-8")
OURS = {each.name for each in fields(PPOConfig)}
NUMBER = re.compile(r"^[\d.e-]+$")


def _rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of the page."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


OPTIONS = [(re.findall(r"`(\w+)`", row[0]), row) for row in _rows("Options")[1:]]


@pytest.mark.parametrize("name", TRL)
def test_a_name_of_trls_is_answered_with_ours(name: str, capsys, tmp_path: Path) -> None:
    assert name not in OURS
    ours = re.match(r"\w+", TRL[name])
    assert ours is not None
    assert ours[0] in OURS
    with pytest.raises(SystemExit):
        cli.main(["train", f"--{name}", "1"])
    assert f"unrecognized arguments: --{name} 1; TRL's {name} is {TRL[name]}\n" in (
        capsys.readouterr().err
    )
    (tmp_path / "run.yaml").write_text(f"{name}: 1")
    with pytest.raises(ValueError, match=re.escape(f"no option '{name}'; TRL's {name} is ")):
        read_yaml(tmp_path / "run.yaml", PPOConfig)


def test_an_unknown_flag_is_answered_with_the_nearest_option(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--learning_rat=1"])
    assert "--learning_rat=1; did you mean learning_rate?" in capsys.readouterr().err


def test_the_page_has_our_options_with_their_defaults() -> None:
    defaults = PPOConfig().to_dict()
    compared = 0
    for _, row in OPTIONS:
        names = [name for name in re.findall(r"`(\w+)`", row[1]) if name in OURS]
        shown_defaults = re.split(r" and |, ", row[3])
        for name, shown in zip(names, shown_defaults, strict=False):
            if NUMBER.match(shown) and len(names) == len(shown_defaults):
                assert float(shown) == defaults[name], row
                compared += 1
            elif shown in ("true", "false"):
                assert (shown == "true") == defaults[name], row
                compared += 1
    assert compared >= 20


def test_the_yaml_has_the_defaults_that_the_page_names() -> None:
    chosen = PPOConfig(**read_yaml(ROOT / "examples" / "trl_defaults.yaml", PPOConfig))
    for row in _rows("Silent differences")[1:]:
        for name, value in re.findall(r"`(\w+): ([^`]+)`", row[3]):
            if (name, value) not in [("stop_token_ids", "[]"), ("old_logprobs", "sampler")]:
                assert str(getattr(chosen, name)).lower() in (value, str(_number(value))), row


def _number(text: str) -> float | str:
    return float(text) if NUMBER.match(text) else text


def test_the_page_has_all_of_trls_options_with_their_defaults(monkeypatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    theirs = pytest.importorskip("trl.experimental.ppo", reason="TRL 1.12 is not installed")
    from transformers import TrainingArguments

    of_trainer = {each.name for each in fields(TrainingArguments)}
    defaults = {each.name: each.default for each in fields(theirs.PPOConfig)}
    named = {name for names, _ in OPTIONS for name in names}
    assert {name for name in defaults if name not in of_trainer} <= named
    compared = 0
    for names, row in OPTIONS:
        for name, shown in zip(names, row[2].split(", "), strict=False):
            if NUMBER.match(shown):
                assert float(shown) == defaults[name], row
                compared += 1
    assert compared > 15
