"""PPO's loss from logits, each row read from memory once: the Triton kernels and their launchers.

The definitions are those of `fastppo_kernels.reference`, under the same names and signatures:
`ppo_loss`, `token_stats`, `token_stats_backward`; `scale_` serves the backward pass. A program
takes whole rows, one after the other. Its first sweep over a row carries, per lane, for the shifted
scores t_j = (z_j − m)·c with c = 1/T and the running maximum m,

    mass   = Σ e^{t_j}                 moment = Σ e^{t_j}·t_j

and when the maximum moves, every t_j moves by shift = (m_old − m_new)·c ≤ 0:

    mass ← mass·e^shift                moment ← (moment + shift·mass)·e^shift

so no sum ever holds z itself, and an offset of the row costs no digits. Against the reference's
logits, with r_j their shifted scores, `gap = Σ e^{t_j}·(t_j − r_j)` is carried in the same way;
columns that the reference rules out (q = 0) are kept apart in `lost`, whose p-mass makes the KL
infinite. With S = Σ e^t (the token included), μ = moment/S and γ = gap/S,

    logprob = t_y − log S      entropy = log S − μ      KL = γ − log S + log S_ref

The gradient is written in the formulas' cancelled form, where log S does not occur:

    dz_j = (1/T)·{ g_l·[j=y] + p_j·( −g_l − g_h·(t_j − μ) + g_k·(t_j − r_j − γ) ) }

and the token's own column is left out of the sums and added behind them as a scalar. Both matter in
peaked rows: 1 − p_y is then a sum of small terms, not the difference of two numbers near 1, and the
gradient keeps its relative accuracy however sure the policy is.

The second sweep writes the gradient. It runs backwards over the row, because the end of the row is
what the caches hold. Rows of weight 0 are not read at all; rows whose derivatives are all exactly
zero (clipped, no entropy or KL term) are not read twice. Sums for the metrics are written per row
and added in a fixed order by a second kernel: the same bits every run, on any number of programs.

Nothing here differentiates, aggregates or chooses a backend; tokens outside the vocabulary give NaN
and no stray read. fp64 logits have no kernel.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastppo_kernels.reference import LOG_RATIO_LIMIT, SUMS, PPORows, TokenStats
from fastppo_kernels.reference import LOWEST as REFERENCE_LOWEST

LOWEST = tl.constexpr(REFERENCE_LOWEST)
RATIO_LIMIT = tl.constexpr(LOG_RATIO_LIMIT)
# The running maximum's start. Not −inf, whose difference with itself is NaN, and not 0 or LOWEST,
# which would stand above a row that lies lower.
FIRST_MAX = tl.constexpr(torch.finfo(torch.float32).min)
LOG2_E = tl.constexpr(math.log2(math.e))  # the hardware's exponential has base 2
LN_2 = tl.constexpr(math.log(2))
NO_KL, K1, K2, K3 = (tl.constexpr(code) for code in range(4))
ESTIMATOR_CODES = {"k1": K1.value, "k2": K2.value, "k3": K3.value}
SUM_COUNT = tl.constexpr(len(SUMS))

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

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
def _expm1(x):
    return tl.where(tl.abs(x) < 0.5, x + _exp_excess(x), tl.exp(x) - 1)


@triton.jit
def _log1p_below_one(x):
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
def _capped(x, logit_scale, softcap):
    """(z/c, slope dz/dx/logit_scale): the scores that are shifted and scaled by `_row_scale`."""
    if softcap is None:
        return x, 1.0
    else:
        value, slope = _tanh(x * (logit_scale / softcap))
        return value * softcap, slope


@triton.jit
def _row_scale(row, temperature, temperatures, logit_scale, softcap):
    """(factor of the shifted scores, dx/dt): the scale goes in behind the shift, or in the cap."""
    inverse = 1.0 / temperature
    if temperatures is not None:
        inverse = 1.0 / tl.load(temperatures + row)
    slope = logit_scale * inverse
    if softcap is None:
        return slope, slope
    else:
        return inverse, slope


@triton.jit
def _row_offset(row, row_inner, row_outer_stride, row_stride):
    """Elements before a row of [B, T, V] counted through B·T, in 64 bits. [N, V] is B = 1."""
    outer, inner = (row // row_inner).to(tl.int64), (row % row_inner).to(tl.int64)
    return outer * row_outer_stride + inner * row_stride


@triton.jit
def _at_token(row, token, vocab):
    """The token's own entry, read before the row's first sweep: the sweep's reductions join all
    threads, so no thread can have written the gradient in place yet."""
    known = (token >= 0) & (token < vocab)
    return tl.load(row + token, known, other=float("nan")).to(tl.float32)


@triton.jit
def _between(x, low, high):
    """x clamped; NaN stays NaN, so that a broken operand shows in the loss and its gradient."""
    x = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _shifted(values, maximum, scale):
    """(values − maximum)·scale, −inf (and the padding) at LOWEST; NaN stays NaN."""
    return tl.maximum((values - maximum) * scale, LOWEST, propagate_nan=tl.PropagateNan.ALL)


# --------------------------------------------------------------------------- sweeps over one row


@triton.jit
def _gap(values, ref_values, t, r, maximum, ref_maximum, scale):
    """t − r. Near the reference from the difference of the scores themselves, which is exact where
    that of the two shifted and scaled ones is not; ruled-out columns keep their stand-ins."""
    near = ((values - ref_values) - (maximum - ref_maximum)) * scale
    return tl.where((t <= LOWEST) | (r <= LOWEST), t - r, near)


@triton.jit
def _load_capped(
    x_row, start, columns, vocab, logit_scale, softcap, MASKED: tl.constexpr, HINT: tl.constexpr
):
    if MASKED:
        x = tl.load(
            x_row + start + columns,
            start + columns < vocab,
            other=-float("inf"),
            eviction_policy=HINT,
        )
    else:
        x = tl.load(x_row + start + columns, eviction_policy=HINT)
    return _capped(x.to(tl.float32), logit_scale, softcap)


@triton.jit
def _moved(mass, lost, moment, gap, shift, ref_shift, apart, HAS_REF: tl.constexpr):
    """The sums after the maxima rose: t moves by `shift`, r by `ref_shift`, neither above 0, and
    t − r by `apart`."""
    decay = tl.exp2(shift)
    if HAS_REF:
        # A reference maximum that rises from nothing rules out whatever stood before it.
        gone = ref_shift <= LOWEST
        lost = tl.where(gone, lost + mass, lost)
        mass = tl.where(gone, 0.0, mass)
        gap = (tl.where(gone, 0.0, gap) + apart * mass) * decay
        moment = (moment + shift * (mass + lost)) * decay
        lost = lost * decay
    else:
        moment = (moment + shift * mass) * decay
    return mass * decay, lost, moment, gap


@triton.jit
def _fold(
    x_row, ref_row, start, token, vocab, logit_scale, softcap, scale,
    row_max, mass, lost, moment, gap, ref_max, ref_mass,
    BLOCK_V: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
    MASKED: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """One tile into the sums of the lanes.

    The tile is seen as [BLOCK_V/(LANES·VEC), LANES, VEC], which is how its vectors lie in the
    threads: a lane is a thread, and the loop needs no word between threads.
    """
    HAS_REF: tl.constexpr = ref_row is not None
    SHAPE: tl.constexpr = (BLOCK_V // (LANES * VEC), LANES, VEC)
    columns = tl.arange(0, BLOCK_V)
    values, _ = _load_capped(x_row, start, columns, vocab, logit_scale, softcap, MASKED, HINT)
    # A soft-cap turns the padding's −inf into −cap, a value like any other.
    if MASKED and softcap is not None:
        values = tl.where(start + columns < vocab, values, -float("inf"))
    if (token >= start) & (token < start + BLOCK_V):
        values = tl.where(start + columns == token, -float("inf"), values)
    values = tl.reshape(values, SHAPE)
    new_max = tl.maximum(row_max, tl.max(tl.max(values, 2), 0))
    shift = _shifted(row_max, new_max, scale)
    t = _shifted(values, new_max[None, :, None], scale)
    e = tl.exp2(t)
    ref_shift, moved_apart = shift, shift
    if HAS_REF:
        ref_values, _ = _load_capped(
            ref_row, start, columns, vocab, logit_scale, softcap, MASKED, HINT
        )
        if MASKED and softcap is not None:
            ref_values = tl.where(start + columns < vocab, ref_values, -float("inf"))
        ref_values = tl.reshape(ref_values, SHAPE)
        new_ref_max = tl.maximum(ref_max, tl.max(tl.max(ref_values, 2), 0))
        ref_shift = _shifted(ref_max, new_ref_max, scale)
        r = _shifted(ref_values, new_ref_max[None, :, None], scale)
        ref_mass = ref_mass * tl.exp2(ref_shift) + tl.sum(tl.sum(tl.exp2(r), 2), 0)
        moved_apart = _gap(row_max, ref_max, shift, ref_shift, new_max, new_ref_max, scale)
        ref_max = new_ref_max
    mass, lost, moment, gap = _moved(
        mass, lost, moment, gap, shift, ref_shift, moved_apart, HAS_REF
    )
    moment += tl.sum(tl.sum(e * t, 2), 0)
    if HAS_REF:
        kept = tl.where(r <= LOWEST, 0.0, e)
        lost += tl.sum(tl.sum(e - kept, 2), 0)
        apart = _gap(
            values, ref_values, t, r, new_max[None, :, None], new_ref_max[None, :, None], scale
        )
        gap += tl.sum(tl.sum(kept * apart, 2), 0)
        e = kept
    mass += tl.sum(tl.sum(e, 2), 0)
    return new_max, mass, lost, moment, gap, ref_max, ref_mass


@triton.jit
def _row_statistics(
    x_row, ref_row, x_token, ref_token, token, vocab, logit_scale, softcap, scale,
    BLOCK_V: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """The first sweep: every statistic of a row, in nats.

    Returns (logprob, entropy, KL, row maximum, log S, S, μ, (S − e^{t_y})/S, γ, the reference's
    maximum, log S_ref); those of the reference are 0 without one.
    """
    HAS_REF: tl.constexpr = ref_row is not None
    token_value, _ = _capped(x_token, logit_scale, softcap)
    scale2 = scale * LOG2_E
    row_max = tl.full([LANES], FIRST_MAX, tl.float32)
    ref_max = tl.full([LANES], FIRST_MAX, tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    lost = tl.zeros([LANES], tl.float32)
    moment = tl.zeros([LANES], tl.float32)
    gap = tl.zeros([LANES], tl.float32)
    ref_mass = tl.zeros([LANES], tl.float32)
    whole = vocab // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):
        row_max, mass, lost, moment, gap, ref_max, ref_mass = _fold(
            x_row, ref_row, start, token, vocab, logit_scale, softcap, scale2,
            row_max, mass, lost, moment, gap, ref_max, ref_mass,
            BLOCK_V, LANES, VEC, False, HINT,
        )  # fmt: skip
    if whole < vocab:
        row_max, mass, lost, moment, gap, ref_max, ref_mass = _fold(
            x_row, ref_row, whole, token, vocab, logit_scale, softcap, scale2,
            row_max, mass, lost, moment, gap, ref_max, ref_mass,
            BLOCK_V, LANES, VEC, True, HINT,
        )  # fmt: skip

    # The lanes become one.
    top = tl.max(row_max, 0)
    shift = _shifted(row_max, top, scale2)
    ref_top = 0.0
    ref_log_sum = 0.0
    ref_shift, moved_apart = shift, shift
    if HAS_REF:
        ref_top = tl.max(ref_max, 0)
        ref_shift = _shifted(ref_max, ref_top, scale2)
        moved_apart = _gap(row_max, ref_max, shift, ref_shift, top, ref_top, scale2)
        ref_log_sum = tl.log(tl.sum(ref_mass * tl.exp2(ref_shift), 0))
    mass, lost, moment, gap = _moved(
        mass, lost, moment, gap, shift, ref_shift, moved_apart, HAS_REF
    )
    mass, moment = tl.sum(mass, 0), tl.sum(moment, 0)
    if HAS_REF:
        lost, gap = tl.sum(lost, 0), tl.sum(gap, 0)
    else:
        lost, gap = 0.0, 0.0

    # The token joins the others. The reference's maximum has seen its column: it does not move.
    row_top = tl.maximum(top, token_value)
    shift = _shifted(top, row_top, scale2)
    mass, lost, moment, gap = _moved(mass, lost, moment, gap, shift, shift * 0.0, shift, HAS_REF)
    others = mass + lost
    t_token2 = _shifted(token_value, row_top, scale2)
    e_token = tl.exp2(t_token2)
    moment += e_token * t_token2
    total = others + e_token
    mean_shifted = moment * LN_2 / total
    # A row of −inf alone is no distribution.
    log_total = tl.where(total > 0, tl.log(total), float("nan"))
    t_token = _shifted(token_value, row_top, scale)
    # Above ½ from the others' share, which keeps digits that log S near 0 does not have.
    likely = e_token > others
    logprob = tl.where(
        likely, -_log1p_below_one(others / tl.where(likely, e_token, 1.0)), t_token - log_total
    )
    log_sum = tl.where(likely, t_token - logprob, log_total)
    kl = 0.0
    mean_gap = 0.0
    if HAS_REF:
        ref_value, _ = _capped(ref_token, logit_scale, softcap)
        r_token = _shifted(ref_value, ref_top, scale2)
        token_lost = r_token <= LOWEST
        apart = _gap(token_value, ref_value, t_token2, r_token, row_top, ref_top, scale2)
        gap += tl.where(token_lost, 0.0, e_token * apart)
        lost += tl.where(token_lost, e_token, 0.0)
        mean_gap = tl.where(lost > 0, float("inf"), gap * LN_2 / total)
        kl = mean_gap - log_sum + ref_log_sum
    return (
        logprob, log_sum - mean_shifted, kl, row_top, log_sum, total, mean_shifted,
        others / total, mean_gap, ref_top, ref_log_sum,
    )  # fmt: skip


@triton.jit
def _token_gradient(
    x_token, row_max, ref_token, ref_max, logit_scale, softcap, scale, slope,
    g_logprob, g_entropy, g_kl, p_token, p_others, mean_shifted, mean_gap,
    HAS_REF: tl.constexpr,
):  # fmt: skip
    """dx at the token, where g_l·(1 − p_y) comes from the others' share."""
    value, cap_slope = _capped(x_token, logit_scale, softcap)
    t = _shifted(value, row_max, scale)
    inner = g_entropy * (mean_shifted - t)
    if HAS_REF:
        ref_value, _ = _capped(ref_token, logit_scale, softcap)
        r = _shifted(ref_value, ref_max, scale)
        apart = _gap(value, ref_value, t, r, row_max, ref_max, scale)
        inner += tl.where(g_kl != 0, g_kl * (apart - mean_gap), 0.0)
    return slope * cap_slope * (g_logprob * p_others + p_token * inner)


