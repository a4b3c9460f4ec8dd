"""The loss of one token in a kernel: its terms, their derivatives, and its metrics.

This is `definition.loss` for one row, with derivatives by the token's statistics (logprob, entropy,
full KL):

    ratio  = e^{logprob − old_logprob}
    policy = −min(ratio·A, clip(ratio)·A), or another term, times the importance weight
    loss   = w·(policy + kl_coef·KL − entropy_coef·entropy)     KL, or ratio·KL

A new term of the loss changes the kernels only here; its operand goes into `records.PerToken` or
`records.Objective`. Fields that are None are removed at compile time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastppo_kernels.records import DPPO_EPSILON, SUMS, StatsGradients, Sums
from fastppo_kernels.triton.jit import RATIO_LIMIT, between, ratio_weighted_slope, sampled_kl

SUM_COUNT = tl.constexpr(len(SUMS))
EPSILON = tl.constexpr(DPPO_EPSILON)


class LossResults(NamedTuple):
    """Outputs of the loss's kernels, [N] each; row_sums [len(SUMS), N], one column per row."""

    logprobs: Any
    entropy: Any
    kl: Any
    row_sums: Any


@triton.jit
def _bounded_variable(logprob, old_logprob, ratio, objective):
    """Return the variable that the clip range bounds; see `definition.bounded_variable`."""
    if objective.policy_term == "dppo_tv":
        return 1 + (tl.exp(logprob) - tl.exp(old_logprob))
    elif objective.policy_term == "dppo_kl":
        p = tl.exp(logprob)
        q = tl.exp(old_logprob)
        kl = q * (old_logprob - logprob) + (1 - q) * tl.log((1 - q + EPSILON) / (1 - p + EPSILON))
        return tl.where(p < q, 1 - kl, 1 + kl)
    else:
        return ratio


@triton.jit
def _policy_term(logprob, ratio, bounded, advantage, is_clamped, objective):
    """Return (policy term, its derivative by the logprob, 1 if the dual clip bounds it).

    A derivative is 0 where a clip is active or the ratio's exponent is clamped. NaN satisfies none
    of the comparisons, so that it reaches the gradient and is noticed. See
    `definition.policy_term`.
    """
    unclipped = ratio * advantage
    if objective.policy_term == "clip":
        clipped = between(ratio, objective.lowest_ratio, objective.highest_ratio) * advantage
        surrogate = tl.minimum(unclipped, clipped, propagate_nan=tl.PropagateNan.ALL)
        active = ((unclipped > clipped) | is_clamped) == 0
        dual_clipped = 0.0
        if objective.dual_clip is not None:
            floor = objective.dual_clip * advantage
            dual = (advantage < 0) & (surrogate < floor)
            surrogate = tl.where(dual, floor, surrogate)
            active = active & (dual == 0)
            dual_clipped = ((advantage < 0) & (ratio > objective.dual_clip)).to(tl.float32)
        return -surrogate, tl.where(active, -unclipped, 0.0), dual_clipped
    elif objective.policy_term == "sapo":
        tau = tl.where(advantage > 0, objective.tau_positive, objective.tau_negative)
        x = tau * (ratio - 1)
        e = tl.exp(-tl.abs(x))
        share = 1 / (1 + e)
        gate = tl.where(x < 0, e * share, share)
        slope = 4 * e * share * share * unclipped
        return -4 / tau * gate * advantage, tl.where(is_clamped, 0.0, -slope), 0.0
    else:
        if objective.policy_term == "cispo":
            coefficient = between(ratio, objective.lowest_ratio, objective.highest_ratio)
        else:
            above = bounded > objective.highest_ratio
            below = bounded < objective.lowest_ratio
            if objective.policy_term == "dis":
                masked = above | below
            else:
                tl.static_assert(
                    objective.policy_term == "dppo_tv" or objective.policy_term == "dppo_kl",
                    "expected clip, cispo, sapo, dis, dppo_tv or dppo_kl",
                )
                masked = tl.where(advantage > 0, above, below)
            coefficient = tl.where(masked, 0.0, ratio)
        by_logprob = -coefficient * advantage
        return by_logprob * logprob, by_logprob, 0.0


