"""What a policy could earn at a KL to its base, from samples of the base alone.

Among all policies at a distance k from the base, KL(π‖base) averaged over the prompts, none earns
more than the tilted one

    π*(y|x) ∝ base(y|x)·e^{r(x, y)/β},   with the β at which its KL is k

(Gibbs; Ziegler et al. 2019, eq. 2). With m samples of the base to a prompt, the weight of a sample
is w_i = e^{r_i/β}/Σ e^{r_j/β}, and

    reward Σ w_i r_i      KL Σ w_i log(m·w_i)      effective samples 1/Σ w_i²

β is the same for all prompts: that spends the KL where it earns most. A KL above log m cannot be
seen in m samples; few effective samples mean that the reward is that of a handful of lucky ones,
less than what the base could be tilted to. What is lacking goes with one over the effective samples
of a prompt, and weighs as much as the prompt gains, so over the prompts they are joined by their
harmonic mean with those weights. `shows` says where the estimate is to be believed: for normal
rewards it is then 1 to 10 % too low on the average, the more the less alike the prompts are, and
one estimate by 64 samples is off by as much again.

A sample that the reward dropped is None: it counts for nothing, and a prompt with fewer than two
others is left out.

Best of n draws is nearly as good as the tilt; of normal rewards it has nine tenths of the gain. Its
KL is at most log n − (n − 1)/n (Beirami et al. 2024), and less where draws tie, as those of a
verifier do: a reward v that the base earns with probability p(v), and no more than v with
probability F(v), is the best of n with probability q(v) = F(v)ⁿ − F(v⁻)ⁿ, and drawing among equals
at random costs nothing, so the KL is Σ q log(q/p).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

BEST_OF = (2, 4, 8, 16)
"""n that stand beside a policy, where there are as many samples."""

LEAST_EFFECTIVE = 6.0
"""Effective samples to a prompt below which the limit is not shown: it would be too low."""

HALVINGS = 100
"""Of the interval of log β: far more than a float's digits."""

STEPS = 281
"""Of log β from flat to sharp: a tenth of a nat of it each."""


BaseRewards = list[list[float | None]]
"""[prompts, samples]: of samples of the base; None where the reward dropped the sample."""


class Tilted(NamedTuple):
    """The base tilted by e^{r/β}: means over the prompts."""

    reward: float
    kl: float
    """Nats per response."""
    effective_samples: float
    """To a prompt: the harmonic mean, weighted by what each prompt gains."""
    beta: float


class BestOf(NamedTuple):
    """The best of n draws of the base, ties broken at random: means over the prompts."""

    n: int
    reward: float
    kl: float
    """Nats per response."""


def _samples(rewards: Any) -> np.ndarray:
    """[prompts, samples] fp64: NaN for a sample that was dropped, without the prompts that have
    fewer than two others.

    Raises:
        ValueError: another shape, a number that is not finite, or no prompt with two samples.
    """
    try:
        given = np.asarray(rewards)
        dropped = np.asarray(given == np.array(None), dtype=bool)
        array = given.astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError("rewards must be as many numbers for each prompt") from None
    if array.ndim != 2 or array.shape[0] < 1 or array.shape[1] < 2:
        raise ValueError(
            f"rewards must be [prompts, samples] with two samples or more, got {array.shape}"
        )
    if not np.isfinite(array[~dropped]).all():
        raise ValueError("rewards must be finite")
    array = array[(~dropped).sum(1) >= 2]
    if not len(array):
        raise ValueError("rewards must have two samples or more of a prompt that are not dropped")
    return array


def base_reward(rewards: Any) -> float:
    """The mean of what the base earns, over the prompts.

    Args:
        rewards: [prompts, samples] of samples of the base.
    """
    return float(np.nanmean(_samples(rewards), 1).mean())


def tilted(rewards: Any, beta: float) -> Tilted:
    """The tilted base at β.

    Args:
        rewards: [prompts, samples] of samples of the base.
        beta: above 0, reward units per nat.
    """
    if not beta > 0:
        raise ValueError(f"beta must be > 0, got {beta}")
    return _tilted(_samples(rewards), beta)


def _tilted(array: np.ndarray, beta: float) -> Tilted:
    log_weights = (array - np.nanmax(array, 1, keepdims=True)) / beta
    log_weights -= np.log(np.nansum(np.exp(log_weights), 1, keepdims=True))
    weights = np.exp(log_weights)
    # 0·log 0 is 0: a weight that underflows has a finite logarithm here.
    count = np.isfinite(array).sum(1, keepdims=True)
    kl = np.nansum(weights * (log_weights + np.log(count)), 1)
    reward = np.nansum(weights * array, 1)
    gain = np.maximum(reward - np.nanmean(array, 1), 0.0)
    shares = gain / gain.sum() if gain.sum() > 0 else np.full(len(gain), 1 / len(gain))
    effective = 1 / (shares * np.nansum(weights**2, 1)).sum()
    return Tilted(float(reward.mean()), float(kl.mean()), float(effective), float(beta))


