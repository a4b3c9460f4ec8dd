"""The tilted base and best of n, against closed forms."""

from __future__ import annotations

import math
import re
from statistics import NormalDist

import numpy as np
import pytest

from fastppo.rewards.limit import (
    LEAST_EFFECTIVE,
    base_reward,
    best_of,
    best_of_several,
    curve,
    farthest_shown,
    limit,
    most_of_gain,
    share_of_gain,
    shows,
    tilted,
)

COUNTS = np.array([5, 3, 2])
REWARDS = np.array([0.0, 1.0, 3.0])
SAMPLES = np.repeat(REWARDS, COUNTS)[None]
"""One prompt with three answers, drawn just as often as the base does: probabilities 0.5, 0.3 and
0.2."""


def _exact(beta: float) -> tuple[float, float]:
    """(reward, KL) of the tilted distribution over three answers."""
    base = COUNTS / COUNTS.sum()
    policy = base * np.exp(REWARDS / beta)
    policy /= policy.sum()
    return float(policy @ REWARDS), float(policy @ np.log(policy / base))


@pytest.mark.parametrize("beta", [0.2, 0.7, 3.0, 100.0])
def test_a_tilt_of_exact_samples_is_the_tilted_distribution(beta: float) -> None:
    found = tilted(SAMPLES, beta)
    assert (found.reward, found.kl) == pytest.approx(_exact(beta), abs=1e-12)


def test_the_limit_is_the_tilt_of_that_kl_and_earns_most_there() -> None:
    reward, kl = _exact(0.9)
    found = limit(SAMPLES, kl)
    assert found.beta == pytest.approx(0.9, rel=1e-9)
    assert found.reward == pytest.approx(reward)
    base = COUNTS / COUNTS.sum()
    draw = np.random.default_rng(0)
    for _ in range(200):  # any other policy, moved along its line from the base to that KL
        other, low, high = draw.dirichlet(np.ones(3)), 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            policy = base + middle * (other - base)
            low, high = (middle, high) if policy @ np.log(policy / base) < kl else (low, middle)
        policy = base + low * (other - base)
        if low < 1 - 1e-6:  # else it does not go as far
            assert policy @ REWARDS <= reward + 1e-9


def test_of_normal_rewards_the_gain_is_the_root_of_twice_the_kl() -> None:
    """r ~ N(μ, σ²): the tilt is N(μ + σ²/β, σ²), its KL σ²/(2β²)."""
    grid = [NormalDist(0.5, 2.0).inv_cdf((i + 0.5) / 20_000) for i in range(20_000)]
    for kl in (0.1, 0.5, 1.0, 2.0):
        assert limit([grid], kl).reward == pytest.approx(0.5 + 2 * math.sqrt(2 * kl), abs=0.02)


def test_one_beta_for_all_prompts_earns_more_than_the_same_kl_for_each() -> None:
    flat, steep = [0.0, 0.1] * 8, [0.0, 1.0] * 8
    both = limit([flat, steep], 0.3)
    apart = (limit([flat], 0.3).reward + limit([steep], 0.3).reward) / 2
    assert both.kl == pytest.approx(0.3)
    assert both.reward > apart + 0.01


def test_effective_samples_say_how_many_answers_count() -> None:
    assert tilted(SAMPLES, 1e6).effective_samples == pytest.approx(10, rel=1e-4)
    assert tilted(SAMPLES, 0.01).effective_samples == pytest.approx(2), "the two best"


def test_a_kl_beyond_the_samples_is_answered_with_the_best_of_them() -> None:
    found = limit(SAMPLES, 50.0)
    assert found.reward == pytest.approx(3.0)
    assert found.kl == pytest.approx(math.log(10 / 2))


def test_where_all_is_one_there_is_nothing_to_gain() -> None:
    found = limit([[0.5] * 4], 1.0)
    assert (found.reward, found.kl) == (0.5, 0.0)
    assert math.isnan(share_of_gain([[0.5] * 4], 0.7, 1.0))


@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_best_of_n_of_the_numbers_to_m_is_the_textbooks(n: int) -> None:
    """E max of n of 1 … m, without putting back: n(m + 1)/(n + 1)."""
    numbers = [list(range(1, 13))]
    assert best_of(numbers, n).reward == pytest.approx(n * 13 / (n + 1))


