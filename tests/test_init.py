"""`fastppo init`: the files that it writes are a run."""

from __future__ import annotations

import io
import json
import math
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from processes import ROOT

from fastppo import cli
from fastppo.init import RESPONSE, SIZES
from fastppo.ppo.options.config import PPOConfig

ROWS = [{"prompt": f"w{i} w{i + 1}", "answer": f"w{i + 2}"} for i in range(8)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and prompts, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
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
    said = " ".join(capsys.readouterr().out.split())
    assert "32 responses of 16 tokens at most to 8 prompts, with repetition" in said
    assert "12 iterations, 24 optimiser steps, 6,144 tokens to draw at most" in said
    assert "at the peak of each phase" in said
    assert "no GPU: docs/ten-minutes.md says what 135 M parameters took" in said
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


def test_a_reward_is_written_of_rows_with_an_answer_that_python_can_write(folder: Path) -> None:
    """Not of NaN, and not of an empty answer, which every completion has."""
    rows = [
        {"prompt": "w1"},
        {"prompt": "w2", "answer": ""},
        {"prompt": "w3", "answer": float("nan")},
        {"prompt": "w4", "answer": 0, "weight": float("nan"), "tags": ["a"]},
        {"prompt": "w5", "answer": "w6 {}", "weight": 1.0},
    ]
    _write_prompts(folder, rows)
    assert cli.main(["init", "--model", "model", "--prompts", "prompts.jsonl"]) == 0
    reward = runpy.run_path("reward.py", run_name="__main__")
    assert reward["ROWS"] == [
        {"prompt": "w4", "answer": 0, "tags": ["a"]},
        {"prompt": "w5", "answer": "w6 {}", "tags": None},
    ]
    assert reward["score"](["w1"] * 3, ["", "None", "0"], ["", None, 0]) == [0.0, 0.0, 1.0]


def test_without_an_answer_the_reward_pays_responses_of_a_language_model_differently(
    folder: Path,
) -> None:
    """One that pays the ends of sentences gave 32 responses of 16 tokens the same, nothing."""
    _write_prompts(folder, [{"prompt": "w1"}])
    assert cli.main(["init", "--model", "model", "--prompts", "prompts.jsonl"]) == 0
    score = runpy.run_path("reward.py")["score"]
    assert score(["On"] * 2, [" Sundays we sleep", " Monday I work"]) == [[(8, 0.1), (17, 0.1)], []]


def test_names_stand_in_the_yaml_as_they_are(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a character beyond 16 bits, and of brackets, which are no markup."""
    Path("prompts.jsonl").rename("préguntas 🙂.jsonl")
    flags = ["--model", "model", "--prompts", "préguntas 🙂.jsonl", "--out", "[bold]"]
    assert cli.main(["init", *flags]) == 0
    assert "wrote [bold]/run.yaml\n" in capsys.readouterr().out
    assert 'prompts: "préguntas 🙂.jsonl"' in Path("[bold]/run.yaml").read_text("utf-8")
    assert cli.main(["check", "--config", "[bold]/run.yaml"]) == 0


def test_the_next_command_can_be_copied(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "model", "--prompts", "prompts.jsonl", "--out", "my run"]
    assert cli.main(["init", *flags]) == 0
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(shown.removeprefix("next: "))[1:] == ["train", "--config", "my run/run.yaml"]


def test_a_response_is_as_long_as_the_context_has_room_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(Path("model/config.json").read_text()) | {"max_position_embeddings": 10}
    Path("model/config.json").write_text(json.dumps(config))
    flags = ["--model", "model", "--prompts", "prompts.jsonl"]
    assert cli.main(["init", *flags, "--out", "short"]) == 0
    assert "32 responses of 8 tokens at most" in capsys.readouterr().out
    _write_prompts(folder, [*ROWS, {"prompt": "w1 " * 20, "answer": "w1"}])
    assert cli.main(["init", *flags, "--out", "long"]) == 2
    assert "prompts.jsonl, row 9: the prompt has 20 tokens" in capsys.readouterr().err
    assert not Path("long").exists()


def test_sizes_are_the_defaults_on_a_gpu_and_those_of_a_page_that_was_run_on_a_cpu() -> None:
    sizes = {
        device: yaml.safe_load(text.format(max_new_tokens=RESPONSE[device]))
        for device, text in SIZES.items()
    }
    defaults = PPOConfig().to_dict()
    assert sizes["cuda"] == {name: defaults[name] for name in sizes["cuda"]}
    page = (ROOT / "docs" / "ten-minutes.md").read_text("utf-8")
    run = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    others = ["model", "prompts", "rewards", "output_dir"]
    others += ["eval_prompts", "eval_interval", "checkpoint_interval"]
    assert sizes["cpu"] == {name: value for name, value in run.items() if name not in others}


def test_nothing_is_written_where_what_is_named_cannot_be_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text("def score(prompts, completions): raise OSError('no judge')\n")
    flags = ["--model", "model", "--prompts", "prompts.jsonl", "--out", "mine", "--reward"]
    assert cli.main(["init", *flags, "mine.py:score"]) == 1
    assert "no judge" in capsys.readouterr().err
    assert cli.main(["init", *flags, "runs/absent"]) == 2
    assert "reward runs/absent: there is no such directory" in capsys.readouterr().err
    assert not Path("mine").exists()


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
    written = yaml.safe_load((folder / "mine" / "run.yaml").read_text())
    assert (written["environment"], written["max_turns"]) == ("game.py:Game", 8)
    assert "32 responses of 8 turns of 16 tokens at most" in capsys.readouterr().out


def test_nothing_is_written_over_and_nothing_is_asked_of_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a terminal's input ends, without a terminal, and without a stdin."""
    ended = io.StringIO()
    monkeypatch.setattr(ended, "isatty", lambda: True)
    for stdin, says in (
        (ended, "--prompts has no answer: the input has ended"),
        (io.StringIO(), "--prompts is missing"),
        (None, "--prompts is missing"),
    ):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert cli.main(["init", "--model", "model"]) == 2
        assert says in capsys.readouterr().err
    (folder / "reward.py").write_text("mine = 1\n")
    assert cli.main(["init", "--model", "model", "--prompts", "prompts.jsonl"]) == 2
    assert "reward.py exists already" in capsys.readouterr().err
    assert not (folder / "run.yaml").exists()
