"""`fastppo init`: the files that it writes are a run."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny

from fastppo import cli

ROWS = [{"prompt": f"w{i} w{i + 1}", "answer": f"w{i + 2}"} for i in range(8)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    config = tiny.CONFIGS["llama"]()
    config.max_position_embeddings = 256
    tiny.model_of(config).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    _write_prompts(tmp_path, ROWS)
    return tmp_path


def _write_prompts(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize("columns", [("prompt", "answer"), ("prompt",)])
def test_its_files_are_a_run_and_its_reward_passes_its_own_test(
    columns: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_prompts(folder, [{name: row[name] for name in columns} for row in ROWS])
    flags = ["--model", "model", "--prompts", "prompts.jsonl", "--out", "mine"]
    assert cli.main(["init", *flags]) == 0
    said = capsys.readouterr().out
    assert "64 responses of 128 tokens at most" in said
    assert "at the peak of each phase" in said
    runpy.run_path("mine/reward.py", run_name="__main__")
    assert capsys.readouterr().out == "the reward does what its test says\n"
    assert cli.main(["check", "--config", "mine/run.yaml"]) == 0


@pytest.mark.parametrize(
    "rows",
    [
        [ROWS[0], {"prompt": "w1"}, *ROWS],
        [row | {"share": math.nan} for row in ROWS],
    ],
    ids=["a row without an answer", "a number that Python cannot read back"],
)
def test_a_reward_of_odd_rows_passes_its_own_test(
    rows: list[dict[str, Any]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_prompts(folder, rows)
    flags = ["--model", "model", "--prompts", "prompts.jsonl", "--out", 'my """ folder']
    assert cli.main(["init", *flags]) == 0
    capsys.readouterr()
    runpy.run_path('my """ folder/reward.py', run_name="__main__")
    assert capsys.readouterr().out == "the reward does what its test says\n"


def test_an_answer_that_ends_before_it_is_given_is_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By Ctrl-D."""

    def end(*_: Any) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert cli.main(["init", "--model", "model"]) == 2
    assert "--prompts is missing, and the answer ended" in capsys.readouterr().err


def test_a_person_is_asked_what_no_flag_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "game.py").write_text(
        "class Game:\n"
        "    def reset(self, prompt): ...\n"
        "    def step(self, text):\n"
        "        return '', 1.0, True\n"
    )
    answers = iter(["", "prompts.jsonl", "game.py:Game", ""])  # the first is asked again
    monkeypatch.setattr("builtins.input", lambda *_: next(answers))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert cli.main(["init", "--model", "model", "--out", "mine"]) == 0
    assert next(answers, None) is None
    assert not (folder / "mine" / "reward.py").exists()
    assert 'environment: "game.py:Game"' in (folder / "mine" / "run.yaml").read_text()


def test_nothing_is_written_over_and_nothing_is_asked_of_nobody(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", "--model", "model"]) == 2
    assert "--prompts is missing" in capsys.readouterr().err
    (folder / "reward.py").write_text("mine = 1\n")
    assert cli.main(["init", "--model", "model", "--prompts", "prompts.jsonl"]) == 2
    assert "reward.py exists already" in capsys.readouterr().err
    assert not (folder / "run.yaml").exists()
