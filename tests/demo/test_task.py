"""The demo's gold reward, grammar and data."""

from __future__ import annotations

import random

import pytest

from fastppo.demo.task import (
    _SENTENCE,
    MAX_SENTENCES,
    describe,
    gold_reward,
    make_data,
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
def test_the_gold_reward_prefers_friendly_descriptions_of_the_right_creature(
    completion: str, gold: float
) -> None:
    assert gold_reward([PROMPT], [completion])[0] == pytest.approx(gold)


def test_descriptions_follow_the_grammar_and_name_the_creature() -> None:
    draw = random.Random(0)
    for _ in range(300):
        text = describe(PROMPT, draw)
        *sentences, rest = (part.strip() for part in text.split("."))
        assert rest == ""
        assert 1 <= len(sentences) <= MAX_SENTENCES
        assert all(_SENTENCE.match(sentence) for sentence in sentences), text
        assert "fox" in sentences[0].split()


def test_the_seed_determines_the_data_and_held_out_prompts_are_unseen() -> None:
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
    assert 0.75 < right < 1.0  # labels are noisy