@triton.jit
def _write_tile(
    x_row, ref_row, grad_row, start, token, vocab, logit_scale, softcap, scale,
    row_max, ref_max, constant, linear, g_kl, at_token,
    BLOCK_V: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    HAS_REF: tl.constexpr = ref_row is not None
    columns = tl.arange(0, BLOCK_V)
    values, slope = _load_capped(
        x_row, start, columns, vocab, logit_scale, softcap, MASKED, "evict_first"
    )
    t = _shifted(values, row_max, scale)
    factor = constant + linear * t
    if HAS_REF:
        ref_values, _ = _load_capped(
            ref_row, start, columns, vocab, logit_scale, softcap, MASKED, "evict_first"
        )
        r = _shifted(ref_values, ref_max, scale)
        factor += g_kl * _gap(values, ref_values, t, r, row_max, ref_max, scale)
    grad = tl.exp2(t) * factor
    if softcap is not None:
        grad *= slope
    if (token >= start) & (token < start + BLOCK_V):
        grad = tl.where(start + columns == token, at_token, grad)
    grad = grad.to(grad_row.dtype.element_ty)
    if MASKED:
        tl.store(grad_row + start + columns, grad, start + columns < vocab)
    else:
        tl.store(grad_row + start + columns, grad)


@triton.jit
def _write_gradient(
    x_row, ref_row, grad_row, token, vocab, logit_scale, softcap, scale, slope_over_total,
    row_max, ref_max, g_logprob, g_entropy, g_kl, mean_shifted, mean_gap, at_token,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The second sweep, last tile first. `slope_over_total` is (dx/dt)/S; e^t stands in for p."""
    constant = g_entropy * mean_shifted - g_logprob
    if ref_row is not None:
        # An infinite KL that is only reported does not touch the gradient.
        constant -= tl.where(g_kl != 0, g_kl * mean_gap, 0.0)
    constant *= slope_over_total
    # The sweep's t has base 2: ln 2 goes into its coefficients.
    linear = -g_entropy * LN_2 * slope_over_total
    kl_linear = g_kl * LN_2 * slope_over_total
    scale2 = scale * LOG2_E
    whole = vocab // BLOCK_V * BLOCK_V
    if whole < vocab:
        _write_tile(
            x_row, ref_row, grad_row, whole, token, vocab, logit_scale, softcap, scale2,
            row_max, ref_max, constant, linear, kl_linear, at_token, BLOCK_V, True,
        )  # fmt: skip
    for behind in range(BLOCK_V, whole + BLOCK_V, BLOCK_V):
        _write_tile(
            x_row, ref_row, grad_row, whole - behind, token, vocab, logit_scale, softcap, scale2,
            row_max, ref_max, constant, linear, kl_linear, at_token, BLOCK_V, False,
        )  # fmt: skip


@triton.jit
def _write_zeros(grad_row, vocab, BLOCK_V: tl.constexpr):
    columns = tl.arange(0, BLOCK_V)
    zeros = tl.zeros([BLOCK_V], grad_row.dtype.element_ty)
    for start in range(0, vocab, BLOCK_V):
        tl.store(grad_row + start + columns, zeros, start + columns < vocab)


# ------------------------------------------------------------------------------------- token loss


@triton.jit
def _sampled_kl(difference, ESTIMATOR: tl.constexpr):
    """(estimate, derivative by the logprob); reference.sampled_kl."""
    if ESTIMATOR == K1:
        return difference, tl.where(difference == difference, 1.0, difference)
    elif ESTIMATOR == K2:
        return 0.5 * difference * difference, difference
    else:
        inside = tl.abs(difference) <= RATIO_LIMIT
        limited = _between(-difference, -RATIO_LIMIT, RATIO_LIMIT)
        value = tl.where(inside, _exp_excess(limited), tl.exp(limited) - 1 + difference)
        return value, tl.where(inside, -_expm1(limited), 1.0)


@triton.jit
def _store_sums(
    sums, row, n, loss, policy, count, entropy, kl, approx_kl, ratio,
    above_positive, below_positive, above_negative, below_negative, dual,
):  # fmt: skip
    """A row's share of reference.SUMS, to [len(SUMS), N]."""
    sums += row
    n = n.to(tl.int64)
    tl.store(sums, loss)
    tl.store(sums + n, policy)
    tl.store(sums + 2 * n, count)
    tl.store(sums + 3 * n, entropy)
    tl.store(sums + 4 * n, kl)
    tl.store(sums + 5 * n, approx_kl)
    tl.store(sums + 6 * n, ratio)
    tl.store(sums + 7 * n, ratio * ratio)
    tl.store(sums + 8 * n, above_positive)
    tl.store(sums + 9 * n, below_positive)
    tl.store(sums + 10 * n, above_negative)
    tl.store(sums + 11 * n, below_negative)
    tl.store(sums + 12 * n, dual)
    tl.store(sums + 13 * n, ratio)


@triton.jit
def _token_loss(
    row, n, logprob, entropy, kl, weight,
    old_logprobs, advantages, importance_weights, ref_logprobs, sums,
    lowest_ratio, highest_ratio, dual_clip, kl_coef, entropy_coef,
    ESTIMATOR: tl.constexpr, HAS_REF: tl.constexpr,
):  # fmt: skip
    """(kl, g_logprob, g_entropy, g_kl) of a row of weight ≠ 0; reference.token_loss, loss_sums.

    Infinite clips are no clipping: nothing is above, below or beyond them.
    """
    advantage = tl.load(advantages + row).to(tl.float32)
    difference = logprob - tl.load(old_logprobs + row).to(tl.float32)
    ratio = tl.exp(_between(difference, -RATIO_LIMIT, RATIO_LIMIT))
    unclipped = ratio * advantage
    clipped = _between(ratio, lowest_ratio, highest_ratio) * advantage
    surrogate = tl.minimum(unclipped, clipped, propagate_nan=tl.PropagateNan.ALL)
    # Written so that a NaN counts as active: it must reach the gradient, where it is noticed.
    active = ((unclipped > clipped) | (tl.abs(difference) > RATIO_LIMIT)) == 0
    # 0·inf is NaN, but where the advantage is 0 it is not looked at.
    floor = dual_clip * advantage
    dual = (advantage < 0) & (surrogate < floor)
    policy = -tl.where(dual, floor, surrogate)
    g_logprob = tl.where(active & (dual == 0), -unclipped, 0.0)
    if importance_weights is not None:
        importance = tl.load(importance_weights + row).to(tl.float32)
        policy *= importance
        g_logprob *= importance
    g_kl = 0.0
    if HAS_REF:
        g_kl = weight * kl_coef
    elif ESTIMATOR != NO_KL:
        ref_logprob = tl.load(ref_logprobs + row).to(tl.float32)
        kl, slope = _sampled_kl(logprob - ref_logprob, ESTIMATOR)
        g_logprob += tl.where(kl_coef != 0, kl_coef * slope, 0.0)
    loss = policy - entropy_coef * entropy
    if HAS_REF or ESTIMATOR != NO_KL:
        # A KL that is only reported may be infinite without spoiling the loss.
        loss += tl.where(kl_coef != 0, kl_coef * kl, 0.0)
    approx_kl, _ = _sampled_kl(-difference, K3)
    above, below = ratio > highest_ratio, ratio < lowest_ratio
    positive, negative = advantage > 0, advantage < 0
    _store_sums(
        sums, row, n, weight * loss, weight * policy, 1.0, entropy, kl, approx_kl, ratio,
        (above & positive).to(tl.float32), (below & positive).to(tl.float32),
        (above & negative).to(tl.float32), (below & negative).to(tl.float32),
        (negative & (ratio > dual_clip)).to(tl.float32),
    )  # fmt: skip
    return kl, weight * g_logprob, -entropy_coef * weight, g_kl


# ---------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["n", "row_inner", "ref_row_inner", "grad_row_inner"])
def _ppo_loss_kernel(
    logits, row_inner, row_outer_stride, row_stride,
    ref_logits, ref_row_inner, ref_row_outer_stride, ref_row_stride,
    grad, grad_row_inner, grad_row_outer_stride, grad_row_stride,
    tokens, old_logprobs, advantages, weights, importance_weights, ref_logprobs, temperatures,
    logprobs, entropies, kls, sums, n, vocab,
    temperature, logit_scale, softcap, lowest_ratio, highest_ratio, dual_clip, kl_coef,
    entropy_coef,
    ESTIMATOR: tl.constexpr, BLOCK_V: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Rows program_id, program_id + num_programs, …; absent operands are None and cost nothing.

    `ref_logits` is given for the full KL alone, `grad` when a gradient is wanted.
    """
    HAS_REF: tl.constexpr = ref_logits is not None
    # Kept for the second sweep, or given up at once.
    HINT: tl.constexpr = "evict_first" if grad is None else "evict_last"
    for row in range(tl.program_id(0), n, tl.num_programs(0)):
        weight = tl.load(weights + row).to(tl.float32)
        if weight != 0:
            token = tl.load(tokens + row)
            x_row = logits + _row_offset(row, row_inner, row_outer_stride, row_stride)
            x_token = _at_token(x_row, token, vocab)
            ref_row, ref_token = None, 0.0
            if HAS_REF:
                ref_row = ref_logits + _row_offset(
                    row, ref_row_inner, ref_row_outer_stride, ref_row_stride
                )
                ref_token = _at_token(ref_row, token, vocab)
            scale, slope = _row_scale(row, temperature, temperatures, logit_scale, softcap)
            (
                logprob, entropy, kl, row_max, log_sum, total, mean_shifted,
                p_others, mean_gap, ref_max, _ref_log_sum,
            ) = _row_statistics(
                x_row, ref_row, x_token, ref_token, token, vocab, logit_scale, softcap, scale,
                BLOCK_V, LANES, VEC, HINT,
            )  # fmt: skip
            kl, g_logprob, g_entropy, g_kl = _token_loss(
                row, n, logprob, entropy, kl, weight,
                old_logprobs, advantages, importance_weights, ref_logprobs, sums,
                lowest_ratio, highest_ratio, dual_clip, kl_coef, entropy_coef, ESTIMATOR, HAS_REF,
            )  # fmt: skip
            tl.store(logprobs + row, logprob)
            tl.store(entropies + row, entropy)
            tl.store(kls + row, kl)
            if grad is not None:
                grad_row = grad + _row_offset(
                    row, grad_row_inner, grad_row_outer_stride, grad_row_stride
                )
                # A row that is NaN says so in its gradient too.
                flat = (g_logprob == 0) & (g_entropy == 0) & (g_kl == 0) & (log_sum == log_sum)
                if flat:
                    _write_zeros(grad_row, vocab, BLOCK_V)
                else:
                    at_token = _token_gradient(
                        x_token, row_max, ref_token, ref_max, logit_scale, softcap, scale, slope,
                        g_logprob, g_entropy, g_kl, tl.exp(logprob), p_others, mean_shifted,
                        mean_gap, HAS_REF,
                    )  # fmt: skip
                    _write_gradient(
                        x_row, ref_row, grad_row, token, vocab, logit_scale, softcap, scale,
                        slope / total, row_max, ref_max, g_logprob, g_entropy, g_kl,
                        mean_shifted, mean_gap, at_token, BLOCK_V,
                    )  # fmt: skip
        else:
            tl.store(logprobs + row, 0.0)
            tl.store(entropies + row, 0.0)
            tl.store(kls + row, 0.0)
            _store_sums(
                sums, row, n, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
            )  # fmt: skip
            if grad is not None:
                offset = _row_offset(row, grad_row_inner, grad_row_outer_stride, grad_row_stride)
                _write_zeros(grad + offset, vocab, BLOCK_V)


@triton.jit(do_not_specialize=["n", "row_inner", "ref_row_inner"])
def _token_stats_kernel(
    logits, row_inner, row_outer_stride, row_stride,
    ref_logits, ref_row_inner, ref_row_outer_stride, ref_row_stride,
    tokens, temperatures, logprobs, entropies, kls, normalizers, ref_normalizers, n, vocab,
    temperature, logit_scale, softcap,
    BLOCK_V: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """The first sweep of `_ppo_loss_kernel` by itself; `ref_logits` may be None."""
    for row in range(tl.program_id(0), n, tl.num_programs(0)):
        token = tl.load(tokens + row)
        x_row = logits + _row_offset(row, row_inner, row_outer_stride, row_stride)
        ref_row, ref_token = None, 0.0
        if ref_logits is not None:
            ref_row = ref_logits + _row_offset(
                row, ref_row_inner, ref_row_outer_stride, ref_row_stride
            )
            ref_token = _at_token(ref_row, token, vocab)
        scale, _ = _row_scale(row, temperature, temperatures, logit_scale, softcap)
        (
            logprob, entropy, kl, row_max, log_sum, _total, _mean_shifted,
            _p_others, _mean_gap, ref_max, ref_log_sum,
        ) = _row_statistics(
            x_row, ref_row, _at_token(x_row, token, vocab), ref_token, token, vocab,
            logit_scale, softcap, scale, BLOCK_V, LANES, VEC, "evict_first",
        )  # fmt: skip
        tl.store(logprobs + row, logprob)
        tl.store(entropies + row, entropy)
        tl.store(kls + row, kl)
        tl.store(normalizers + 2 * row, row_max)
        tl.store(normalizers + 2 * row + 1, log_sum)
        tl.store(ref_normalizers + 2 * row, ref_max)
        tl.store(ref_normalizers + 2 * row + 1, ref_log_sum)


@triton.jit(do_not_specialize=["n", "row_inner", "ref_row_inner"])
def _token_stats_backward_kernel(
    logits, row_inner, row_outer_stride, row_stride,
    ref_logits, ref_row_inner, ref_row_outer_stride, ref_row_stride,
    grad, grad_logprobs, grad_entropies, grad_kls, tokens, temperatures,
    logprobs, entropies, kls, normalizers, ref_normalizers, n, vocab,
    temperature, logit_scale, softcap, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The second sweep of `_ppo_loss_kernel` from the saved statistics; `grad` is dense [N, V].

    `grad_entropies` may be None; `ref_logits` and `grad_kls` are both given or both None.
    """
    HAS_REF: tl.constexpr = ref_logits is not None
    for row in range(tl.program_id(0), n, tl.num_programs(0)):
        grad_row = grad + tl.cast(row, tl.int64) * vocab
        g_logprob = tl.load(grad_logprobs + row).to(tl.float32)
        g_entropy = 0.0
        if grad_entropies is not None:
            g_entropy = tl.load(grad_entropies + row).to(tl.float32)
        g_kl = 0.0
        if HAS_REF:
            g_kl = tl.load(grad_kls + row).to(tl.float32)
        if (g_logprob == 0) & (g_entropy == 0) & (g_kl == 0):
            _write_zeros(grad_row, vocab, BLOCK_V)
        else:
            token = tl.load(tokens + row)
            x_row = logits + _row_offset(row, row_inner, row_outer_stride, row_stride)
            logprob = tl.load(logprobs + row)
            row_max = tl.load(normalizers + 2 * row)
            log_sum = tl.load(normalizers + 2 * row + 1)
            mean_shifted = log_sum - tl.load(entropies + row)
            ref_row, ref_token, ref_max, mean_gap = None, 0.0, 0.0, 0.0
            if HAS_REF:
                ref_row = ref_logits + _row_offset(
                    row, ref_row_inner, ref_row_outer_stride, ref_row_stride
                )
                ref_token = _at_token(ref_row, token, vocab)
                ref_max = tl.load(ref_normalizers + 2 * row)
                mean_gap = tl.load(kls + row) + log_sum - tl.load(ref_normalizers + 2 * row + 1)
            scale, slope = _row_scale(row, temperature, temperatures, logit_scale, softcap)
            at_token = _token_gradient(
                _at_token(x_row, token, vocab), row_max, ref_token, ref_max, logit_scale, softcap,
                scale, slope, g_logprob, g_entropy, g_kl, tl.exp(logprob), -_expm1(logprob),
                mean_shifted, mean_gap, HAS_REF,
            )  # fmt: skip
            _write_gradient(
                x_row, ref_row, grad_row, token, vocab, logit_scale, softcap, scale,
                slope * tl.exp(-log_sum), row_max, ref_max, g_logprob, g_entropy, g_kl,
                mean_shifted, mean_gap, at_token, BLOCK_V,
            )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def _add_sums_kernel(row_sums, sums, n, BLOCK_N: tl.constexpr):
    """Program k adds (the last one: maximises) row k of [len(SUMS), N], always in one order."""
    entry = tl.program_id(0)
    row_sums += entry * n.to(tl.int64)
    takes_max = entry == SUM_COUNT - 1
    found = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, n, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        x = tl.load(row_sums + index, index < n, other=0.0)
        largest = tl.maximum(found, x, propagate_nan=tl.PropagateNan.ALL)
        found = tl.where(takes_max, largest, found + x)
    # A reduction by max passes NaN over.
    total = tl.sum(found, 0)
    largest = tl.where(total == total, tl.max(found, 0), total)
    tl.store(sums + entry, tl.where(takes_max, largest, total))


@triton.jit(do_not_specialize=["rows", "row_inner"])
def _scale_kernel(
    x, row_inner, row_outer_stride, row_stride, factor, rows, columns, BLOCK_V: tl.constexpr
):
    """x ← x·factor. A factor of 1 is seen on the device: one load per program and no more."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        tiles = tl.cdiv(columns, BLOCK_V)
        tile_count = rows.to(tl.int64) * tiles
        for tile in range(tl.program_id(0), tile_count, tl.num_programs(0)):
            row = tile // tiles
            column = (tile - row * tiles) * BLOCK_V + tl.arange(0, BLOCK_V)
            entries = x + _row_offset(row, row_inner, row_outer_stride, row_stride) + column
            value = tl.load(entries, column < columns).to(tl.float32)
            tl.store(entries, (value * by).to(x.dtype.element_ty), column < columns)


# -------------------------------------------------------------------------------------- launchers


class Tile(NamedTuple):
    """How a row is cut: a program has `num_warps`·32 threads and takes `block_v` columns a time."""

    block_v: int
    num_warps: int
    max_registers: int | None = None


WARPS_PER_SM = 32
"""Wanted on each multiprocessor, over all its programs."""

VECTOR_BYTES = 16
"""The widest load of a thread; rows that do not start on this boundary are read by the element."""

MAX_REGISTERS = 128
"""Of a thread: all that 16 warps can have. Kernels that need a little more than 64 name it, because
ptxas by itself aims for two programs in place of one on a multiprocessor and spills to get there.
The whole tiles do not: they take about as many unasked, and spill when it is named."""

SINGLES_PER_VECTOR = 4
"""Loads of one element that stand in for a 16-byte load in rows that do not lie on 16 bytes: with
as many as a vector has elements, their addresses alone would fill the registers."""

# (logits per row up to, warps of a program, loads that a thread issues before it needs the first).
# Long rows: one or two programs per multiprocessor, so that the rows in flight fit in the
# second-level cache, with enough loads in flight to cover the memory's latency. Short rows: more
# programs, since each one waits at the end of its row.
TILES = ((8192, 4, 2), (math.inf, 16, 4))

CACHE_SHARE = 0.7
"""Of the second-level cache, for rows that wait for their second sweep."""

SUMS_BLOCK = 2048
SCALE_TILE = Tile(block_v=4096, num_warps=8)


def tile(vocab: int, vector_width: int, *, has_ref: bool, has_softcap: bool) -> Tile:
    """The tile for rows of `vocab` logits.

    With a reference a tile each of two rows is held, scores and shifted ones: a quarter fits the
    registers. A soft-cap's temporaries halve the tile.
    """
    num_warps, loads = next(row[1:] for row in TILES if vocab <= row[0])
    width = SINGLES_PER_VECTOR if vector_width == 1 else vector_width
    halvings = 2 * has_ref + has_softcap
    block_v = 32 * num_warps * max(1, loads >> halvings) * width
    return Tile(block_v, num_warps, MAX_REGISTERS if halvings else None)


@functools.lru_cache
def _device_limits(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, bytes of the second-level cache); under the interpreter, made up."""
    if device.type != "cuda":
        return 1, 2**20
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.L2_cache_size


def _program_count(device: torch.device, rows: int, row_bytes: int, num_warps: int) -> int:
    multiprocessors, cache = _device_limits(device)
    fitting = int(CACHE_SHARE * cache) // (multiprocessors * row_bytes)
    return min(rows, multiprocessors * max(1, min(WARPS_PER_SM // num_warps, fitting)))


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class _Rows(NamedTuple):
    """A kernel's view of [N, V] or [B, T, V]: see `_row_offset`."""

    tensor: Tensor | None
    inner: int = 1
    outer_stride: int = 0
    stride: int = 0


def _rows(x: Tensor | None) -> _Rows:
    if x is None:
        return _Rows(None)
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"logits must have a dense last axis, got strides {x.stride()}")
    if x.dim() == 2:
        return _Rows(x, max(1, x.shape[0]), 0, x.stride(0))
    if x.dim() == 3:
        return _Rows(x, max(1, x.shape[1]), x.stride(0), x.stride(1))
    raise ValueError(f"logits must be [N, V] or [B, T, V], got {list(x.shape)}")


def _vector_width(vocab: int, *rows: _Rows) -> int:
    """Elements of a 16-byte load, or 1 where Triton cannot prove that rows lie on 16 elements."""
    logits = rows[0].tensor
    assert logits is not None
    for row in rows:
        if row.tensor is not None and (
            row.tensor.data_ptr() % 16 or row.outer_stride % 16 or row.stride % 16
        ):
            return 1
    return 1 if vocab % 16 else VECTOR_BYTES // logits.element_size()


def _tile_of(
    vocab: int, vector_width: int, ref_logits: Tensor | None, softcap: float | None
) -> Tile:
    return tile(
        vocab, vector_width, has_ref=ref_logits is not None, has_softcap=softcap is not None
    )


def _check_dtype(logits: Tensor) -> None:
    if logits.dtype not in DTYPES:
        raise ValueError(f"logits must be bfloat16, float16 or float32, got {logits.dtype}")


def _dense(x: Tensor | None) -> Tensor | None:
    """Per-token operands are small: strides (0 after `expand`) are not worth an argument."""
    return None if x is None else x.contiguous()


def _temperatures(temperature: float | Tensor) -> tuple[float, Tensor | None]:
    if isinstance(temperature, Tensor):
        return 1.0, _dense(temperature)
    return float(temperature), None


def ppo_loss(
    logits: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    importance_weights: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    ref_logits: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    need_grad: bool = True,
    inplace: bool = False,
) -> PPORows:
    """`reference.ppo_loss`, one read and (with `need_grad`) one write of the logits.

    Args:
        logits: [N, V] or [B, T, V], bf16, fp16 or fp32, any strides, dense last axis.
        The rest as in `reference.ppo_loss`.

    Returns:
        PPORows, fp32; grad in the logits' dtype, rounded once.

    Raises:
        ValueError: fp64 logits; `inplace` on rows that overlap.
    """
    _check_dtype(logits)
    n, vocab = logits.shape[:-1].numel(), logits.shape[-1]
    if kl_estimator != "full":
        ref_logits = None
    estimator = (
        ESTIMATOR_CODES[kl_estimator]
        if ref_logprobs is not None and kl_estimator in (ESTIMATOR_CODES)
        else NO_KL.value
    )
    grad = None
    if need_grad:
        overlaps = 0 in (
            stride for stride, size in zip(logits.stride(), logits.shape, strict=True) if size > 1
        )
        if inplace and overlaps:
            raise ValueError("inplace=True needs rows of their own; these logits are expanded")
        contiguous = torch.contiguous_format
        grad = logits if inplace else torch.empty_like(logits, memory_format=contiguous)
    logprobs, entropy, kl = (logits.new_empty(n, dtype=torch.float32) for _ in range(3))
    row_sums = logits.new_empty((len(SUMS), n), dtype=torch.float32)
    sums = logits.new_empty(len(SUMS), dtype=torch.float32)
    rows, ref_rows, grad_rows = _rows(logits), _rows(ref_logits), _rows(grad)
    width = _vector_width(vocab, rows, ref_rows, grad_rows)
    shape = _tile_of(vocab, width, ref_logits, softcap)
    row_bytes = vocab * logits.element_size() * (1 if ref_logits is None else 2)
    scalar, temperatures = _temperatures(temperature)
    with _on(logits.device):
        if n > 0:
            _ppo_loss_kernel[(_program_count(logits.device, n, row_bytes, shape.num_warps),)](
                *rows,
                *ref_rows,
                *grad_rows,
                tokens.contiguous(),
                _dense(old_logprobs),
                _dense(advantages),
                _dense(weights),
                _dense(importance_weights),
                _dense(ref_logprobs) if estimator != NO_KL.value else None,
                temperatures,
                logprobs,
                entropy,
                kl,
                row_sums,
                n,
                vocab,
                scalar,
                float(logit_scale),
                softcap,
                1.0 - clip_low,
                1.0 + clip_high,
                math.inf if dual_clip is None else float(dual_clip),
                float(kl_coef),
                float(entropy_coef),
                ESTIMATOR=estimator,
                BLOCK_V=shape.block_v,
                LANES=32 * shape.num_warps,
                VEC=width,
                num_warps=shape.num_warps,
                maxnreg=shape.max_registers,
                enable_fp_fusion=True,
            )
        _add_sums_kernel[(len(SUMS),)](
            row_sums, sums, n, BLOCK_N=SUMS_BLOCK, num_warps=8, enable_fp_fusion=True
        )
    return PPORows(sums, logprobs, entropy, kl, grad)


def token_stats(
    logits: Tensor,
    tokens: Tensor,
    *,
    ref_logits: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> TokenStats:
    """`reference.token_stats` in one read of the logits; bf16, fp16 or fp32, else ValueError."""
    _check_dtype(logits)
    n, vocab = logits.shape[:-1].numel(), logits.shape[-1]
    logprobs, entropy, kl = (logits.new_empty(n, dtype=torch.float32) for _ in range(3))
    normalizer, ref_normalizer = (logits.new_empty((n, 2), dtype=torch.float32) for _ in range(2))
    rows, ref_rows = _rows(logits), _rows(ref_logits)
    width = _vector_width(vocab, rows, ref_rows)
    shape = _tile_of(vocab, width, ref_logits, softcap)
    row_bytes = vocab * logits.element_size() * (1 if ref_logits is None else 2)
    scalar, temperatures = _temperatures(temperature)
    if n > 0:
        with _on(logits.device):
            _token_stats_kernel[(_program_count(logits.device, n, row_bytes, shape.num_warps),)](
                *rows,
                *ref_rows,
                tokens.contiguous(),
                temperatures,
                logprobs,
                entropy,
                kl,
                normalizer,
                ref_normalizer,
                n,
                vocab,
                scalar,
                float(logit_scale),
                softcap,
                BLOCK_V=shape.block_v,
                LANES=32 * shape.num_warps,
                VEC=width,
                num_warps=shape.num_warps,
                maxnreg=shape.max_registers,
                enable_fp_fusion=True,
            )
    return TokenStats(logprobs, entropy, kl, normalizer, ref_normalizer)


def token_stats_backward(
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    grad_kl: Tensor | None,
    logits: Tensor,
    tokens: Tensor,
    stats: TokenStats,
    *,
    ref_logits: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """`reference.token_stats_backward`: one write, and one read of the rows with a gradient."""
    _check_dtype(logits)
    n, vocab = logits.shape[:-1].numel(), logits.shape[-1]
    if grad_kl is None:
        ref_logits = None
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows, ref_rows = _rows(logits), _rows(ref_logits)
    width = _vector_width(vocab, rows, ref_rows)
    shape = _tile_of(vocab, width, ref_logits, softcap)
    row_bytes = vocab * logits.element_size() * (1 if ref_logits is None else 2)
    scalar, temperatures = _temperatures(temperature)
    if n > 0:
        with _on(logits.device):
            _token_stats_backward_kernel[
                (_program_count(logits.device, n, row_bytes, shape.num_warps),)
            ](
                *rows,
                *ref_rows,
                grad,
                _dense(grad_logprobs),
                _dense(grad_entropy),
                _dense(grad_kl),
                tokens.contiguous(),
                temperatures,
                *(_dense(part) for part in stats),
                n,
                vocab,
                scalar,
                float(logit_scale),
                softcap,
                BLOCK_V=shape.block_v,
                num_warps=shape.num_warps,
                maxnreg=MAX_REGISTERS,
                enable_fp_fusion=True,
            )
    return grad


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """x ← x·factor in place, for a 0-d fp32 factor on the device of x; returns x.

    Where the factor is 1, nothing is read or written and nobody waits to find that out: a gradient
    that the forward pass has formed goes on as it is. The product is formed in fp32.

    Args:
        x: contiguous, or [N, V] or [B, T, V] with a dense last axis; bf16, fp16 or fp32.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be bfloat16, float16 or float32, got {x.dtype}")
    if x.numel() == 0:
        return x
    flat = x.view(-1, x.shape[-1]) if x.dim() != 2 and x.is_contiguous() else x
    rows, columns = flat.shape[:-1].numel(), flat.shape[-1]
    multiprocessors, _ = _device_limits(x.device)
    tiles = rows * triton.cdiv(columns, SCALE_TILE.block_v)
    programs = min(tiles, multiprocessors * WARPS_PER_SM // SCALE_TILE.num_warps)
    with _on(x.device):
        _scale_kernel[(programs,)](
            *_rows(flat),
            factor,
            rows,
            columns,
            BLOCK_V=SCALE_TILE.block_v,
            num_warps=SCALE_TILE.num_warps,
            enable_fp_fusion=True,
        )
    return x
