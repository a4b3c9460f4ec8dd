"""Warnings from several iterations: an exploited reward, equal rewards, a solved task."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from fastppo.run.trends import NOISE, WINDOW, EqualRewards, Trends
from fastppo.run.watch import advice, kind_of

# ------------------------------------------------------------------------------------------ trends


def _trend(start: float, end: float, count: int, noise: float = 0.01) -> list[float]:
    rng = np.random.default_rng(0)
    return list(np.linspace(start, end, count) + noise * rng.normal(size=count))


def _warnings(trends: Trends, **series: list[float]) -> list[list[str]]:
    names = [name.replace("monitor_", "monitor/") for name in series]
    return [
        trends(dict(zip(names, row, strict=True))) for row in zip(*series.values(), strict=True)
    ]


def test_a_reward_that_rises_while_a_monitored_one_falls_is_reported_once() -> None:
    rising, falling = [0.0, 0.0, 1.0, 1.0], [1.0, 0.5, 0.25, 0.25]
    reward = [x for x in rising for _ in range(WINDOW)]
    gold = [x for x in falling for _ in range(WINDOW)]
    said = _warnings(Trends(), reward=reward, monitor_gold=gold, monitor_kept=reward)
    (warning,) = [sentence for of_iteration in said for sentence in of_iteration]
    assert said.index([warning]) >= 2 * WINDOW - 1
    assert warning.startswith("monitor/gold fell from 1 to ")
    assert " while reward rose from 0 to " in warning
    assert advice(warning).endswith("item 7)")


@pytest.mark.parametrize(
    ("reward", "gold"),
    [
        (_trend(0, 1, 40), _trend(0, 1, 40)),  # both rise
        (_trend(1, 0, 40), _trend(1, 0, 40)),  # both fall
        (_trend(0, 1, 40), _trend(0.5, 0.5, 40, noise=0.3)),  # noise
        (_trend(0, 1, 2 * WINDOW - 1), _trend(1, 0, 2 * WINDOW - 1)),  # too few iterations
    ],
)
def test_other_trends_are_not_reported(reward: list[float], gold: list[float]) -> None:
    assert not any(_warnings(Trends(), reward=reward, monitor_gold=gold))


@pytest.mark.parametrize(("end", "verb"), [(60.0, "rose"), (10.0, "fell"), (24.0, "")])
def test_a_length_that_changes_much_while_the_reward_rises_is_reported(
    end: float, verb: str
) -> None:
    said = _warnings(Trends(), reward=_trend(0, 1, 40), response_length=_trend(20.0, end, 40))
    sentences = [sentence for of_iteration in said for sentence in of_iteration]
    assert len(sentences) == bool(verb)
    for sentence in sentences:
        assert sentence.startswith(f"response_length {verb} from ")
        assert advice(sentence).endswith("item 9)")


def test_held_out_rewards_are_compared_with_those_before_training() -> None:
    trends = Trends()
    before = {"before/reward": 0.2, "before/reward_error": 0.01}
    before |= {"before/monitor/gold": 0.5, "before/monitor_error/gold": 0.01}
    assert trends({"reward": 0.2, **before}) == []
    small = NOISE * math.hypot(0.01, 0.01) * 0.9
    evaluated = {"eval/reward": 0.4, "eval/reward_error": 0.01, "eval/monitor_error/gold": 0.01}
    assert trends({"reward": 0.3, **evaluated, "eval/monitor/gold": 0.5 - small}) == []
    (warning,) = trends({"reward": 0.3, **evaluated, "eval/monitor/gold": 0.4})
    assert warning.startswith("eval/monitor/gold fell from 0.5 to 0.4 while eval/reward rose from ")
    assert advice(warning).endswith("item 7)")
    assert trends({"reward": 0.3, **evaluated, "eval/monitor/gold": 0.3}) == []


def test_trends_continue_after_a_resume() -> None:
    series = {"reward": _trend(0, 1, 40), "monitor_gold": _trend(1, 0, 40)}
    series["response_length"] = _trend(20, 60, 40)
    whole = _warnings(Trends(), **series)
    for cut in (3, 15, 35):
        first, second = Trends(), Trends()
        said = _warnings(first, **{name: values[:cut] for name, values in series.items()})
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        said += _warnings(second, **{name: values[cut:] for name, values in series.items()})
        assert said == whole


# ----------------------------------------------------------------------------------- equal rewards

EQUAL = ["reward_std = 0 < 0.0001", "advantage_std = 0 < 0.0001", "kl = 60 > 50"]


def _metrics(reward: float, highest: float | None = None) -> dict[str, Any]:
    return {"reward": reward, "reward_max": reward if highest is None else highest}


def test_equal_rewards_are_reported_once() -> None:
    equal = EqualRewards()
    assert equal(EQUAL, _metrics(0.0)) == ["reward_std = 0 < 0.0001", "kl = 60 > 50"]
    assert equal(EQUAL, _metrics(0.0)) == ["kl = 60 > 50"]
    assert equal(["kl = 60 > 50"], _metrics(0.5, 1.0)) == ["kl = 60 > 50"]
    assert equal(EQUAL, _metrics(0.5)) == ["kl = 60 > 50"], "a response had 1"


def test_a_solved_task_is_no_warning_about_equal_rewards() -> None:
    equal = EqualRewards()
    assert equal([], _metrics(0.25, 1.0)) == []
    (solved,) = equal(EQUAL[:2], _metrics(1.0 - 1e-7))
    assert kind_of(solved).startswith("solved: ")
    restored = EqualRewards()
    restored.load_state_dict(json.loads(json.dumps(equal.state_dict())))
    for again in (equal, restored):
        assert again(EQUAL[:2], _metrics(1.0)) == []
        assert again(EQUAL[:2], _metrics(0.0)) == EQUAL[:1], "a collapse after it"
        assert again(EQUAL[:2], _metrics(0.0)) == []
    fresh = EqualRewards()
    fresh.load_state_dict(json.loads(json.dumps(EqualRewards().state_dict())))
    assert fresh(EQUAL[:1], _metrics(1.0)) == EQUAL[:1], "equal from the start"
