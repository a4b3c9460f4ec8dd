"""`fastppo init` writes a run."""

from __future__ import annotations

import json
import runpy
import shlex
from pathlib import Path

import pytest
import tiny
import yaml

from fastppo import cli
from fastppo.ppo.options.config import PPOConfig


@pytest.mark.parametrize("columns", [{"answer": "w2"}, {}], ids=["answers", "no answers"])
def test_its_files_are_a_run_with_a_tested_reward(
    columns: dict[str, str], tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny.CONFIGS["llama"]()
    config.max_position_embeddings = 256
    tiny.model_of(config).save_pretrained("model")
    tiny.tokenizer().save_pretrained("model")
    Path("préguntas 🙂.jsonl").write_text(json.dumps({"prompt": "w1", **columns}))
    flags = ["--model", "model", "--prompts", "préguntas 🙂.jsonl", "--out", "my run"]
    assert cli.main(["init", *flags]) == 0
    *_, command = capsys.readouterr().out.splitlines()
    runpy.run_path("my run/reward.py", run_name="__main__")
    assert capsys.readouterr().out == "ok\n"
    assert cli.main(shlex.split(command.partition("fastppo ")[2])) == 0


def test_its_values_are_the_defaults_of_fastppo_train(tmp_path: Path) -> None:
    assert cli.main(["init", "--out", str(tmp_path)]) == 0
    written = yaml.safe_load((tmp_path / "run.yaml").read_text("utf-8"))
    defaults = PPOConfig().to_dict()
    names = written.keys() - {"model", "prompts", "rewards", "output_dir"}
    assert {name: written[name] for name in names} == {name: defaults[name] for name in names}


def test_an_existing_file_is_kept(tmp_path: Path, capsys) -> None:
    (tmp_path / "reward.py").write_text("mine = 1\n")
    assert cli.main(["init", "--out", str(tmp_path)]) == 2
    assert "reward.py" in capsys.readouterr().err
    assert not (tmp_path / "run.yaml").exists()
