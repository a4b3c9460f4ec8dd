"""Functions that the jit kernels of more than one file use: exponentials, scores, estimators.

Scores are shifted by a running maximum before they are scaled, so that no offset of a row costs
digits; the hardware's exponential has base 2.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fastppo_kernels import records

LOWEST = tl.constexpr(records.LOWEST)
RATIO_LIMIT = tl.constexpr(records.LOG_RATIO_LIMIT)
# The running maximum's start. Not −inf, whose difference with itself is NaN, and not 0 or LOWEST,
# which would be above a row that is lower.
FIRST_MAX = tl.constexpr(torch.finfo(torch.float32).min)
LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))

# ------------------------------------------------------------------------------- scalar functions


@triton.jit
def _exp_excess(x):
    """e^x − 1 − x. Below ½ the series, where the difference would lose its digits."""
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
    return tl.where(tl.abs(x) < 0.5, x + _exp_excess(x), tl.exp(x) - 1)


@triton.jit
def log1p_below_one(x):
    """log(1 + x) for 0 ≤ x ≤ 1, as 2·artanh(s) with s = x/(2 + x) ≤ ⅓: relative accuracy at 0."""
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
def _tanh(x):
    """(tanh x, its slope). From e^{−2|x|}, and near 0 from an odd polynomial.

    The polynomial is the least-squares fit of (tanh(x)/x − 1)/x² on Chebyshev points of x² in
    [0, 0.625²]; its relative error is below 2e-8.
    """
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    u = x * x
    series = -0.00610495 * u + 0.02100364
    series = series * u - 0.0538525
    series = series * u + 0.13332782
    series = series * u - 0.33333329
    near = x + x * (u * series)
    # 1 − tanh² in a form that keeps its digits where the cap is reached.
    slope = 4 * e / ((1 + e) * (1 + e))
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far)), slope


@triton.jit
def between(x, low, high):
    """x clamped; NaN stays NaN, so that a broken operand shows in the loss and its gradient."""
    x = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sampled_kl(difference, ESTIMATOR: tl.constexpr):
    """(estimate, derivative by the logprob) from d = logprob − ref_logprob."""
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


# ------------------------------------------------------------------------------- scores of a row


@triton.jit
def capped(x, softmax):
    """(z/c, slope dz/dx/logit_scale): the scores that are shifted and scaled by `row_scale`."""
    if softmax.softcap is None:
        return x, 1.0
    else:
        value, slope = _tanh(x * (softmax.logit_scale / softmax.softcap))
        return value * softmax.softcap, slope


@triton.jit
def row_scale(rows, softmax):
    """(factor of the shifted scores, dx/dt): the scale goes in after the shift, or in the cap."""
    inverse = 1.0 / softmax.temperature
    if softmax.temperatures is not None:
        inverse = 1.0 / tl.load(softmax.temperatures + rows)
    slope = softmax.logit_scale * inverse
    if softmax.softcap is None:
        return slope, slope
    else:
        return inverse, slope


@triton.jit
def shifted(values, maximum, scale):
    """(values − maximum)·scale, −inf (and the padding) at LOWEST; NaN stays NaN."""
    return tl.maximum((values - maximum) * scale, LOWEST, propagate_nan=tl.PropagateNan.ALL)
