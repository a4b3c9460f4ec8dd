"""Jit functions shared by several kernels: exponentials, scores, estimators.

Scores are shifted by a running maximum before scaling, so an offset of a row costs no digits. The
hardware's exponential has base 2.
"""

from __future__ import annotations

import math
import os

import torch
import triton
import triton.language as tl

from fastppo_kernels import records

LOWEST = tl.constexpr(records.LOWEST)
RATIO_LIMIT = tl.constexpr(records.LOG_RATIO_LIMIT)
# Start of the running maximum. Not −inf, because −inf − (−inf) is NaN, and not 0 or LOWEST, which
# may exceed all of a row.
FIRST_MAX = tl.constexpr(torch.finfo(torch.float32).min)
# Whole tiles shift by a rounded anchor. Its error, up to 2⁻²⁴ relative, enters an exponent.
WHOLE_LIMIT = tl.constexpr(2.0**30)
LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Read at decoration, when Triton reads it."""

# tanh takes x2 = 2·log₂e·x, for the base-2 exponential. The coefficients of its odd polynomial are
# scaled accordingly.
TANH_UNIT = tl.constexpr(2 * math.log2(math.e))
TANH_NEAR = tl.constexpr(0.625 * TANH_UNIT.value)
TANH_1 = tl.constexpr(1.0 / TANH_UNIT.value**1)
TANH_3 = tl.constexpr(-0.33333329 / TANH_UNIT.value**3)
TANH_5 = tl.constexpr(0.13332782 / TANH_UNIT.value**5)
TANH_7 = tl.constexpr(-0.0538525 / TANH_UNIT.value**7)
TANH_9 = tl.constexpr(0.02100364 / TANH_UNIT.value**9)
TANH_11 = tl.constexpr(-0.00610495 / TANH_UNIT.value**11)

# ------------------------------------------------------------------------------- scalar functions


@triton.jit
def fma(x, y, z):
    """Return x·y + z, rounded once. NumPy, which runs Triton's interpreter, has no fp32 fma."""
    return (x.to(tl.float64) * y + z).to(tl.float32) if INTERPRETED else tl.fma(x, y, z)


@triton.jit
def _exp_excess(x):
    """Return e^x − 1 − x; below ½ by a series, where the difference would lose digits."""
    series = 1 / 362880 * x + 1 / 40320
    series = series * x + 1 / 5040
    series = series * x + 1 / 720
    series = series * x + 1 / 120
    series = series * x + 1 / 24
    series = series * x + 1 / 6
    series = series * x + 1 / 2
    return tl.where(tl.abs(x) < 0.5, series * x * x, tl.exp(x) - 1 - x)


@triton.jit
def expm1(x):
    """Return e^x − 1; below ½ by a series."""
    return tl.where(tl.abs(x) < 0.5, x + _exp_excess(x), tl.exp(x) - 1)


@triton.jit
def log1p_below_one(x):
    """Return log(1 + x) for 0 ≤ x ≤ 1, as 2·artanh(s) with s = x/(2 + x) ≤ ⅓: accurate near 0."""
    s = x / (2 + x)
    u = s * s
    series = 1 / 15 * u + 1 / 13
    series = series * u + 1 / 11
    series = series * u + 1 / 9
    series = series * u + 1 / 7
    series = series * u + 1 / 5
    series = series * u + 1 / 3
    return 2 * s * (1 + series * u)


@triton.jit
def _tanh(x2):
    """Return (tanh x, its slope) for x2 = 2·log₂e·x, from e^{−2|x|} or an odd polynomial near 0.

    The polynomial is the least-squares fit of (tanh(x)/x − 1)/x² on Chebyshev points of x² in
    [0, 0.625²]; its relative error is below 2e-8. The square of a reciprocal root replaces a
    reciprocal: one instruction, against eight for a division.
    """
    e = tl.exp2(-tl.abs(x2))
    root = tl.rsqrt(1 + e)
    share = e * (root * root)
    far = fma(share, -2.0, 1.0)
    u = x2 * x2
    series = fma(u, TANH_11, TANH_9)
    series = fma(series, u, TANH_7)
    series = fma(series, u, TANH_5)
    series = fma(series, u, TANH_3)
    series = fma(series, u, TANH_1)
    near = x2 * series
    # 1 − tanh² in a form that keeps its digits near the cap.
    slope = 4 * share * (root * root)
    return tl.where(tl.abs(x2) < TANH_NEAR, near, tl.where(x2 < 0, -far, far)), slope


@triton.jit
def between(x, low, high):
    """Clamp x; NaN stays NaN, so that it shows in the loss and its gradient."""
    x = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sampled_kl(difference, ESTIMATOR: tl.constexpr):
    """Return (estimate, derivative by the logprob) for d = logprob − ref_logprob."""
    if ESTIMATOR == "k1":
        return difference, tl.where(difference == difference, 1.0, difference)
    elif ESTIMATOR == "k2":
        return 0.5 * difference * difference, difference
    else:
        tl.static_assert(ESTIMATOR == "k3", "expected k1, k2 or k3")
        inside = tl.abs(difference) <= RATIO_LIMIT
        limited = between(-difference, -RATIO_LIMIT, RATIO_LIMIT)
        value = tl.where(inside, _exp_excess(limited), tl.exp(limited) - 1 + difference)
        return value, tl.where(inside, -expm1(limited), 1.0)


@triton.jit
def ratio_weighted_slope(difference, kl, slope, ESTIMATOR: tl.constexpr):
    """Return the derivative of ratio·KL by the logprob, divided by the ratio: KL + slope.

    For k3 that is d. The sum of e^{−d} − 1 + d and 1 − e^{−d} has no digits of it for d far below
    0.
    """
    if ESTIMATOR == "k3":
        return tl.where(tl.abs(difference) > RATIO_LIMIT, kl + slope, difference)
    else:
        return kl + slope


# ------------------------------------------------------------------------------------- row scores


@triton.jit
def capped(x, softmax):
    """Return (score before `row_scale`, in units of a soft-cap; slope dz/dx/logit_scale)."""
    if softmax.softcap is None:
        return x, 1.0
    else:
        return _tanh(x * (softmax.logit_scale / softmax.softcap * TANH_UNIT))


@triton.jit
def row_scale(rows, softmax):
    """Return (factor of the shifted scores, dt/dx). The cap contains the logit scale."""
    inverse = 1.0 / softmax.temperature
    if softmax.temperatures is not None:
        inverse = 1.0 / tl.load(softmax.temperatures + rows)
    slope = softmax.logit_scale * inverse
    if softmax.softcap is None:
        return slope, slope
    else:
        return softmax.softcap * inverse, slope


@triton.jit
def shifted(values, maximum, scale):
    """Return (values − maximum)·scale, with −inf and padding at LOWEST; NaN stays NaN."""
    return tl.maximum((values - maximum) * scale, LOWEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gap_between(values, ref_values, t, r, row_max, ref_max, scale):
    """Return t − r, computed from the difference of the scores.

    Close to the reference that difference is exact, while the shifted and scaled scores are rounded
    by up to 2⁻²⁴ each. Ruled-out columns keep their replacements.
    """
    near = ((values - ref_values) - (row_max - ref_max)) * scale
    return tl.where((t <= LOWEST) | (r <= LOWEST), t - r, near)
