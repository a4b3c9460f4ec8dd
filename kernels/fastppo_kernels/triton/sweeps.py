"""The two sweeps over a row of logits: the statistics of its softmax, then its gradient.

For the shifted scores t_j = (z_j − m)·c, with c = 1/T and the running maximum m, the first sweep
carries per lane

    mass   = Σ e^{t_j}                 moment = Σ e^{t_j}·t_j

When the maximum moves, every t_j moves by shift = (m_old − m_new)·c ≤ 0:

    mass ← mass·e^shift                moment ← (moment + shift·mass)·e^shift

No sum contains z itself, so an offset of the row costs no digits. With S = Σ e^t (including the
token) and μ = moment/S,

    logprob = t_y − log S              entropy = log S − μ

The gradient is computed in a form without log S,

    dz_j = (1/T)·{ g_l·[j=y] + p_j·( −g_l − g_h·(t_j − μ) ) }

and the token's column is left out of the sums and added at the end. Both matter in peaked rows:
1 − p_y is then a sum of small terms instead of the difference of two numbers near 1, and the
gradient keeps its relative accuracy however confident the policy is.

The second sweep writes the gradient. It runs backwards, because the caches hold the end of the row.

Each sweep has a separate loop for whole tiles, without clamps or masks, in which one instruction
scales and shifts. The remainder, and rows with −inf or NaN, take a careful loop. The first sweep
with a reference is in `full_kl`; the second handles both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastppo_kernels.triton.jit import (
    FIRST_MAX,
    LN_2,
    LOG2_E,
    LOWEST,
    WHOLE_LIMIT,
    capped,
    fma,
    gap_between,
    log1p_below_one,
    shifted,
)
from fastppo_kernels.triton.views import (
    load_part,
    load_whole,
    part_of,
    part_start,
    places_in_whole_tiles,
)


class LaneSums(NamedTuple):
    """The running sums of the first sweep, per lane."""

    row_max: Any
    mass: Any
    moment: Any


class RowStats(NamedTuple):
    """The results of the first sweep, in nats."""

    logprob: Any
    entropy: Any
    row_max: Any
    log_sum: Any  # log S
    total: Any  # S
    mean_shifted: Any  # μ
    others: Any  # (S − e^{t_y})/S
    plain: Any  # neither −inf nor NaN: no clamp is needed


class RefStats(NamedTuple):
    """The reference's results of the first sweep (`full_kl`), in nats."""

    kl: Any
    mean_gap: Any  # γ
    token_gap: Any  # t_y − r_y − γ
    row_max: Any
    log_sum: Any  # log S_ref
    total: Any  # S_ref


# --------------------------------------------------------------------------------- sums over tiles

# A tile has the shape [block/(lanes·vector), lanes, vector], as its vectors lie in the threads: a
# lane is a thread, and the loops need no communication between threads.