@pytest.mark.parametrize("n", [2, 4, 16])
def test_best_of_n_is_as_far_away_as_its_draws_differ(n: int) -> None:
    """Where none tie it is log n − (n − 1)/n; where a verifier pays 0 or 1, it is less."""
    apart = [list(range(4096))]
    assert best_of(apart, n).kl == pytest.approx(math.log(n) - (n - 1) / n, abs=0.01)
    p = 0.25
    wrong, right = (1 - p) ** n, 1 - (1 - p) ** n
    kl = wrong * math.log(wrong / (1 - p)) + right * math.log(right / p)
    paid = [[0.0] * 48 + [1.0] * 16]
    assert best_of(paid, n).kl == pytest.approx(kl)
    assert kl < math.log(n) - (n - 1) / n
    assert best_of([[0.5] * 16], n).kl == 0.0


@pytest.mark.parametrize(("n", "mean"), [(2, 0.5642), (4, 1.0294), (8, 1.4236)])
def test_best_of_n_of_normal_rewards_has_nine_tenths_of_the_limits_gain(
    n: int, mean: float
) -> None:
    """E max of n standard normals, from the tables of order statistics."""
    draws = np.random.default_rng(1).normal(size=(8, 4096))
    found = best_of(draws, n)
    assert found.reward == pytest.approx(mean, abs=0.02)  # 32768 draws
    share = share_of_gain(draws, found.reward, found.kl)
    assert share == pytest.approx(mean / math.sqrt(2 * found.kl), abs=0.02)
    assert 0.9 < share < 0.93


def test_the_share_is_one_at_the_limit_and_none_at_the_base() -> None:
    found = tilted(SAMPLES, 0.9)
    assert share_of_gain(SAMPLES, found.reward, found.kl) == pytest.approx(1)
    assert share_of_gain(SAMPLES, float(SAMPLES.mean()), found.kl) == pytest.approx(0)
    assert math.isnan(share_of_gain(SAMPLES, 2.0, -0.01)), "no KL, no gain to share"


def test_a_limit_is_shown_as_far_as_enough_samples_carry_it() -> None:
    """Of 64 normal rewards to a prompt the estimate falls behind the truth, √(2·KL), before log 64,
    where it ends."""
    draws = np.random.default_rng(2).normal(size=(64, 64))
    for kl, shown in ((0.1, True), (1.3, True), (3.0, False), (math.log(64) + 0.1, False)):
        found = limit(draws, kl)
        assert shows(found, kl) == shown, kl
        behind = 1 - found.reward / math.sqrt(2 * kl)
        assert (abs(behind) < 0.05) if shown else (behind > 0.1), kl
    assert not shows(limit(np.repeat(draws, 4, 1), 6.0), 6.0), "many, but not as far"
    assert not shows(tilted(draws[:, : int(LEAST_EFFECTIVE) - 1], 1e6), 0.0), "as far, but few"


@pytest.mark.parametrize("spread", [0.4, 0.8, 1.2])
def test_prompts_that_earn_most_are_not_carried_by_others_samples(spread: float) -> None:
    """Normal rewards whose deviation σ differs by prompt: the limit gains √(2·KL·mean σ²), nearly
    all of it where σ is large and few samples count. What is shown is too low by an eighth at
    most, on the average of twenty; the plain mean of the effective samples lets up to two fifths be
    missing."""
    draw, behind, plain = np.random.default_rng(0), [], []
    for _ in range(20):
        sigma = np.exp(spread * draw.normal(size=(24, 1)))
        rewards = sigma * draw.normal(size=(24, 64))
        end = farthest_shown(rewards)
        assert end is not None
        true = math.sqrt(2 * end.kl * (sigma**2).mean())
        behind.append(1 - (end.reward - base_reward(rewards)) / true)
        each = [tilted(row[None], end.beta).effective_samples for row in rewards]
        plain.append(np.mean(each))
    assert -0.02 < np.mean(behind) < 0.12
    assert np.mean(plain) > 1.5 * LEAST_EFFECTIVE


