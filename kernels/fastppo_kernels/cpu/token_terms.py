"""The loss of one token on a CPU, from its statistics: policy term, KL, derivatives, metrics.

The formulas are those of `fastppo_kernels.definition`, in fp64. A new objective or KL estimator is
a number and a branch here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastppo_kernels.cpu.threads import compiled
from fastppo_kernels.records import DPPO_EPSILON, LOG_RATIO_LIMIT, Objective, Sums

CLIP, CISPO, SAPO, DIS, DPPO_TV, DPPO_KL = range(6)
POLICY_TERMS: dict[str, Any] = {
    "clip": CLIP,
    "cispo": CISPO,
    "sapo": SAPO,
    "dis": DIS,
    "dppo_tv": DPPO_TV,
    "dppo_kl": DPPO_KL,
}

K1, K2, K3, FULL = range(1, 5)
ESTIMATORS: dict[str, Any] = {"k1": K1, "k2": K2, "k3": K3, "full": FULL}


@compiled
def _k3(difference):
    """Return e^{−d} − 1 + d with a clamped exponent."""
    return math.expm1(min(max(-difference, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT)) + difference


@compiled
def sampled_kl(difference, estimator):
    """Return (the estimate from d = logprob − ref_logprob, its derivative by the logprob).

    Both are NaN for an unknown estimator.
    """
    if estimator == K1:
        return difference, 1.0
    if estimator == K2:
        return 0.5 * difference * difference, difference
    if estimator == K3:
        is_inside = abs(difference) <= LOG_RATIO_LIMIT
        return _k3(difference), -math.expm1(-difference) if is_inside else 1.0
    return math.nan, math.nan


@compiled
def _bounded_variable(logprob, old_logprob, ratio, loss):
    """Return the variable that the clip range bounds; see `definition.bounded_variable`."""
    if loss.policy_term != DPPO_TV and loss.policy_term != DPPO_KL:
        return ratio
    p = math.exp(logprob)
    q = math.exp(old_logprob)
    if loss.policy_term == DPPO_TV:
        return 1.0 + (p - q)
    others = math.log((1.0 - q + DPPO_EPSILON) / (1.0 - p + DPPO_EPSILON))
    kl = q * (old_logprob - logprob) + (1.0 - q) * others
    return 1.0 - kl if p < q else 1.0 + kl


@compiled
def _policy_term(logprob, ratio, bounded, advantage, is_clamped, loss):
    """Return (policy term, its derivative by the logprob); see `definition.policy_term`.

    Both are NaN for an unknown term.
    """
    unclipped = ratio * advantage
    if loss.policy_term == CLIP:
        clipped = min(max(ratio, loss.lowest_ratio), loss.highest_ratio) * advantage
        is_active = not unclipped > clipped
        surrogate = unclipped if is_active else clipped
        if advantage < 0 and surrogate < loss.dual_clip * advantage:
            surrogate = loss.dual_clip * advantage
            is_active = False
        return -surrogate, -unclipped if is_active and not is_clamped else 0.0
    if loss.policy_term == SAPO:
        tau = loss.tau_positive if advantage > 0 else loss.tau_negative
        x = tau * (ratio - 1.0)
        e = math.exp(-abs(x))
        share = 1.0 / (1.0 + e)
        gate = e * share if x < 0 else share
        slope = 4.0 * e * share * share * unclipped
        return -4.0 / tau * gate * advantage, 0.0 if is_clamped else -slope
    coefficient = math.nan
    if loss.policy_term == CISPO:
        coefficient = min(max(ratio, loss.lowest_ratio), loss.highest_ratio)
    above = bounded > loss.highest_ratio
    below = bounded < loss.lowest_ratio
    if loss.policy_term == DIS:
        coefficient = 0.0 if above or below else ratio
    elif loss.policy_term == DPPO_TV or loss.policy_term == DPPO_KL:
        coefficient = 0.0 if (above if advantage > 0 else below) else ratio
    by_logprob = -coefficient * advantage
    return by_logprob * logprob, by_logprob


@compiled
def token_loss(logprob, full_kl, token, loss, i):
    """Return (policy term·importance weight, ratio, KL, w·(g_l, g_h, g_k)) of one token.

    A derivative is 0 where a clip is active or the ratio's exponent is clamped. Comparisons treat
    NaN as active, so that it reaches the gradient and is noticed.
    """
    advantage = token.advantages[i]
    weight = token.weights[i]
    difference = logprob - token.old_logprobs[i]
    is_clamped = abs(difference) > LOG_RATIO_LIMIT
    ratio = math.exp(min(max(difference, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT))
    ratio = difference if difference != difference else ratio
    bounded = _bounded_variable(logprob, token.old_logprobs[i], ratio, loss)
    policy, by_logprob = _policy_term(logprob, ratio, bounded, advantage, is_clamped, loss)
    importance = token.importance_weights[i] if len(token.importance_weights) else 1.0
    policy *= importance
    by_logprob *= importance
    kl = 0.0
    by_kl = 0.0
    if loss.kl_estimator == FULL:
        kl = full_kl
        by_kl = weight * loss.kl_coef
    elif len(token.ref_logprobs):
        distance = logprob - token.ref_logprobs[i]
        kl, slope = sampled_kl(distance, loss.kl_estimator)
        if loss.kl_ratio_weighted:
            # For k3, KL + slope is d; the sum would have no digits far below the reference.
            is_k3 = loss.kl_estimator == K3 and abs(distance) <= LOG_RATIO_LIMIT
            both = distance if is_k3 else kl + slope
            slope = ratio * (slope if is_clamped else both)
        if loss.kl_coef != 0:
            by_logprob += loss.kl_coef * slope
    derivatives = (weight * by_logprob, -loss.entropy_coef * weight, by_kl)
    return policy, ratio, kl, derivatives


@compiled
def contributions(logprob, entropy, kl, policy, ratio, token, loss, i):
    """Return a token's contribution to each of `SUMS`, and its ratio for the maximum."""
    weight = token.weights[i]
    advantage = token.advantages[i]
    total = policy - loss.entropy_coef * entropy
    if loss.kl_coef != 0:
        total += loss.kl_coef * (ratio * kl if loss.kl_ratio_weighted else kl)
    bounded = _bounded_variable(logprob, token.old_logprobs[i], ratio, loss)
    above = bounded > loss.highest_ratio
    below = bounded < loss.lowest_ratio
    return Sums(
        loss=weight * total,
        policy_loss=weight * policy,
        tokens=1.0,
        entropy=entropy,
        kl=kl,
        approx_kl=_k3(token.old_logprobs[i] - logprob),
        ratio=ratio,
        ratio_squared=ratio * ratio,
        outside=np.float64(above or below),
        above_positive=np.float64(above and advantage > 0),
        below_positive=np.float64(below and advantage > 0),
        above_negative=np.float64(above and advantage < 0),
        below_negative=np.float64(below and advantage < 0),
        dual_clipped=np.float64(advantage < 0 and ratio > loss.dual_clip),
        ratio_max=ratio,
    )


def number_of(field: str, name: str, numbers: dict[str, Any]) -> Any:
    """Return the number of a name in the loops.

    Raises:
        ValueError: the loops do not know the name.
    """
    if name not in numbers:
        raise ValueError(f"{field}: the CPU's loops have {', '.join(numbers)}, got {name!r}")
    return numbers[name]


def objective_operand(objective: Objective) -> Objective:
    """Replace names by numbers, a missing dual clip by infinity and missing gates by NaN."""
    return objective._replace(
        dual_clip=math.inf if objective.dual_clip is None else objective.dual_clip,
        kl_estimator=number_of("kl_estimator", objective.kl_estimator, ESTIMATORS),
        policy_term=number_of("policy_term", objective.policy_term, POLICY_TERMS),
        tau_positive=math.nan if objective.tau_positive is None else objective.tau_positive,
        tau_negative=math.nan if objective.tau_negative is None else objective.tau_negative,
    )