@triton.jit
def by_lanes(x, cut):
    SHAPE: tl.constexpr = (cut.block // (cut.lanes * cut.vector), cut.lanes, cut.vector)
    return tl.reshape(x, SHAPE)


@triton.jit
def max_of_lanes(x):
    return tl.max(tl.max(x, 2), 0)


@triton.jit
def sum_of_lanes(x):
    """Sum within each thread: [vectors, lanes, vector] to [lanes]."""
    return tl.sum(tl.sum(x, 2), 0)


@triton.jit
def dot_of_lanes(x, y):
    """Σ x·y within each thread, mostly in multiply-adds, unlike a sum of products."""
    if x.shape[2] % 4 == 0:
        SHAPE: tl.constexpr = (x.shape[0], x.shape[1], x.shape[2] // 4, 2, 2)
        x_even, x_odd = tl.split(tl.reshape(x, SHAPE))
        y_even, y_odd = tl.split(tl.reshape(y, SHAPE))
        x0, x2 = tl.split(x_even)
        x1, x3 = tl.split(x_odd)
        y0, y2 = tl.split(y_even)
        y1, y3 = tl.split(y_odd)
        return sum_of_lanes(fma(x3, y3, fma(x2, y2, fma(x1, y1, x0 * y0))))
    else:
        return sum_of_lanes(x * y)


@triton.jit
def no_sums(cut):
    lowest = tl.full([cut.lanes], FIRST_MAX, tl.float32)
    zero = tl.zeros([cut.lanes], tl.float32)
    return LaneSums(lowest, zero, zero)


@triton.jit
def load_policy_tile(row, start, token, softmax, cut, HINT: tl.constexpr):
    """Load the scores of a whole tile, by lanes, without the token's."""
    values, _ = load_whole(row.entries, start, softmax, cut, HINT)
    if (token >= start) & (token < start + cut.block):
        values = tl.where(tl.arange(0, cut.block) == token - start, LOWEST, values)
    return by_lanes(values, cut)


@triton.jit
def fold_whole(sums, anchor, values, scale):
    """Add a whole tile; return (sums, anchor, e^t, decay of the earlier sums).

    The sums are relative to `anchor`, the rounded maximum times c·log₂e: t = fma(z, c·log₂e,
    −anchor) is one instruction with one rounding. Nothing is clamped: −inf makes the sums NaN.
    """
    top = max_of_lanes(values)
    new_anchor = tl.maximum(anchor, top * scale)
    shift = anchor - new_anchor
    decay = tl.exp2(shift)
    t = fma(values, scale, -new_anchor[None, :, None])
    e = tl.exp2(t)
    moment = (sums.moment + shift * sums.mass) * decay + dot_of_lanes(e, t)
    mass = sums.mass * decay + sum_of_lanes(e)
    return LaneSums(tl.maximum(sums.row_max, top), mass, moment), new_anchor, e, decay


@triton.jit
def rounded_away(maximum, anchor, scale):
    """maximum·scale − anchor, 0 before the first column."""
    return tl.where(tl.abs(maximum) < -LOWEST, fma(maximum, scale, -anchor), 0.0)


@triton.jit
def relative_to_maximum(sums, anchor, scale):
    """Make the sums relative to the exact maxima: the anchor's rounding error is known exactly."""
    residual = rounded_away(sums.row_max, anchor, scale)
    back = tl.exp2(-residual)
    return LaneSums(sums.row_max, sums.mass * back, (sums.moment - residual * sums.mass) * back)


@triton.jit
def moved(sums, new_max, scale):
    """Update the sums for a new maximum."""
    shift = shifted(sums.row_max, new_max, scale)
    decay = tl.exp2(shift)
    moment = (sums.moment + shift * sums.mass) * decay
    return LaneSums(new_max, sums.mass * decay, moment)


@triton.jit
def _fold_part(sums, row, start, token, softmax, scale, cut, HINT: tl.constexpr):
    """Add a tile with any values, partly outside the row."""
    values, _ = load_part(row, start, token, softmax, cut.block, cut, HINT)
    values = by_lanes(values, cut)
    new_max = tl.maximum(sums.row_max, max_of_lanes(values))
    t = shifted(values, new_max[None, :, None], scale)
    e = tl.exp2(t)
    sums = moved(sums, new_max, scale)
    # In this order: with the mass first, ptxas spills for unaligned rows on sm_90.
    moment = sums.moment + sum_of_lanes(e * t)
    return LaneSums(sums.row_max, sums.mass + sum_of_lanes(e), moment)


@triton.jit
def sum_across_lanes(x):
    """Return Σ x with the same bits in every thread.

    If x is a product, the compiler contracts it with the addition, and lane i would add its own
    unrounded product to the rounded one of lane i ⊕ 16. Adding 0 takes the contraction instead.
    """
    return tl.sum(x + 0.0, 0)


@triton.jit
def _joined(sums, scale):
    """Combine the lanes."""
    sums = moved(sums, tl.max(sums.row_max, 0), scale)
    return LaneSums(sums.row_max, sum_across_lanes(sums.mass), sum_across_lanes(sums.moment))


# ---------------------------------------------------------------------------------- first sweep


@triton.jit
def is_plain(moment, row_max, scale):
    """Return whether the sums of whole tiles are valid: no −inf, NaN or extremely low column, and a
    maximum not too far from 0. `moment` is combined over lanes, or the reference's `gap`."""
    return (tl.abs(moment) < -LOWEST) & (tl.abs(row_max * scale) < WHOLE_LIMIT)


@triton.jit
def row_statistics(row, x_token, token, softmax, scale, cut, HINT: tl.constexpr):
    """Return the RowStats of a row with its token at place `token` and the logit `x_token`."""
    token_value, _slope = capped(x_token, softmax)
    scale2 = scale * LOG2_E
    anchor = tl.full([cut.lanes], LOWEST, tl.float32)
    sums = no_sums(cut)
    # A part is a whole tile here: another shape would change the layout of the lanes.
    first = cut.block if cut.phased else 0
    covered = places_in_whole_tiles(row.end, cut.block, cut)
    for start in range(first, covered + first, cut.block):
        values = load_policy_tile(row, start, token, softmax, cut, HINT)
        sums, anchor, _e, _decay = fold_whole(sums, anchor, values, scale2)
    sums = relative_to_maximum(sums, anchor, scale2)
    for part in range(0, tl.cdiv(row.end - covered, cut.block)):
        start = part_start(part, covered, cut.block, cut)
        sums = _fold_part(sums, row, start, token, softmax, scale2, cut, HINT)
    joined = _joined(sums, scale2)
    plain = is_plain(joined.moment, joined.row_max, scale2)
    if plain == 0:
        sums = no_sums(cut)
        for part in range(0, tl.cdiv(row.end, cut.block)):
            sums = _fold_part(sums, row, part * cut.block, token, softmax, scale2, cut, HINT)
        joined = _joined(sums, scale2)
    others = moved(joined, tl.maximum(joined.row_max, token_value), scale2)
    return with_token(others.row_max, others.mass, others.moment, token_value, scale, plain)


@triton.jit
def with_token(row_max, others, moment, token_value, scale, plain):
    """Add the token to the sums of the others, relative to the row's maximum; return RowStats."""
    scale2 = scale * LOG2_E
    t_token2 = shifted(token_value, row_max, scale2)
    e_token = tl.exp2(t_token2)
    moment += e_token * t_token2
    total = others + e_token
    mean_shifted = moment * LN_2 / total
    # A row of −inf only is not a distribution.
    log_total = tl.where(total > 0, tl.log(total), float("nan"))
    t_token = shifted(token_value, row_max, scale)
    # For p_y > ½ from the others' share, which keeps digits that log S near 0 lacks.
    likely = e_token > others
    logprob = tl.where(
        likely, -log1p_below_one(others / tl.where(likely, e_token, 1.0)), t_token - log_total
    )
    log_sum = tl.where(likely, t_token - logprob, log_total)
    return RowStats(
        logprob=logprob,
        entropy=log_sum - mean_shifted,
        row_max=row_max,
        log_sum=log_sum,
        total=total,
        mean_shifted=mean_shifted,
        others=others / total,
        plain=plain & (tl.abs(t_token) < -LOWEST),
    )


@triton.jit
def defined_maximum(row, row_max, total, softmax, cut):
    """Return the maximum as the definition has it: −inf for a row of −inf only (`total` 0), and NaN
    for a row with NaN, which the running maximum ignores."""
    row_max = tl.where(total == 0, -float("inf"), row_max)
    if total != total:
        # NaN, +inf or both; for +inf alone the maximum is correct.
        nans = tl.zeros([cut.block], tl.int32)
        for start in range(0, row.end, cut.block):
            values, _ = load_part(row, start, None, softmax, cut.block, cut, "evict_first")
            nans += (values != values).to(tl.int32)
        row_max = tl.where(tl.sum(nans, 0) > 0, float("nan"), row_max)
    return row_max


@triton.jit
def store_stats(results, index, stats, row_max, ref_stats=None, ref_max=0.0):
    """Store a row of the StatsRows; the reference's entries are 0 without one."""
    tl.store(results.logprobs + index, stats.logprob)
    tl.store(results.entropy + index, stats.entropy)
    tl.store(results.p_others + index, stats.others)
    log_sum = tl.where(stats.total == 0, -float("inf"), stats.log_sum)
    normalizer = pair_of(results.normalizer, index)
    tl.store(normalizer, row_max)
    tl.store(normalizer + 1, log_sum)
    kl = 0.0
    mean_gap = 0.0
    token_gap = 0.0
    ref_log_sum = 0.0
    if ref_stats is not None:
        kl = ref_stats.kl
        mean_gap = ref_stats.mean_gap
        token_gap = ref_stats.token_gap
        ref_log_sum = ref_stats.log_sum
    tl.store(results.kl + index, kl)
    tl.store(results.mean_gap + index, mean_gap)
    tl.store(results.token_gap + index, token_gap)
    ref_normalizer = pair_of(results.ref_normalizer, index)
    tl.store(ref_normalizer, ref_max)
    tl.store(ref_normalizer + 1, ref_log_sum)


@triton.jit
def pair_of(normalizers, index):
    """Return the pointer to a row of [N, 2]; 2·index could overflow 32 bits."""
    return normalizers + index + index


# ---------------------------------------------------------------------------------- second sweep


@triton.jit
def token_gradient(x_token, stats, ref_stats, g, softmax, scale, slope):
    """Return dx at the token, with g_l·(1 − p_y) from the others' share."""
    value, cap_slope = capped(x_token, softmax)
    t = shifted(value, stats.row_max, scale)
    inner = g.entropy * (stats.mean_shifted - t)
    if ref_stats is not None:
        inner += tl.where(g.kl != 0, g.kl * ref_stats.token_gap, 0.0)
    return slope * cap_slope * (g.logprobs * stats.others + tl.exp(stats.logprob) * inner)


@triton.jit
def shifted_whole(values, anchor, scale, CLAMPED: tl.constexpr):
    """Return t in base 2 of a whole tile; with `CLAMPED` the row may contain −inf."""
    t = fma(values, scale, -anchor)
    return tl.maximum(t, LOWEST, propagate_nan=tl.PropagateNan.ALL) if CLAMPED else t


@triton.jit
def store_whole(grad_row, start, grad, slope, token, at_token, softmax, cut):
    """Store the gradient of a whole tile, with the cap's slope and the token's entry."""
    if softmax.softcap is not None:
        grad *= slope
    columns = tl.arange(0, cut.block)
    if (token >= start) & (token < start + cut.block):
        grad = tl.where(columns == token - start, at_token, grad)
    tl.store(grad_row.entries + start + columns, grad.to(grad_row.entries.dtype.element_ty))


@triton.jit
def store_part(grad_row, start, grad, slope, token, at_token, softmax, PART: tl.constexpr):
    """Store the gradient of a partial tile."""
    if softmax.softcap is not None:
        grad *= slope
    columns = tl.arange(0, PART)
    grad = tl.where(columns == token - start, at_token, grad)
    inside = (columns >= grad_row.first - start) & (columns < grad_row.end - start)
    tl.store(grad_row.entries + start + columns, grad.to(grad_row.entries.dtype.element_ty), inside)


@triton.jit
def write_gradient(
    row,
    grad_row,
    x_token,
    token,
    stats,
    g,
    softmax,
    scale,
    slope,
    cut,
    CLAMPED: tl.constexpr,
    ref_row=None,
    ref_stats=None,
):
    """Write the gradient from the StatsGradients `g`, last tile first; `slope` is dt/dx.

    With the reference's row and RefStats it includes the full KL.

        dx_j = e^{t_j}·(constant + linear·t_j + kl_linear·(t_j − r_j))

    The coefficients contain 1/S and, because t and r have base 2, ln 2.
    """
    at_token = token_gradient(x_token, stats, ref_stats, g, softmax, scale, slope)
    slope_over_total = slope / stats.total
    constant = g.entropy * stats.mean_shifted - g.logprobs
    if ref_row is not None:
        # An infinite KL that is only reported does not affect the gradient.
        constant -= tl.where(g.kl != 0, g.kl * ref_stats.mean_gap, 0.0)
        kl_linear = g.kl * LN_2 * slope_over_total
    constant *= slope_over_total
    linear = -g.entropy * LN_2 * slope_over_total
    scale2 = scale * LOG2_E
    # A part's stores may be masked per element, and their addresses take registers.
    PART: tl.constexpr = part_of(cut.block, cut.lanes * cut.vector)
    covered = tl.where(stats.plain, places_in_whole_tiles(row.end, PART, cut), 0)
    for part in range(0, tl.cdiv(row.end - covered, PART)):
        start = part_start(part, covered, PART, cut)
        values, cap_slope = load_part(row, start, None, softmax, PART, cut, "evict_first")
        t = shifted(values, stats.row_max, scale2)
        factor = constant + linear * t
        if ref_row is not None:
            ref_values, _ = load_part(ref_row, start, None, softmax, PART, cut, "evict_first")
            r = shifted(ref_values, ref_stats.row_max, scale2)
            factor += kl_linear * gap_between(
                values, ref_values, t, r, stats.row_max, ref_stats.row_max, scale2
            )
        grad = tl.exp2(t) * factor
        store_part(grad_row, start, grad, cap_slope, token, at_token, softmax, PART)
    if covered > 0:
        anchor = stats.row_max * scale2
        residual = fma(stats.row_max, scale2, -anchor)
        back = tl.exp2(-residual)
        whole_linear = linear * back
        whole_constant = constant - linear * residual
        if ref_row is not None:
            apart_max = stats.row_max - ref_stats.row_max
            apart_anchor = apart_max * scale2
            whole_constant -= kl_linear * fma(apart_max, scale2, -apart_anchor)
            whole_kl_linear = kl_linear * back
        whole_constant *= back
        last = covered + (PART if cut.phased else 0)
        for done in range(cut.block, covered + cut.block, cut.block):
            start = last - done
            values, cap_slope = load_whole(row.entries, start, softmax, cut, "evict_first")
            t = shifted_whole(values, anchor, scale2, CLAMPED)
            factor = fma(t, whole_linear, whole_constant)
            if ref_row is not None:
                ref_values, _ = load_whole(ref_row.entries, start, softmax, cut, "evict_first")
                apart = fma(values - ref_values, scale2, -apart_anchor)
                factor = fma(apart, whole_kl_linear, factor)
            grad = tl.exp2(t) * factor
            store_whole(grad_row, start, grad, cap_slope, token, at_token, softmax, cut)