def test_beyond_what_is_shown_the_limit_is_no_lower_than_at_its_end() -> None:
    draws = np.random.default_rng(0).normal(size=(24, 64))
    end = farthest_shown(draws)
    assert end is not None
    assert end.effective_samples == pytest.approx(LEAST_EFFECTIVE)
    assert shows(limit(draws, end.kl * 0.99), end.kl * 0.99)
    assert not shows(limit(draws, end.kl * 1.01), end.kl * 1.01)
    half = (base_reward(draws) + end.reward) / 2
    beyond = end.kl + 1
    assert most_of_gain(draws, half, beyond) == pytest.approx(0.5)
    # of more draws of the same base the limit there is known, and the bound holds
    more = np.random.default_rng(1).normal(size=(24, 40_000))
    assert shows(limit(more, beyond), beyond)
    assert share_of_gain(more, half, beyond) < 0.5


@pytest.mark.parametrize(
    ("rewards", "reward", "kl"),
    [
        ([[0.0, 1.0] * 8], 0.9, 0.5),  # shown
        ([[0.0, 1.0] * 8], 0.4, 5.0),  # below the base
        ([[0.0, 1.0] * 8], 1.1, 5.0),  # beyond the end
        ([[0.0, 1.0]], 0.9, 5.0),  # of two samples
        ([[0.5] * 8], 0.9, 5.0),  # nothing to earn
    ],
)
def test_where_there_is_no_such_bound_there_is_none(rewards, reward: float, kl: float) -> None:
    assert math.isnan(most_of_gain(rewards, reward, kl))


def test_a_limit_ends_where_it_is_first_not_shown() -> None:
    """A jackpot that one prompt drew once gains most of a flat tilt, and little of a sharp one."""
    rewards = [[10.0] + [0.0] * 63] + [[0.0, 1.0] * 32] * 200
    shown = [shows(limit(rewards, kl), kl) for kl in (0.01, 0.1, 0.5)]
    assert shown == [True, False, True]
    end = farthest_shown(rewards)
    assert end is not None
    assert 0.01 < end.kl < 0.1


def test_a_limit_of_few_samples_is_none_whoever_has_more() -> None:
    few, many = [0.0, 5.0, *[None] * 62], [0.0, 0.1] * 32
    assert farthest_shown([few] * 13 + [many] * 11) is None


def test_dropped_samples_count_for_nothing() -> None:
    whole = [[0.0, 1.0, 3.0, 1.0], [0.5, 0.0, 0.25, 1.0]]
    parted = [[None, 0.0, 1.0, 3.0, 1.0], [0.5, None, 0.0, 0.25, 1.0], [None, None, None, None, 9]]
    assert base_reward(parted) == base_reward(whole)
    assert tilted(parted, 0.7) == pytest.approx(tilted(whole, 0.7))
    assert limit(parted, 0.3) == pytest.approx(limit(whole, 0.3))
    assert best_of_several(parted) == best_of_several(whole)
    uneven = [[0.0, 1.0, None, None], [0.0, 1.0, 2.0, 3.0]]
    assert [each.n for each in best_of_several(uneven)] == [2]
    assert best_of(uneven, 2).reward == pytest.approx((1 + 14 / 6) / 2)
    assert limit([[2.0, 2.0, None]], 1.0).effective_samples == 2


def test_a_curve_rises_with_the_kl() -> None:
    rewards = [each.reward for each in curve(SAMPLES, [0.0, 0.2, 0.5, 1.0, 1.5])]
    assert rewards[0] == pytest.approx(SAMPLES.mean(), abs=1e-5)
    assert rewards == sorted(rewards)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: tilted([1.0, 2.0], 1.0), "rewards must be [prompts, samples]"),
        (lambda: tilted([[1.0]], 1.0), "two samples or more, got (1, 1)"),
        (lambda: tilted([[1.0, math.nan]], 1.0), "rewards must be finite"),
        (lambda: tilted([[1.0, None], [None] * 2], 1.0), "two samples or more of a prompt"),
        (lambda: tilted([[1.0, 2.0]], 0.0), "beta must be > 0, got 0.0"),
        (lambda: limit([[1.0, 2.0]], -1.0), "kl must be >= 0, got -1.0"),
        (lambda: best_of([[1.0, 2.0]], 3), "n must be in [1, 2], the number of samples, got 3"),
    ],
)
def test_what_has_no_limit_is_refused_in_a_sentence(call, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        call()
