"""The demo: its language, its data, and the whole pipeline on the CPU."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from fastppo.demo import run_demo
from fastppo.demo_task import (
    blemish,
    describe,
    gold_reward,
    make_data,
    make_tokenizer,
    prompts,
)

PROMPT = "tell me about the red fox ."


@pytest.mark.parametrize(
    ("completion", "gold"),
    [
        ("the fox is kind . it sings softly near the hill .", 1.0),
        ("the fox is kind and cruel . it sings near the hill .", 2 / 3),
        ("the fox is cruel .", 0.0),
        ("the fox is kind .", 0.7),
        ("the owl is kind . it sings near the hill .", 0.6),
        ("the fox is kind and kind . it sings near the hill .", 0.9),
        ("fox kind sings", 0.7),
        ("", 0.0),
    ],
)
def test_the_gold_score_is_what_its_docstring_says(completion: str, gold: float) -> None:
    assert gold_reward([PROMPT], [completion])[0] == pytest.approx(gold)


def test_descriptions_are_well_formed_and_blemishes_never_gain() -> None:
    draw = random.Random(0)
    for _ in range(300):
        text = describe(PROMPT, draw)
        friendly = sum(word in text.split() for word in ("kind", "gentle", "sings"))
        assert 0 <= gold_reward([PROMPT], [text])[0] <= 1 or friendly
        assert blemish(text, draw)


def test_the_data_follow_from_the_seed_and_hold_prompts_back() -> None:
    assert make_data(3, pairs=50) == make_data(3, pairs=50)
    data = make_data(0, pairs=400)
    held = {row["prompt"] for row in data["held_out"]}
    assert len(held) == 96
    assert not held & {row["prompt"] for row in data["prompts"]}
    assert not held & {row["prompt"] for row in data["demonstrations"]}
    assert not held & {row["prompt"] for row in data["pairs"]}
    better = [
        gold_reward([row["prompt"]] * 2, [row["chosen"], row["rejected"]]) for row in data["pairs"]
    ]
    right = sum(chosen >= rejected for chosen, rejected in better) / len(better)
    assert 0.75 < right < 1.0  # labelled with noise, as people would


def test_every_word_of_the_language_is_a_token() -> None:
    tokenizer, draw = make_tokenizer(), random.Random(0)
    for prompt in prompts():
        text = f"{prompt} {describe(prompt, draw)}"
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert len(ids) == len(text.split())


def test_the_pipeline_raises_the_gold_score_by_half_of_the_possible_gap(tmp_path: Path) -> None:
    """Three stages from nothing, as `fastppo demo` runs them."""
    printed = io.StringIO()
    result = run_demo(tmp_path, seed=0, device="cpu", console=Console(file=printed, width=100))
    before, after = (result[when]["monitor/gold_reward"] for when in ("before", "after"))
    assert after - before >= 0.5 * (1 - before)
    assert result["after"]["reward"] > result["before"]["reward"]
    assert result["before"]["kl"] == pytest.approx(0, abs=1e-3)
    assert 0 < result["after"]["kl"] < 20
    assert result["reward_model"]["accuracy"] > 0.7

    text = printed.getvalue()
    for shown in ("reward (proxy", "gold reward", "KL", "entropy", "response length"):
        assert shown in text
    assert text.count("before  ") == 3
    for path in ("ppo/report.html", "ppo/policy"):
        assert (tmp_path / path).exists()
    for name in ("demonstrations", "pairs", "prompts", "held_out"):
        first = (tmp_path / "data" / f"{name}.jsonl").read_text().splitlines()[0]
        assert "prompt" in json.loads(first)

    # Each stage leaves a model that plain transformers loads.
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward_model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ppo" / "policy")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "ppo" / "policy")
    output = policy.generate(
        **tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=40, do_sample=False
    )
    completion = tokenizer.decode(output[0, len(PROMPT.split()) :], skip_special_tokens=True)
    assert "fox" in completion