def limit(rewards: Any, kl: float) -> Tilted:
    """The tilted base whose KL is `kl`, nats; the sharpest one that the samples show, where it is
    beyond what they can.

    Args:
        rewards: [prompts, samples] of samples of the base.
    """
    array = _samples(rewards)
    if kl < 0:
        raise ValueError(f"kl must be >= 0, got {kl}")
    spread = float((np.nanmax(array, 1) - np.nanmin(array, 1)).max())
    if spread == 0:  # nothing to earn
        count = np.isfinite(array).sum(1).mean()
        return Tilted(base_reward(rewards), 0.0, float(count), math.inf)
    sharp, flat = math.log(spread * 1e-6), math.log(spread * 1e6)
    if _tilted(array, math.exp(sharp)).kl <= kl:
        return _tilted(array, math.exp(sharp))
    for _ in range(HALVINGS):
        middle = (sharp + flat) / 2
        if _tilted(array, math.exp(middle)).kl > kl:
            sharp = middle
        else:
            flat = middle
    return _tilted(array, math.exp(flat))


def shows(found: Tilted, kl: float) -> bool:
    """Whether the samples show the limit at `kl`, of which `found` is what they say: it reaches
    that KL, by `LEAST_EFFECTIVE` samples or more."""
    reached = found.kl >= kl or math.isclose(found.kl, kl, rel_tol=1e-6, abs_tol=1e-9)
    return reached and found.effective_samples >= LEAST_EFFECTIVE


def farthest_shown(rewards: Any) -> Tilted | None:
    """The sharpest tilt up to which `LEAST_EFFECTIVE` samples or more carry every one; None where
    there are fewer samples, or nothing to earn.

    The limit rises with the KL, so one beyond this tilt's is no lower than its reward.
    """
    array = _samples(rewards)
    spread = float((np.nanmax(array, 1) - np.nanmin(array, 1)).max())
    if spread == 0:
        return None
    # From flat to sharp: who gains most changes on the way, and the number may rise again.
    steps = np.linspace(math.log(spread * 1e6), math.log(spread * 1e-6), STEPS)
    few = (_tilted(array, math.exp(x)).effective_samples < LEAST_EFFECTIVE for x in steps)
    first = next((i for i, is_few in enumerate(few) if is_few), None)
    if first == 0:
        return None
    if first is None:
        return _tilted(array, math.exp(steps[-1]))
    flat, sharp = steps[first - 1], steps[first]
    for _ in range(HALVINGS):
        middle = (sharp + flat) / 2
        if _tilted(array, math.exp(middle)).effective_samples < LEAST_EFFECTIVE:
            sharp = middle
        else:
            flat = middle
    return _tilted(array, math.exp(flat))


def best_of(rewards: Any, n: int) -> BestOf:
    """Best of n: the mean over all ways to draw n of a prompt's samples without putting back,

        Σ_i C(i − 1, n − 1)·r_(i) / C(m, n),   r_(i) the i-th smallest,

    which is unbiased for n independent draws. The KL is that of n draws from the samples with
    putting back, which is a little low where the best are rare.

    Args:
        rewards: [prompts, samples] of samples of the base, n samples or more to each prompt.
    """
    array = _samples(rewards)
    fewest = int(np.isfinite(array).sum(1).min())
    if not 1 <= n <= fewest:
        raise ValueError(f"n must be in [1, {fewest}], the number of samples, got {n}")
    means, kls = [], []
    for ranked in (np.sort(row[np.isfinite(row)]) for row in array):
        m = len(ranked)
        chosen = np.array([math.comb(i, n - 1) / math.comb(m, n) for i in range(m)])
        means.append(float(ranked @ chosen))
        share = np.unique(ranked, return_counts=True)[1] / m
        best = np.diff(np.cumsum(share) ** n, prepend=0.0)
        kls.append(float(np.sum(best * np.log(np.maximum(best, np.finfo(float).tiny) / share))))
    return BestOf(n, float(np.mean(means)), float(np.mean(kls)))


def best_of_several(rewards: Any) -> list[BestOf]:
    """`best_of` for each n of `BEST_OF` that the samples allow."""
    fewest = int(np.isfinite(_samples(rewards)).sum(1).min())
    return [best_of(rewards, n) for n in BEST_OF if n <= fewest]


def share_of_gain(rewards: Any, reward: float, kl: float) -> float:
    """What a policy has gained over the base, as a share of what the limit gains at its KL.

    Args:
        rewards: [prompts, samples] of samples of the base.
        reward, kl: of the policy, on the same prompts.

    Returns:
        float: 1 at the limit; NaN where there is nothing to gain, and at an estimated KL of 0 or
        less.
    """
    base = base_reward(rewards)
    if kl <= 0:
        return math.nan
    gain = limit(rewards, kl).reward - base
    return (reward - base) / gain if gain > 0 else math.nan


def most_of_gain(rewards: Any, reward: float, kl: float) -> float:
    """What `share_of_gain` is at most, where the samples do not show the limit at `kl`: the share
    of the limit's gain at the largest KL that they show.

    Returns:
        float: NaN where that says nothing: 1 or more, no gain at all, a smaller KL, or no limit.
    """
    base, best = base_reward(rewards), farthest_shown(rewards)
    if best is None or kl <= best.kl or not base < reward < best.reward:
        return math.nan
    return (reward - base) / (best.reward - base)


def curve(rewards: Any, kls: Sequence[float]) -> list[Tilted]:
    """`limit` at each of `kls`, for a plot."""
    return [limit(rewards, kl) for kl in kls]