@triton.jit
def token_loss(index, stats, full_kl, weight, per_token, objective):
    """Return (KL, StatsGradients, contribution to the Sums) of a token of weight ≠ 0.

    `full_kl` is None for a sampled KL or no KL. Infinite clip bounds mean no clipping.
    """
    HAS_SAMPLED_KL: tl.constexpr = (
        per_token.ref_logprobs is not None and objective.kl_estimator != "full"
    )
    advantage = tl.load(per_token.advantages + index).to(tl.float32)
    old_logprob = tl.load(per_token.old_logprobs + index).to(tl.float32)
    difference = stats.logprob - old_logprob
    ratio = tl.exp(between(difference, -RATIO_LIMIT, RATIO_LIMIT))
    is_clamped = tl.abs(difference) > RATIO_LIMIT
    bounded = _bounded_variable(stats.logprob, old_logprob, ratio, objective)
    policy, g_logprob, dual_clipped = _policy_term(
        stats.logprob, ratio, bounded, advantage, is_clamped, objective
    )
    if per_token.importance_weights is not None:
        importance = tl.load(per_token.importance_weights + index).to(tl.float32)
        policy *= importance
        g_logprob *= importance
    kl = 0.0
    g_kl = 0.0
    if full_kl is not None:
        kl = full_kl
        g_kl = weight * objective.kl_coef
    elif HAS_SAMPLED_KL:
        from_ref = stats.logprob - tl.load(per_token.ref_logprobs + index).to(tl.float32)
        kl, slope = sampled_kl(from_ref, objective.kl_estimator)
        if objective.kl_ratio_weighted:
            both = ratio_weighted_slope(from_ref, kl, slope, objective.kl_estimator)
            slope = ratio * tl.where(is_clamped, slope, both)
        g_logprob += tl.where(objective.kl_coef != 0, objective.kl_coef * slope, 0.0)
    loss = policy - objective.entropy_coef * stats.entropy
    if full_kl is not None or HAS_SAMPLED_KL:
        penalty = ratio * kl if objective.kl_ratio_weighted else kl
        # A KL that is only reported may be infinite, and 0·inf is NaN.
        loss += tl.where(objective.kl_coef != 0, objective.kl_coef * penalty, 0.0)
    approx_kl, _ = sampled_kl(-difference, "k3")
    above = bounded > objective.highest_ratio
    below = bounded < objective.lowest_ratio
    positive = advantage > 0
    negative = advantage < 0
    shares = Sums(
        loss=weight * loss,
        policy_loss=weight * policy,
        tokens=1.0,
        entropy=stats.entropy,
        kl=kl,
        approx_kl=approx_kl,
        ratio=ratio,
        ratio_squared=ratio * ratio,
        outside=(above | below).to(tl.float32),
        above_positive=(above & positive).to(tl.float32),
        below_positive=(below & positive).to(tl.float32),
        above_negative=(above & negative).to(tl.float32),
        below_negative=(below & negative).to(tl.float32),
        dual_clipped=dual_clipped,
        ratio_max=ratio,
    )
    g_entropy = -objective.entropy_coef * weight
    g = StatsGradients(weight * g_logprob, g_entropy, g_kl)
    return kl, g, shares


@triton.jit
def store_token(results, index, n, stats, kl, shares):
    column = results.row_sums + index
    for entry in tl.static_range(SUM_COUNT):
        tl.store(column, shares[entry])
        column += n
    tl.store(results.logprobs + index, stats.logprob)
    tl.store(results.entropy + index, stats.entropy)
    tl.store(results.kl + index, kl)


@triton.jit
def store_nothing(results, index, n):
    """Write zeros for a token of weight 0."""
    tl.store(results.logprobs + index, 0.0)
    tl.store(results.entropy + index, 0.0)
    tl.store(results.kl + index, 0.0)
    column = results.row_sums + index
    for _entry in tl.static_range(SUM_COUNT):
        tl.store(column, 0.0)
        column += n


@triton.jit
def is_dead(g, stats):
    """Whether the row's gradient is zero. A NaN row has a NaN gradient."""
    is_number = stats.log_sum == stats.log_sum
    return (g.logprobs == 0) & (g.entropy == 0) & (g.kl == 0) & is_number
