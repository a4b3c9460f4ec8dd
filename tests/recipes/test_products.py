"""Demonstrations and reward of the recipe `smollm2-tools`."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
from environments import Scripted
from rich.console import Console

from fastppo.data.datasets import load_rows
from fastppo.data.prompts import Prompts
from fastppo.environments.loading import load_environment
from fastppo.environments.turns import Turns
from fastppo.recipes import products
from fastppo.recipes.products_reward import right
from fastppo.recipes.products_tools import Products
from fastppo.rollout import Sampling


@pytest.fixture
def tokenizer() -> Any:
    """A tokenizer of bytes with SmolLM2's EOS."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.chat_template = products.CHAT_TEMPLATE
    return tokenizer


def test_a_demonstration_is_an_episode_of_the_run(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "GUESSED", 0.0)
    monkeypatch.setattr(products, "WRONG", 0.0)
    call, answer = products._demonstrations([(34, 57)], random.Random(0), tokenizer)
    eos = tokenizer.eos_token_id
    turns = [[*tokenizer(row["completion"])["input_ids"], eos] for row in (call, answer)]
    engine = Scripted(turns, stop=(eos,))
    term = load_environment(Products)
    assert term is not None
    episode_runner = Turns(term.function, tokenizer, max_turns=2)
    row = products._row(34, 57)
    prompts = Prompts([row["prompt"]], [[1]], {"answer": [row["answer"]]})
    _, rollout = episode_runner.run(
        prompts, engine, Sampling(max_new_tokens=99, stop_token_ids=(eos,))
    )
    read = [tokenizer.decode(asked[0]) for asked in engine.asked]
    assert read == [call["prompt"], answer["prompt"]]
    assert rollout.calls == [["answered"]]
    text = tokenizer.decode(rollout.tokens[0], skip_special_tokens=True)
    assert right([row["prompt"]], [text], [row["answer"]]) == [1.0]


def test_only_the_last_turn_is_scored() -> None:
    called = "<tool_call>…</tool_call>\ntool\n1938\nassistant\n"
    completions = [f"{called}1938", called, "1938", f"{called}It is 1938"]
    assert right([""] * 4, completions, ["1938"] * 4) == [1.0, 0.0, 1.0, 0.0]


def test_half_of_the_demonstrations_guess_and_none_is_a_prompt(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr(products, "DEMONSTRATIONS", 1000)
    monkeypatch.setattr(products.smollm2, "unpack", lambda folder: None)
    monkeypatch.setattr(products.AutoModelForCausalLM, "from_pretrained", lambda folder: None)
    monkeypatch.setattr(products.AutoTokenizer, "from_pretrained", lambda folder: tokenizer)
    monkeypatch.setattr(products, "train_sft", lambda config, rows, **_: shown.extend(rows))
    products.prepare(tmp_path, 0, Console(file=io.StringIO()))
    first_turns = [row for row in shown if "tool\n" not in row["prompt"]]
    guesses = [row for row in first_turns if "<tool_call>" not in row["completion"]]
    assert len(guesses) / len(first_turns) == pytest.approx(products.GUESSED, abs=0.05)
    rows = [
        *load_rows(str(tmp_path / "prompts.jsonl")),
        *load_rows(str(tmp_path / "held_out.jsonl")),
    ]
    questions = {row["prompt"][0]["content"] for row in rows}
    assert len(questions) == products.PROMPTS + products.HELD_OUT
    demonstrated = {re.findall("What is .*", row["prompt"])[0] for row in first_turns}
    assert len(demonstrated) == 1000
    assert demonstrated.isdisjoint({f"{question}<|im_end|>" for question in questions})
