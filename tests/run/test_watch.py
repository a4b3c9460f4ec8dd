"""Metrics of reward hacking in closed form, and thresholds."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fastppo.ppo.options.run import WARNINGS
from fastppo.run.watch import (
    ABSENT_AFTER,
    PAGE,
    PAGE_ITEMS,
    Threshold,
    Watch,
    advice,
    crossed,
    parse_threshold,
    rollout_health,
)

# ----------------------------------------------------------------------------------- the responses


def test_correlations_agree_with_numpy() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 50)
    scores, gold = rng.normal(size=50), rng.normal(size=50)
    health = rollout_health([[0] * n for n in lengths], torch.tensor(scores), {"gold": list(gold)})
    assert health["length_correlation"] == pytest.approx(np.corrcoef(lengths, scores)[0, 1])
    assert health["correlation/gold"] == pytest.approx(np.corrcoef(gold, scores)[0, 1])
    part = [math.nan] * 20 + list(gold[20:])  # does not apply to the first 20
    health = rollout_health([[0]] * 50, torch.tensor(scores), {"gold": part})
    assert health["correlation/gold"] == pytest.approx(np.corrcoef(gold[20:], scores[20:])[0, 1])


@pytest.mark.parametrize(
    ("responses", "scores", "gold"),
    [
        ([[1, 2], [3, 4]], [0.0, 1.0], [0.5, 0.5]),  # equal lengths, a constant gold reward
        ([[1], [3, 4]], [0.1, 0.1], [0.0, 1.0]),  # a constant score
        ([[1]], [0.1], [0.0]),  # one response
    ],
)
def test_a_correlation_with_a_constant_is_absent(responses, scores, gold) -> None:
    health = rollout_health(responses, scores, {"gold": gold})
    assert not {"length_correlation", "correlation/gold"} & health.keys()
    assert all(math.isfinite(value) for value in health.values())


def test_distinct_ngrams_are_a_mean_over_responses_with_ngrams() -> None:
    health = rollout_health([[5, 5, 5], [1, 2], [9]], [0.0, 0.0, 0.0])
    assert health["distinct_1"] == pytest.approx((1 / 3 + 1 + 1) / 3)
    assert health["distinct_2"] == pytest.approx((1 / 2 + 1) / 2)
    assert "distinct_2" not in rollout_health([[9]], [0.0])
    assert rollout_health([[7, 8] * 8], [0.0])["distinct_2"] == 2 / 15  # a loop
    assert rollout_health([], [], {"gold": []}) == {}
    assert rollout_health([[1, 2]] * 4, [0.0] * 4)["unique_responses"] == 0.25


# -------------------------------------------------------------------------------------- thresholds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kl > 20", Threshold("kl", ">", 20.0)),
        ("  entropy<5e-1 ", Threshold("entropy", "<", 0.5)),
        ("correlation/my-gold-1.5b <= -0.1", Threshold("correlation/my-gold-1.5b", "<=", -0.1)),
    ],
)
def test_a_threshold_is_parsed_and_printed(text: str, expected: Threshold) -> None:
    assert parse_threshold(text) == expected
    assert parse_threshold(str(expected)) == expected


@pytest.mark.parametrize("text", ["kl => 20", "kl > x", "kl > nan", 20])
def test_other_texts_are_refused_with_the_name_of_the_option(text) -> None:
    with pytest.raises(ValueError, match=r"^warn_if ") as caught:
        parse_threshold(text, "warn_if")
    assert repr(text) in str(caught.value)


def test_crossed_thresholds_are_sentences_with_the_value() -> None:
    watched = [parse_threshold(t) for t in ("kl > 20", "entropy < 0.5", "kl >= 31.25", "x > 0")]
    metrics = {"kl": 31.25, "entropy": 0.7}
    assert crossed(watched, metrics) == ["kl = 31.2 > 20", "kl = 31.25 >= 31.25"]
    assert crossed(watched, {"kl": 20.0, "entropy": 0.5}) == []
    assert crossed(watched, {"entropy": 0.123456}) == ["entropy = 0.123 < 0.5"]
    # With enough digits to show the side.
    assert crossed(watched, {"kl": 20.004}) == ["kl = 20.004 > 20"]
    for op, crosses in ((">", [0, 0, 1]), (">=", [0, 1, 1]), ("<", [1, 0, 0]), ("<=", [1, 1, 0])):
        threshold = Threshold("m", op, 2.0)
        assert [len(crossed([threshold], {"m": x})) for x in (1.0, 2.0, 3.0)] == crosses, op


def test_nan_crosses_every_threshold() -> None:
    watched = [Threshold("kl", ">", 20.0)]
    assert crossed(watched, {"kl": math.nan}) == ["kl = nan, watched for kl > 20"]
    assert crossed(watched, {"kl": math.inf}) == ["kl = inf > 20"]
    assert crossed(watched, {"kl": None}) == crossed(watched, {"kl": ["a"]}) == []


# ------------------------------------------------------------------------------------------- Watch


def _watch(warn: str = "kl > 20", stop: str = "entropy < 0.5") -> Watch:
    warn_if, stop_if = [parse_threshold(warn)], [parse_threshold(stop)]
    return Watch(warn_if, stop_if, expected=[*warn_if, *stop_if])


def test_a_watch_warns_and_stops() -> None:
    watch = _watch()
    assert watch({"kl": 1.0, "entropy": 1.0}) == []
    assert watch.stopped_by == []
    assert watch({"kl": 21.0, "entropy": 0.4}) == ["kl = 21 > 20"]
    assert watch.stopped_by == ["entropy = 0.4 < 0.5"]
    assert watch({"kl": 1.0, "entropy": 1.0}) == []
    assert watch.stopped_by == []


def test_equal_rewards_give_one_warning() -> None:
    watch = Watch([parse_threshold(warning) for warning in WARNINGS])
    (warning,) = watch({"reward_std": 0.0, "advantage_std": 0.0})
    assert advice(warning).startswith(": all responses got the same reward (see ")
    assert watch({"reward_std": 0.5, "advantage_std": 0.0}) == ["advantage_std = 0 < 0.0001"]


def test_a_falling_eos_rate_gives_one_warning() -> None:
    watch = Watch([parse_threshold("eos_rate < 0.1"), parse_threshold("kl > 20")])
    assert watch({"eos_rate": 0.1, "kl": 1.0}) == []
    assert watch({"kl": 21.0}) == ["kl = 21 > 20"]
    assert watch({"eos_rate": 0.05, "kl": 21.0}) == ["eos_rate = 0.05 < 0.1", "kl = 21 > 20"]
    assert watch({"eos_rate": 0.04, "kl": 21.0}) == ["kl = 21 > 20"]
    assert watch({"eos_rate": 0.5, "kl": 1.0}) == []
    assert watch({"eos_rate": 0.0, "kl": 1.0}) == []


def test_responses_that_are_cut_off_from_the_start_are_meant_to_be() -> None:
    watch = Watch([parse_threshold("eos_rate < 0.1")])
    assert [watch({"eos_rate": rate}) for rate in (0.0, 0.02)] == [[], []]
    restored = Watch(watch.warn_if)
    restored.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert restored({"eos_rate": 0.0}) == []
    assert restored({"eos_rate": 0.3}) == []
    assert restored({"eos_rate": 0.0}) == ["eos_rate = 0 < 0.1"]
    episodes = Watch(watch.warn_if)  # a turn that is cut off ends its episode
    (warning,) = episodes({"eos_rate": 0.0, "turns": 1.0})
    assert (warning + advice(warning)).startswith("eos_rate = 0 < 0.1: responses are cut off, at ")
    assert episodes({"eos_rate": 0.0, "turns": 1.0}) == []


def test_a_missing_metric_is_reported_once_with_the_nearest_name() -> None:
    thresholds = [parse_threshold(text) for text in ("entropi > 1", "kl > 20", "rare > 0")]
    watch = Watch(expected=thresholds)
    sentences = []
    for i in range(ABSENT_AFTER + 3):
        rare = {"rare": 0.1} if i == 1 else {}
        sentences.append(watch({"kl": float(i), "entropy": 1.0} | rare))
    assert [len(of_iteration) for of_iteration in sentences] == [
        int(i == ABSENT_AFTER - 1) for i in range(ABSENT_AFTER + 3)
    ]
    (sentence,) = sentences[ABSENT_AFTER - 1]
    assert "'entropi'" in sentence
    assert sentence.endswith("entropy?"), "it suggests the nearest name"
    assert not any(Watch(thresholds)({"kl": 1.0}) for _ in range(ABSENT_AFTER))


def test_a_watch_is_restored() -> None:
    expected = [parse_threshold("speed > 1")]
    watch = Watch(expected=expected)
    assert watch({"kl": 1.0}) == []
    restored = Watch(expected=expected)
    restored.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    sentences = [restored({"kl": 1.0}) for _ in range(ABSENT_AFTER)]
    assert [len(of_iteration) for of_iteration in sentences] == [0] * (ABSENT_AFTER - 2) + [1, 0]
    assert "'speed'" in sentences[ABSENT_AFTER - 2][0]


def test_every_default_warning_has_an_item_in_troubleshooting() -> None:
    page = (Path(__file__).parents[2] / PAGE).read_text()
    section = page[page.index("## My run does not learn") : page.index("## My KL is negative")]
    for warning in WARNINGS:
        metric = parse_threshold(warning).metric
        number = PAGE_ITEMS[metric]
        (item,) = re.findall(rf"^{number}\. (.*?)(?=^\d+\. |\Z)", section, re.M | re.S)
        assert f"`{metric}" in item, metric
        assert advice(f"{metric} = 3 > 2").endswith(f" (see {PAGE}, item {number})")
