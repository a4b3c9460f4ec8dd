"""PPO's loss from logits, each row read from memory once: the Triton kernels and their launchers.

The operations are those of `fastppo_kernels.definition`, under the same names and signatures:
`ppo_loss`, `token_stats`, `token_stats_backward`; `scale_` serves the backward pass. A program
takes whole rows, one after the other. Its first sweep over a row carries, per lane, for the shifted
scores t_j = (z_j − m)·c with c = 1/T and the running maximum m,

    mass   = Σ e^{t_j}                 moment = Σ e^{t_j}·t_j

and when the maximum moves, every t_j moves by shift = (m_old − m_new)·c ≤ 0:

    mass ← mass·e^shift                moment ← (moment + shift·mass)·e^shift

so no sum ever holds z itself, and an offset of the row costs no digits. Against the reference's
logits, with r_j their shifted scores, `gap = Σ e^{t_j}·(t_j − r_j)` is carried in the same way;
columns that the reference rules out (q = 0) are counted apart in `lost`, whose p-mass makes the KL
infinite. With S = Σ e^t (the token included), μ = moment/S and γ = gap/S,

    logprob = t_y − log S      entropy = log S − μ      KL = γ − log S + log S_ref

The gradient is written in the formulas' cancelled form, where log S does not occur:

    dz_j = (1/T)·{ g_l·[j=y] + p_j·( −g_l − g_h·(t_j − μ) + g_k·(t_j − r_j − γ) ) }

and the token's column is left out of the sums and added after them as a scalar. Both matter in
peaked rows: 1 − p_y is then a sum of small terms, not the difference of two numbers near 1, and the
gradient keeps its relative accuracy however sure the policy is.

The second sweep writes the gradient. It runs backwards over the row, because the end of the row is
what the caches hold. Rows of weight 0 are not read at all; rows whose derivatives are all exactly
zero (clipped, no entropy or KL term) are not read twice. Sums for the metrics are written per row
and added in a fixed order by a second kernel: the same bits every run, on any number of programs.

Records enter the kernels: a field that is None folds away when a kernel is compiled.

Nothing here differentiates, aggregates or chooses a backend; tokens outside the vocabulary give NaN
and no stray read. fp64 logits have no kernel.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastppo_kernels.jit import (
    FIRST_MAX,
    LN_2,
    LOG2_E,
    LOWEST,
    RATIO_LIMIT,
    between,
    capped,
    fma,
    log1p_below_one,
    ratio_weighted_slope,
    row_scale,
    sampled_kl,
    score_unit,
    shifted,
)
from fastppo_kernels.launch import check_dtype, current, dense, dense_record, device_limits
from fastppo_kernels.records import (
    RATIO_MAX,
    SUMS,
    ChunkRows,
    Objective,
    PerToken,
    PPORows,
    Softmax,
    StatsGradients,
    Sums,
    TokenStats,
)

READS_VALUES = False
"""The host looks at no value: the launchers can be captured in a CUDA graph."""

SUM_COUNT = tl.constexpr(len(SUMS))
MAX_ENTRY = tl.constexpr(RATIO_MAX)


class RowsView(NamedTuple):
    """[N, V] or [B, T, V], rows counted through B·T: row i begins at
    (i // inner)·outer_stride + (i % inner)·stride. [N, V] is one outer entry."""

    tensor: Any
    inner: Any
    outer_stride: Any
    stride: Any


class _Lanes(NamedTuple):
    """The running sums of a row's first sweep, one of each per lane; see the module's docstring."""

    row_max: Any
    mass: Any
    lost: Any
    moment: Any
    gap: Any
    ref_max: Any
    ref_mass: Any


class _Anchors(NamedTuple):
    """What the sums of a sweep's whole tiles are relative to, one of each per lane.

    The maxima times c·log₂e and their difference, each rounded: t = fma(z, c·log₂e, −anchor) is one
    instruction and one rounding.
    """

    policy: Any
    reference: Any
    apart: Any


class _Factors(NamedTuple):
    """dx_j = e^{t_j}·(constant + linear·t_j + kl_linear·(t_j − r_j)), t and r in base 2."""

    constant: Any
    linear: Any
    kl_linear: Any


class _RowStats(NamedTuple):
    """What a row's first sweep finds, in nats; what belongs to the reference is 0 without one."""

    logprob: Any
    entropy: Any
    kl: Any
    row_max: Any
    log_sum: Any  # log S
    total: Any  # S
    mean_shifted: Any  # μ
    others: Any  # (S − e^{t_y})/S
    mean_gap: Any  # γ
    ref_max: Any
    ref_log_sum: Any  # log S_ref
    plain: Any  # no −inf, no NaN: the sums need no clamp


# ---------------------------------------------------------------------------- one row of a tensor


@triton.jit
def _row_of(view, row):
    """Where a row begins, in 64 bits."""
    outer, inner = (row // view.inner).to(tl.int64), (row % view.inner).to(tl.int64)
    return view.tensor + (outer * view.outer_stride + inner * view.stride)


@triton.jit
def _head(row, VEC: tl.constexpr):
    """Elements between the 16-byte boundary before a row and the row."""
    width: tl.constexpr = row.dtype.element_ty.primitive_bitwidth // 8
    return ((row.to(tl.int64) // width) % VEC).to(tl.int32)


@triton.jit
def _from_boundary(row, head, PHASED: tl.constexpr):
    """The 16-byte boundary before a row: a row's places count from there."""
    return tl.multiple_of(row - head, 16) if PHASED else row


@triton.jit
def _at_token(row, token, vocab):
    """The token's entry, read before the row's first sweep: the sweep's reductions join all
    threads, so no thread can have written the gradient in place yet."""
    known = (token >= 0) & (token < vocab)
    return tl.load(row + token, known, other=float("nan")).to(tl.float32)


@triton.jit
def _place(head, token, vocab):
    """The token's place in its row, in 32 bits; outside the row for one that is not there."""
    return head + tl.minimum(tl.maximum(token, -1), vocab).to(tl.int32)


# --------------------------------------------------------------------------- sweeps over one row


@triton.jit
def _gap(values, ref_values, t, r, maximum, ref_maximum, scale):
    """t − r. Near the reference from the difference of the scores themselves, which is exact where
    that of the two shifted and scaled ones is not; ruled-out columns keep their stand-ins."""
    near = ((values - ref_values) - (maximum - ref_maximum)) * scale
    return tl.where((t <= LOWEST) | (r <= LOWEST), t - r, near)


# A row is cut into whole tiles of BLOCK_V places and what they leave: its end, and the beginning of
# a phased row, whose places count from the 16-byte boundary before it. Those are taken by the part,
# with a mask. Where a row has −inf or NaN in it, all of it is.


@triton.constexpr_function
def _part(block_v, vectors):
    """Places of a part of a tile of four vectors a thread; smaller tiles are not cut."""
    return block_v // 4 if block_v // 4 >= vectors else block_v


@triton.jit
def _whole(end, BLOCK_V: tl.constexpr, PART: tl.constexpr, PHASED: tl.constexpr):
    """Places in whole tiles. A phased row's first part goes before them."""
    return tl.maximum(end - (PART if PHASED else 0), 0) // BLOCK_V * BLOCK_V


@triton.jit
def _part_start(part, whole, PART: tl.constexpr, PHASED: tl.constexpr):
    """The first part of a phased row is its beginning; all others follow the whole tiles."""
    return part * PART + (tl.minimum(part, 1) if PHASED else 1) * whole


@triton.jit
def _load_whole(
    x_row, start, softmax, BLOCK_V: tl.constexpr, VEC: tl.constexpr, HINT: tl.constexpr
):
    """(scores, slopes of the cap) of a tile inside the row."""
    if x_row.dtype.element_ty == tl.bfloat16 and VEC > 1:
        # Two at a time: a bf16 is the upper half of its fp32, a shift or a mask away.
        words = tl.load(
            x_row.to(tl.pointer_type(tl.int32)) + start // 2 + tl.arange(0, BLOCK_V // 2),
            eviction_policy=HINT,
        )
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
        x = tl.reshape(tl.join(low, high), (BLOCK_V,))
    else:
        x = tl.load(x_row + start + tl.arange(0, BLOCK_V), eviction_policy=HINT).to(tl.float32)
    return capped(x, softmax)


@triton.jit
def _load_part(
    x_row, start, first, end, left_out, softmax,
    BLOCK_V: tl.constexpr, VEC: tl.constexpr, PHASED: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """(scores, slopes) of a tile that the row does not fill, −inf outside it and at the place
    `left_out` if there is one."""
    columns = tl.arange(0, BLOCK_V)
    # A phased row shares its first and last 16 bytes with its neighbours: read, and not used.
    read = (columns // VEC * VEC if PHASED else columns) < end - start
    x = tl.load(x_row + start + columns, read, other=-float("inf"), eviction_policy=HINT)
    values, slope = capped(x.to(tl.float32), softmax)
    # A soft-cap turns the padding's −inf into −cap, a value like any other.
    if PHASED or softmax.softcap is not None:
        inside = (columns >= first - start) & (columns < end - start)
        if left_out is not None:
            inside = inside & (columns != left_out - start)
        values = tl.where(inside, values, -float("inf"))
    elif left_out is not None:
        values = tl.where(columns == left_out - start, -float("inf"), values)
    return values, slope


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
def _of_lanes(x):
    """Summed inside each thread: [vectors, lanes, vector] to [lanes]."""
    return tl.sum(tl.sum(x, 2), 0)


@triton.jit
def _dot_of_lanes(x, y):
    """Σ x·y inside each thread, most of it in multiply-adds, which a sum of products is not."""
    if x.shape[2] % 4 == 0:
        SHAPE: tl.constexpr = (x.shape[0], x.shape[1], x.shape[2] // 4, 2, 2)
        x_even, x_odd = tl.split(tl.reshape(x, SHAPE))
        y_even, y_odd = tl.split(tl.reshape(y, SHAPE))
        x0, x2 = tl.split(x_even)
        x1, x3 = tl.split(x_odd)
        y0, y2 = tl.split(y_even)
        y1, y3 = tl.split(y_odd)
        return _of_lanes(fma(x3, y3, fma(x2, y2, fma(x1, y1, x0 * y0))))
    else:
        return _of_lanes(x * y)


@triton.jit
def _fold_whole(
    lanes, anchors, x_row, ref_row, start, token, softmax, scale,
    BLOCK_V: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """One tile inside the row into the sums of the lanes, in as few instructions as it takes.

    The tile is seen as [BLOCK_V/(LANES·VEC), LANES, VEC], which is how its vectors lie in the
    threads: a lane is a thread, and the loop needs no word between threads. The sums are relative
    to the rounded products `anchors`, and nothing is clamped: −inf makes them NaN.
    """
    HAS_REF: tl.constexpr = ref_row is not None
    SHAPE: tl.constexpr = (BLOCK_V // (LANES * VEC), LANES, VEC)
    values, _ = _load_whole(x_row, start, softmax, BLOCK_V, VEC, HINT)
    if (token >= start) & (token < start + BLOCK_V):
        values = tl.where(tl.arange(0, BLOCK_V) == token - start, LOWEST, values)
    values = tl.reshape(values, SHAPE)
    top = tl.max(tl.max(values, 2), 0)
    anchor = tl.maximum(anchors.policy, top * scale)
    shift = anchors.policy - anchor
    decay = tl.exp2(shift)
    t = fma(values, scale, -anchor[None, :, None])
    e = tl.exp2(t)
    moment = (lanes.moment + shift * lanes.mass) * decay + _dot_of_lanes(e, t)
    ref_max, ref_mass, gap = lanes.ref_max, lanes.ref_mass, lanes.gap
    ref_anchor, apart_anchor = anchors.reference, anchors.apart
    if HAS_REF:
        ref_values, _ = _load_whole(ref_row, start, softmax, BLOCK_V, VEC, HINT)
        ref_values = tl.reshape(ref_values, SHAPE)
        ref_top = tl.max(tl.max(ref_values, 2), 0)
        ref_max = tl.maximum(ref_max, ref_top)
        ref_anchor = tl.maximum(ref_anchor, ref_top * scale)
        r = fma(ref_values, scale, -ref_anchor[None, :, None])
        ref_mass = ref_mass * tl.exp2(anchors.reference - ref_anchor) + _of_lanes(tl.exp2(r))
        apart_anchor = anchor - ref_anchor
        apart = fma(values - ref_values, scale, -apart_anchor[None, :, None])
        gap = (gap + (anchors.apart - apart_anchor) * lanes.mass) * decay + _dot_of_lanes(e, apart)
    mass = lanes.mass * decay + _of_lanes(e)
    row_max = tl.maximum(lanes.row_max, top)
    return (
        _Lanes(row_max, mass, lanes.lost, moment, gap, ref_max, ref_mass),
        _Anchors(anchor, ref_anchor, apart_anchor),
    )


@triton.jit
def _give_back(lanes, anchors, scale, HAS_REF: tl.constexpr):
    """The sums relative to the maxima themselves: what was rounded away in the anchors is known to
    the last bit."""
    residual = _residual(lanes.row_max, anchors.policy, scale)
    back = tl.exp2(-residual)
    ref_mass, gap = lanes.ref_mass, lanes.gap
    if HAS_REF:
        ref_mass *= tl.exp2(-_residual(lanes.ref_max, anchors.reference, scale))
        moved_apart = _residual(lanes.row_max - lanes.ref_max, anchors.apart, scale)
        some = (lanes.row_max > LOWEST) & (lanes.ref_max > LOWEST)
        gap = (gap - tl.where(some, moved_apart, 0.0) * lanes.mass) * back
    return _Lanes(
        lanes.row_max, lanes.mass * back, lanes.lost, (lanes.moment - residual * lanes.mass) * back,
        gap, lanes.ref_max, ref_mass,
    )  # fmt: skip


@triton.jit
def _residual(maximum, anchor, scale):
    """maximum·scale − anchor, 0 where no column has been seen."""
    return tl.where(tl.abs(maximum) < -LOWEST, fma(maximum, scale, -anchor), 0.0)


@triton.jit
def _fold_part(
    lanes, x_row, ref_row, start, first, end, token, softmax, scale,
    BLOCK_V: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, PHASED: tl.constexpr,
    HINT: tl.constexpr,
):  # fmt: skip
    """One tile into the sums of the lanes, whatever is in it and however much of it is the row."""
    HAS_REF: tl.constexpr = ref_row is not None
    SHAPE: tl.constexpr = (BLOCK_V // (LANES * VEC), LANES, VEC)
    values, _ = _load_part(x_row, start, first, end, token, softmax, BLOCK_V, VEC, PHASED, HINT)
    values = tl.reshape(values, SHAPE)
    new_max = tl.maximum(lanes.row_max, tl.max(tl.max(values, 2), 0))
    shift = shifted(lanes.row_max, new_max, scale)
    t = shifted(values, new_max[None, :, None], scale)
    e = tl.exp2(t)
    ref_shift, moved_apart = shift, shift
    new_ref_max, ref_mass = lanes.ref_max, lanes.ref_mass
    if HAS_REF:
        ref_values, _ = _load_part(
            ref_row, start, first, end, None, softmax, BLOCK_V, VEC, PHASED, HINT
        )
        ref_values = tl.reshape(ref_values, SHAPE)
        new_ref_max = tl.maximum(lanes.ref_max, tl.max(tl.max(ref_values, 2), 0))
        ref_shift = shifted(lanes.ref_max, new_ref_max, scale)
        r = shifted(ref_values, new_ref_max[None, :, None], scale)
        ref_mass = ref_mass * tl.exp2(ref_shift) + _of_lanes(tl.exp2(r))
        moved_apart = _gap(
            lanes.row_max, lanes.ref_max, shift, ref_shift, new_max, new_ref_max, scale
        )
    mass, lost, moment, gap = _moved(
        lanes.mass, lanes.lost, lanes.moment, lanes.gap, shift, ref_shift, moved_apart, HAS_REF
    )
    moment += _of_lanes(e * t)
    if HAS_REF:
        counted = tl.where(r <= LOWEST, 0.0, e)
        lost += _of_lanes(e - counted)
        apart = _gap(
            values, ref_values, t, r, new_max[None, :, None], new_ref_max[None, :, None], scale
        )
        gap += _of_lanes(counted * apart)
        e = counted
    mass += _of_lanes(e)
    return _Lanes(new_max, mass, lost, moment, gap, new_ref_max, ref_mass)


@triton.jit
def _joined(lanes, scale, HAS_REF: tl.constexpr):
    """The lanes become one."""
    top = tl.max(lanes.row_max, 0)
    shift = shifted(lanes.row_max, top, scale)
    ref_top = 0.0
    ref_mass = 0.0
    ref_shift, moved_apart = shift, shift
    if HAS_REF:
        ref_top = tl.max(lanes.ref_max, 0)
        ref_shift = shifted(lanes.ref_max, ref_top, scale)
        moved_apart = _gap(lanes.row_max, lanes.ref_max, shift, ref_shift, top, ref_top, scale)
        ref_mass = tl.sum(lanes.ref_mass * tl.exp2(ref_shift), 0)
    mass, lost, moment, gap = _moved(
        lanes.mass, lanes.lost, lanes.moment, lanes.gap, shift, ref_shift, moved_apart, HAS_REF
    )
    mass, moment = tl.sum(mass, 0), tl.sum(moment, 0)
    if HAS_REF:
        lost, gap = tl.sum(lost, 0), tl.sum(gap, 0)
    else:
        lost, gap = 0.0, 0.0
    return _Lanes(top, mass, lost, moment, gap, ref_top, ref_mass)


@triton.jit
def _nothing(LANES: tl.constexpr):
    lowest = tl.full([LANES], FIRST_MAX, tl.float32)
    zero = tl.zeros([LANES], tl.float32)
    return _Lanes(lowest, zero, zero, zero, zero, lowest, zero)


@triton.jit
def _row_statistics(
    x_row, ref_row, x_token, ref_token, first, end, token, softmax, scale,
    BLOCK_V: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, PHASED: tl.constexpr,
    HINT: tl.constexpr,
):  # fmt: skip
    """The first sweep over the places first to end − 1 of a row."""
    HAS_REF: tl.constexpr = ref_row is not None
    token_value, _ = capped(x_token, softmax)
    scale2 = scale * LOG2_E
    lowest = tl.full([LANES], LOWEST, tl.float32)
    anchors = _Anchors(lowest, lowest, lowest * 0.0)
    lanes = _nothing(LANES)
    PART: tl.constexpr = BLOCK_V  # of another shape, the lanes would change their layout
    whole = _whole(end, BLOCK_V, PART, PHASED)
    for start in range(PART if PHASED else 0, whole + (PART if PHASED else 0), BLOCK_V):
        lanes, anchors = _fold_whole(
            lanes, anchors, x_row, ref_row, start, token, softmax, scale2,
            BLOCK_V, LANES, VEC, HINT,
        )  # fmt: skip
    lanes = _give_back(lanes, anchors, scale2, HAS_REF)
    for part in range(0, tl.cdiv(end - whole, PART)):
        lanes = _fold_part(
            lanes, x_row, ref_row, _part_start(part, whole, PART, PHASED), first, end, token,
            softmax, scale2, PART, LANES, VEC, PHASED, HINT,
        )  # fmt: skip
    joined = _joined(lanes, scale2, HAS_REF)
    plain = (tl.abs(joined.moment) < -LOWEST) & (joined.row_max > LOWEST)
    if HAS_REF:
        plain = plain & (tl.abs(joined.gap) < -LOWEST) & (joined.ref_max > LOWEST)
    if plain == 0:
        # A column of −inf, of NaN, or so low that it may be one.
        lanes = _nothing(LANES)
        for part in range(0, tl.cdiv(end, PART)):
            lanes = _fold_part(
                lanes, x_row, ref_row, part * PART, first, end, token, softmax, scale2,
                PART, LANES, VEC, PHASED, HINT,
            )  # fmt: skip
        joined = _joined(lanes, scale2, HAS_REF)
    top, mass, lost, moment, gap, ref_top, ref_mass = (
        joined.row_max, joined.mass, joined.lost, joined.moment, joined.gap, joined.ref_max,
        joined.ref_mass,
    )  # fmt: skip

    # The token joins the others. The reference's maximum has seen its column: it does not move.
    row_top = tl.maximum(top, token_value)
    shift = shifted(top, row_top, scale2)
    mass, lost, moment, gap = _moved(mass, lost, moment, gap, shift, shift * 0.0, shift, HAS_REF)
    others = mass + lost
    t_token2 = shifted(token_value, row_top, scale2)
    e_token = tl.exp2(t_token2)
    moment += e_token * t_token2
    total = others + e_token
    mean_shifted = moment * LN_2 / total
    # A row of −inf alone is no distribution.
    log_total = tl.where(total > 0, tl.log(total), float("nan"))
    t_token = shifted(token_value, row_top, scale)
    # Above ½ from the others' share, which keeps digits that log S near 0 does not have.
    likely = e_token > others
    logprob = tl.where(
        likely, -log1p_below_one(others / tl.where(likely, e_token, 1.0)), t_token - log_total
    )
    log_sum = tl.where(likely, t_token - logprob, log_total)
    kl = 0.0
    mean_gap = 0.0
    ref_log_sum = 0.0
    if HAS_REF:
        ref_log_sum = tl.log(ref_mass)
        ref_value, _ = capped(ref_token, softmax)
        r_token = shifted(ref_value, ref_top, scale2)
        token_lost = r_token <= LOWEST
        apart = _gap(token_value, ref_value, t_token2, r_token, row_top, ref_top, scale2)
        gap += tl.where(token_lost, 0.0, e_token * apart)
        lost += tl.where(token_lost, e_token, 0.0)
        mean_gap = tl.where(lost > 0, float("inf"), gap * LN_2 / total)
        kl = mean_gap - log_sum + ref_log_sum
    return _RowStats(
        logprob, log_sum - mean_shifted, kl, row_top, log_sum, total, mean_shifted,
        others / total, mean_gap, ref_top, ref_log_sum, plain & (tl.abs(t_token) < -LOWEST),
    )  # fmt: skip


@triton.jit
def _token_gradient(x_token, ref_token, stats, g, softmax, scale, slope, HAS_REF: tl.constexpr):
    """dx at the token, where g_l·(1 − p_y) comes from the others' share."""
    value, cap_slope = capped(x_token, softmax)
    t = shifted(value, stats.row_max, scale)
    inner = g.entropy * (stats.mean_shifted - t)
    if HAS_REF:
        ref_value, _ = capped(ref_token, softmax)
        r = shifted(ref_value, stats.ref_max, scale)
        apart = _gap(value, ref_value, t, r, stats.row_max, stats.ref_max, scale)
        inner += tl.where(g.kl != 0, g.kl * (apart - stats.mean_gap), 0.0)
    return slope * cap_slope * (g.logprobs * stats.others + tl.exp(stats.logprob) * inner)


@triton.jit
def _write_whole(
    x_row, ref_row, grad_row, start, token, softmax, scale, anchor, apart_anchor, factors,
    at_token, BLOCK_V: tl.constexpr, VEC: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile inside a row of plain numbers; `CLAMPED`: or of −inf."""
    values, slope = _load_whole(x_row, start, softmax, BLOCK_V, VEC, "evict_first")
    t = fma(values, scale, -anchor)
    if CLAMPED:
        t = tl.maximum(t, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    factor = fma(t, factors.linear, factors.constant)
    if ref_row is not None:
        ref_values, _ = _load_whole(ref_row, start, softmax, BLOCK_V, VEC, "evict_first")
        factor = fma(fma(values - ref_values, scale, -apart_anchor), factors.kl_linear, factor)
    grad = tl.exp2(t) * factor
    if softmax.softcap is not None:
        grad *= slope
    columns = tl.arange(0, BLOCK_V)
    if (token >= start) & (token < start + BLOCK_V):
        grad = tl.where(columns == token - start, at_token, grad)
    tl.store(grad_row + start + columns, grad.to(grad_row.dtype.element_ty))


@triton.jit
def _write_part(
    x_row, ref_row, grad_row, start, first, end, token, softmax, scale, stats, factors, at_token,
    BLOCK_V: tl.constexpr, VEC: tl.constexpr, PHASED: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile, whatever is in it and however much of it is the row."""
    HAS_REF: tl.constexpr = ref_row is not None
    values, slope = _load_part(
        x_row, start, first, end, None, softmax, BLOCK_V, VEC, PHASED, "evict_first"
    )
    t = shifted(values, stats.row_max, scale)
    factor = factors.constant + factors.linear * t
    if HAS_REF:
        ref_values, _ = _load_part(
            ref_row, start, first, end, None, softmax, BLOCK_V, VEC, PHASED, "evict_first"
        )
        r = shifted(ref_values, stats.ref_max, scale)
        factor += factors.kl_linear * _gap(
            values, ref_values, t, r, stats.row_max, stats.ref_max, scale
        )
    grad = tl.exp2(t) * factor
    if softmax.softcap is not None:
        grad *= slope
    columns = tl.arange(0, BLOCK_V)
    grad = tl.where(columns == token - start, at_token, grad).to(grad_row.dtype.element_ty)
    inside = (columns >= first - start) & (columns < end - start)
    tl.store(grad_row + start + columns, grad, inside)


@triton.jit
def _write_gradient(
    x_row, ref_row, grad_row, x_token, ref_token, first, end, token, stats, g, softmax, scale,
    slope, slope_over_total,
    BLOCK_V: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, PHASED: tl.constexpr,
    CLAMPED: tl.constexpr,
):  # fmt: skip
    """The second sweep, last tile first. `slope_over_total` is (dx/dt)/S; e^t stands in for p."""
    HAS_REF: tl.constexpr = ref_row is not None
    at_token = _token_gradient(x_token, ref_token, stats, g, softmax, scale, slope, HAS_REF)
    constant = g.entropy * stats.mean_shifted - g.logprobs
    if HAS_REF:
        # An infinite KL that is only reported does not touch the gradient.
        constant -= tl.where(g.kl != 0, g.kl * stats.mean_gap, 0.0)
    # The sweep's t has base 2: ln 2 goes into its coefficients.
    factors = _Factors(
        constant * slope_over_total,
        -g.entropy * LN_2 * slope_over_total,
        g.kl * LN_2 * slope_over_total,
    )
    scale2 = scale * LOG2_E
    # A part's stores may be masked by the element, whose addresses take registers.
    PART: tl.constexpr = _part(BLOCK_V, LANES * VEC)
    whole = tl.where(stats.plain, _whole(end, BLOCK_V, PART, PHASED), 0)
    for part in range(0, tl.cdiv(end - whole, PART)):
        _write_part(
            x_row, ref_row, grad_row, _part_start(part, whole, PART, PHASED), first, end, token,
            softmax, scale2, stats, factors, at_token, PART, VEC, PHASED,
        )  # fmt: skip
    if whole > 0:
        anchor = stats.row_max * scale2
        residual = fma(stats.row_max, scale2, -anchor)
        constant = factors.constant - factors.linear * residual
        apart_anchor = 0.0
        if HAS_REF:
            apart_max = stats.row_max - stats.ref_max
            apart_anchor = apart_max * scale2
            constant -= factors.kl_linear * fma(apart_max, scale2, -apart_anchor)
        back = tl.exp2(-residual)
        factors = _Factors(constant * back, factors.linear * back, factors.kl_linear * back)
        last = whole + (PART if PHASED else 0)
        for done in range(BLOCK_V, whole + BLOCK_V, BLOCK_V):
            _write_whole(
                x_row, ref_row, grad_row, last - done, token, softmax, scale2, anchor,
                apart_anchor, factors, at_token, BLOCK_V, VEC, CLAMPED,
            )  # fmt: skip


@triton.jit
def _write_zeros(grad_row, vocab, BLOCK_V: tl.constexpr):
    columns = tl.arange(0, BLOCK_V)
    zeros = tl.zeros([BLOCK_V], grad_row.dtype.element_ty)
    for start in range(0, vocab, BLOCK_V):
        tl.store(grad_row + start + columns, zeros, start + columns < vocab)


# ------------------------------------------------------------------------------------- token loss


@triton.jit
def _token_loss(row, stats, weight, per_token, objective, HAS_REF: tl.constexpr):
    """(KL, derivatives by the statistics, share of the sums) of a row of weight ≠ 0.

    As `token_loss` and `loss_sums` of `torch_rows`. Infinite clips are no clipping: nothing is
    above, below or beyond them.
    """
    HAS_SAMPLED_KL: tl.constexpr = (
        per_token.ref_logprobs is not None and objective.kl_estimator != "full"
    )
    advantage = tl.load(per_token.advantages + row).to(tl.float32)
    difference = stats.logprob - tl.load(per_token.old_logprobs + row).to(tl.float32)
    ratio = tl.exp(between(difference, -RATIO_LIMIT, RATIO_LIMIT))
    unclipped = ratio * advantage
    clipped = between(ratio, objective.lowest_ratio, objective.highest_ratio) * advantage
    surrogate = tl.minimum(unclipped, clipped, propagate_nan=tl.PropagateNan.ALL)
    # Written so that a NaN counts as active: it must reach the gradient, where it is noticed.
    active = ((unclipped > clipped) | (tl.abs(difference) > RATIO_LIMIT)) == 0
    dual_clipped = 0.0
    if objective.dual_clip is not None:
        floor = objective.dual_clip * advantage
        dual = (advantage < 0) & (surrogate < floor)
        surrogate = tl.where(dual, floor, surrogate)
        active = active & (dual == 0)
        dual_clipped = ((advantage < 0) & (ratio > objective.dual_clip)).to(tl.float32)
    policy = -surrogate
    g_logprob = tl.where(active, -unclipped, 0.0)
    if per_token.importance_weights is not None:
        importance = tl.load(per_token.importance_weights + row).to(tl.float32)
        policy *= importance
        g_logprob *= importance
    kl = stats.kl
    g_kl = 0.0
    if HAS_REF:
        g_kl = weight * objective.kl_coef
    elif HAS_SAMPLED_KL:
        ref_logprob = tl.load(per_token.ref_logprobs + row).to(tl.float32)
        from_ref = stats.logprob - ref_logprob
        kl, slope = sampled_kl(from_ref, objective.kl_estimator)
        if objective.kl_ratio_weighted:
            both = ratio_weighted_slope(from_ref, kl, slope, objective.kl_estimator)
            slope = ratio * tl.where(tl.abs(difference) > RATIO_LIMIT, slope, both)
        g_logprob += tl.where(objective.kl_coef != 0, objective.kl_coef * slope, 0.0)
    loss = policy - objective.entropy_coef * stats.entropy
    if HAS_REF or HAS_SAMPLED_KL:
        penalty = ratio * kl if objective.kl_ratio_weighted else kl
        # A KL that is only reported may be infinite without spoiling the loss.
        loss += tl.where(objective.kl_coef != 0, objective.kl_coef * penalty, 0.0)
    approx_kl, _ = sampled_kl(-difference, "k3")
    above, below = ratio > objective.highest_ratio, ratio < objective.lowest_ratio
    positive, negative = advantage > 0, advantage < 0
    share = Sums(
        loss=weight * loss,
        policy_loss=weight * policy,
        tokens=1.0,  # type: ignore[arg-type]
        entropy=stats.entropy,
        kl=kl,
        approx_kl=approx_kl,
        ratio=ratio,
        ratio_squared=ratio * ratio,
        above_positive=(above & positive).to(tl.float32),
        below_positive=(below & positive).to(tl.float32),
        above_negative=(above & negative).to(tl.float32),
        below_negative=(below & negative).to(tl.float32),
        dual_clipped=dual_clipped,  # type: ignore[arg-type]
        ratio_max=ratio,
    )
    g_entropy = -objective.entropy_coef * weight
    g = StatsGradients(weight * g_logprob, g_entropy, g_kl)  # type: ignore[arg-type]
    return kl, g, share


# ---------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["n"])
def _ppo_loss_kernel(
    logits, ref_logits, grad, per_token, objective, softmax,
    logprobs, entropies, kls, sums, n, vocab,
    BLOCK_V: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, PHASED: tl.constexpr,
):  # fmt: skip
    """Rows program_id, program_id + num_programs, …; absent operands are None and cost nothing.

    `ref_logits` is there for the full KL alone, `grad` when a gradient is wanted; `sums` is
    [len(SUMS), N], a row's shares in a column.
    """
    HAS_REF: tl.constexpr = ref_logits is not None
    # Held for the second sweep, or evicted at once.
    HINT: tl.constexpr = "evict_first" if grad is None else "evict_last"
    # What is the same for all rows is formed anew for each: held, it would cost registers.
    for row in tl.range(tl.program_id(0), n, tl.num_programs(0), disable_licm=True):
        weight = tl.load(per_token.weights + row).to(tl.float32)
        if weight != 0:
            token = tl.load(per_token.tokens + row)
            x_row = _row_of(logits, row)
            x_token = _at_token(x_row, token, vocab)
            ref_row, ref_token = None, 0.0
            if HAS_REF:
                ref_row = _row_of(ref_logits, row)
                ref_token = _at_token(ref_row, token, vocab)
            scale, slope = row_scale(row, softmax)
            head = _head(x_row, VEC) if PHASED else 0
            place = _place(head, token, vocab)
            x_row = _from_boundary(x_row, head, PHASED)
            if HAS_REF:
                ref_row = _from_boundary(ref_row, head, PHASED)
            stats = _row_statistics(
                x_row, ref_row, x_token, ref_token, head, head + vocab, place, softmax,
                scale, BLOCK_V, LANES, VEC, PHASED, HINT,
            )  # fmt: skip
            kl, g, share = _token_loss(row, stats, weight, per_token, objective, HAS_REF)
            column = sums + row
            for entry in tl.static_range(SUM_COUNT):
                tl.store(column, share[entry])
                column += n
            tl.store(logprobs + row, stats.logprob)
            tl.store(entropies + row, stats.entropy)
            tl.store(kls + row, kl)
            if grad is not None:
                grad_row = _row_of(grad, row)
                # A row that is NaN says so in its gradient too.
                is_number = stats.log_sum == stats.log_sum
                is_dead = (g.logprobs == 0) & (g.entropy == 0) & (g.kl == 0) & is_number
                if is_dead:
                    _write_zeros(grad_row, vocab, _part(BLOCK_V, LANES * VEC))
                else:
                    _write_gradient(
                        x_row, ref_row, _from_boundary(grad_row, head, PHASED), x_token, ref_token,
                        head, head + vocab, place, stats, g, softmax, scale, slope,
                        slope / stats.total, BLOCK_V, LANES, VEC, PHASED, False,
                    )  # fmt: skip
        else:
            tl.store(logprobs + row, 0.0)
            tl.store(entropies + row, 0.0)
            tl.store(kls + row, 0.0)
            column = sums + row
            for _entry in tl.static_range(SUM_COUNT):
                tl.store(column, 0.0)
                column += n
            if grad is not None:
                _write_zeros(_row_of(grad, row), vocab, _part(BLOCK_V, LANES * VEC))


@triton.jit(do_not_specialize=["n"])
def _token_stats_kernel(
    logits, ref_logits, tokens, softmax, results, n, vocab,
    BLOCK_V: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, PHASED: tl.constexpr,
):  # fmt: skip
    """The first sweep of `_ppo_loss_kernel` by itself, to the TokenStats `results`."""
    for row in range(tl.program_id(0), n, tl.num_programs(0)):
        token = tl.load(tokens + row)
        x_row = _row_of(logits, row)
        ref_row, ref_token = None, 0.0
        if ref_logits is not None:
            ref_row = _row_of(ref_logits, row)
            ref_token = _at_token(ref_row, token, vocab)
        x_token = _at_token(x_row, token, vocab)
        scale, _ = row_scale(row, softmax)
        head = _head(x_row, VEC) if PHASED else 0
        place = _place(head, token, vocab)
        x_row = _from_boundary(x_row, head, PHASED)
        if ref_logits is not None:
            ref_row = _from_boundary(ref_row, head, PHASED)
        stats = _row_statistics(
            x_row, ref_row, x_token, ref_token, head, head + vocab, place, softmax, scale,
            BLOCK_V, LANES, VEC, PHASED, "evict_first",
        )  # fmt: skip
        tl.store(results.logprobs + row, stats.logprob)
        tl.store(results.entropy + row, stats.entropy)
        tl.store(results.kl + row, stats.kl)
        tl.store(results.p_others + row, stats.others)
        tl.store(results.mean_gap + row, stats.mean_gap)
        unit = score_unit(softmax)
        log_sum = tl.where(stats.total == 0, -float("inf"), stats.log_sum)
        tl.store(results.normalizer + 2 * row, stats.row_max * unit)
        tl.store(results.normalizer + 2 * row + 1, log_sum)
        tl.store(results.ref_normalizer + 2 * row, stats.ref_max * unit)
        tl.store(results.ref_normalizer + 2 * row + 1, stats.ref_log_sum)


@triton.jit(do_not_specialize=["n"])
def _token_stats_backward_kernel(
    logits, ref_logits, grad, grads, tokens, saved, softmax, n, vocab,
    BLOCK_V: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, PHASED: tl.constexpr,
):  # fmt: skip
    """The second sweep of `_ppo_loss_kernel` from the TokenStats `saved`.

    Of the StatsGradients `grads` entropy may be None; `ref_logits` and its kl are both there or
    both None.
    """
    HAS_REF: tl.constexpr = ref_logits is not None
    for row in range(tl.program_id(0), n, tl.num_programs(0)):
        grad_row = _row_of(grad, row)
        g_logprob = tl.load(grads.logprobs + row).to(tl.float32)
        g_entropy = 0.0
        if grads.entropy is not None:
            g_entropy = tl.load(grads.entropy + row).to(tl.float32)
        g_kl = 0.0
        if HAS_REF:
            g_kl = tl.load(grads.kl + row).to(tl.float32)
        if (g_logprob == 0) & (g_entropy == 0) & (g_kl == 0):
            _write_zeros(grad_row, vocab, _part(BLOCK_V, LANES * VEC))
        else:
            token = tl.load(tokens + row)
            x_row = _row_of(logits, row)
            logprob = tl.load(saved.logprobs + row)
            unit = score_unit(softmax)
            row_max = tl.load(saved.normalizer + 2 * row) / unit
            log_sum = tl.load(saved.normalizer + 2 * row + 1)
            entropy = tl.load(saved.entropy + row)
            ref_row, ref_token, ref_max, mean_gap = None, 0.0, 0.0, 0.0
            if HAS_REF:
                ref_row = _row_of(ref_logits, row)
                ref_token = _at_token(ref_row, token, vocab)
                ref_max = tl.load(saved.ref_normalizer + 2 * row) / unit
                mean_gap = tl.load(saved.mean_gap + row)
            scale, slope = row_scale(row, softmax)
            # Nothing tells of −inf among the logits: they are clamped, and against a reference
            # every tile is taken the careful way.
            plain = tl.abs(row_max * scale) < -LOWEST
            if HAS_REF:
                plain = row_max != row_max
            stats = _RowStats(
                logprob, entropy, 0.0, row_max, log_sum, tl.exp(log_sum), log_sum - entropy,
                tl.load(saved.p_others + row), mean_gap, ref_max, 0.0, plain,
            )  # fmt: skip
            g = StatsGradients(g_logprob, g_entropy, g_kl)  # type: ignore[arg-type]
            x_token = _at_token(x_row, token, vocab)
            head = _head(x_row, VEC) if PHASED else 0
            place = _place(head, token, vocab)
            if HAS_REF:
                ref_row = _from_boundary(ref_row, head, PHASED)
            _write_gradient(
                _from_boundary(x_row, head, PHASED), ref_row,
                _from_boundary(grad_row, head, PHASED), x_token, ref_token,
                head, head + vocab, place, stats, g, softmax, scale, slope,
                slope * tl.exp(-log_sum), BLOCK_V, LANES, VEC, PHASED, True,
            )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def _add_sums_kernel(row_sums, sums, n, BLOCK_N: tl.constexpr):
    """Program k adds (that of the maximum: maximises) row k of [len(SUMS), N], in one order."""
    entry = tl.program_id(0)
    row_sums += entry * n.to(tl.int64)
    takes_max = entry == MAX_ENTRY
    joined = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, n, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        x = tl.load(row_sums + index, index < n, other=0.0)
        largest = tl.maximum(joined, x, propagate_nan=tl.PropagateNan.ALL)
        joined = tl.where(takes_max, largest, joined + x)
    # A reduction by max passes NaN over.
    total = tl.sum(joined, 0)
    largest = tl.where(total == total, tl.max(joined, 0), total)
    tl.store(sums + entry, tl.where(takes_max, largest, total))


@triton.jit(do_not_specialize=["rows"])
def _scale_kernel(x, factor, rows, columns, BLOCK_V: tl.constexpr):
    """x ← x·factor. A factor of 1 is seen on the device: one load per program and no more."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        tiles = tl.cdiv(columns, BLOCK_V)
        tile_count = rows.to(tl.int64) * tiles
        for tile in range(tl.program_id(0), tile_count, tl.num_programs(0)):
            row = tile // tiles
            column = (tile - row * tiles) * BLOCK_V + tl.arange(0, BLOCK_V)
            entries = _row_of(x, row) + column
            value = tl.load(entries, column < columns).to(tl.float32)
            tl.store(entries, (value * by).to(x.tensor.dtype.element_ty), column < columns)


# -------------------------------------------------------------------------------------- launchers


class Tile(NamedTuple):
    """How a row is cut: a program has `num_warps`·32 threads of `registers` each and takes
    `block_v` columns a time."""

    block_v: int
    num_warps: int
    registers: int


VECTOR_BYTES = 16
"""The widest load of a thread."""

SINGLES_PER_VECTOR = 2
"""Loads of one element that stand in for a 16-byte load where a row of the logits and one of the
reference's or the gradient's lie differently against 16 bytes: with as many as a vector has
elements, their addresses alone would fill the registers."""

REGISTERS = 65536
"""Of a multiprocessor. With those of a thread named to ptxas, they say how many programs run on it;
unasked, ptxas takes 64 to 212 of them, and sometimes spills to get below a limit of its own."""

# (bytes of a row up to, warps of a program, loads that a thread issues before it needs the first,
# registers of a thread). The rows in flight should fit in the second-level cache, and the loads
# should cover the memory's latency: a long row has a multiprocessor to itself. Shorter ones, and
# rows that are read but once, share it: while one program waits, at the end of its row above all,
# another works.
TILES = ((2**14, 4, 2, 128), (2**17, 8, 4, 128), (math.inf, 16, 4, 128))
SWEPT_ONCE = (*TILES[:1], (math.inf, 8, 4, 128))

CACHE_SHARE = 0.7
"""Of the second-level cache, for rows that wait for their second sweep."""

UNCUT = 2**31 - 1
"""The inner axis of [N, V]: more rows than there can be. As a value, and an odd one, so that both
layouts run one kernel; a constant makes ptxas spill in the longest tile on sm_80."""

SUMS_BLOCK = 2048
SCALE_BLOCK, SCALE_WARPS, SCALE_PROGRAMS = 4096, 8, 4


def tile(
    row_bytes: int, itemsize: int, *, singles: bool, halvings: int = 0, swept_once: bool = False
) -> Tile:
    """The tile for rows of `row_bytes`, read by the vector or in `singles`.

    With a reference a tile each of two rows is held, scores and shifted ones: two halvings of the
    tile fit the registers. A soft-cap's temporaries are one more.
    """
    num_warps, loads, registers = next(
        row[1:] for row in (SWEPT_ONCE if swept_once else TILES) if row_bytes <= row[0]
    )
    width = SINGLES_PER_VECTOR if singles else VECTOR_BYTES // itemsize
    return Tile(32 * num_warps * max(1, loads >> halvings) * width, num_warps, registers)


def _program_count(device: torch.device, rows: int, held_bytes: int, shape: Tile) -> int:
    """Programs that run at once, while the `held_bytes` of each stay in the cache."""
    multiprocessors, cache = device_limits(device)
    resident = REGISTERS // (32 * shape.num_warps * shape.registers)
    if held_bytes:
        resident = min(resident, int(CACHE_SHARE * cache) // (multiprocessors * held_bytes))
    return min(rows, multiprocessors * max(1, resident))


def _view(x: Tensor | None) -> RowsView | None:
    if x is None:
        return None
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"logits must have a dense last axis, got strides {x.stride()}")
    if x.dim() == 2:
        return RowsView(x, UNCUT, 0, x.stride(0))
    if x.dim() == 3:
        return RowsView(x, max(1, x.shape[1]), x.stride(0), x.stride(1))
    raise ValueError(f"logits must be [N, V] or [B, T, V], got {list(x.shape)}")


def _agree(a: RowsView, b: RowsView, width: int) -> bool:
    """Whether row i of each begins as many elements behind a vector's boundary, for every i."""
    rows = a.tensor.shape[:-1].numel()

    def offsets(view: RowsView) -> tuple[int, int]:
        return view.stride % width, view.outer_stride % width if rows > view.inner else 0

    # [N, V] and a dense [B, T, V] are the same rows.
    def flat(view: RowsView) -> bool:
        return rows <= view.inner or view.outer_stride == view.inner * view.stride

    if flat(a) and flat(b):
        return (a.stride - b.stride) % width == 0
    return a.inner == b.inner and offsets(a) == offsets(b)


class _Launch(NamedTuple):
    """What every launch over rows of logits decides: its views of them, its grid and its tile."""

    logits: RowsView | None
    ref_logits: RowsView | None
    grad: RowsView | None
    grid: tuple[int]
    tile: Tile
    vector_width: int
    phased: bool


def _launch_over(
    logits: Tensor,
    softmax: Softmax,
    ref_logits: Tensor | None,
    grad: Tensor | None = None,
    *,
    sweeps: int,
) -> _Launch:
    n, vocab = logits.shape[:-1].numel(), logits.shape[-1]
    views = {"logits": _view(logits), "ref_logits": _view(ref_logits), "grad": _view(grad)}
    width = VECTOR_BYTES // logits.element_size()
    present = [view for view in views.values() if view is not None]
    # Triton can prove that rows lie on 16 elements; or all rows of a number lie alike against the
    # boundary, which the kernel finds; or a thread loads one at a time.
    phased = vocab % 16 != 0 or any(
        view.tensor.data_ptr() % 16 or view.outer_stride % 16 or view.stride % 16
        for view in present
    )
    one = present[0]
    if phased and any(
        (view.tensor.data_ptr() - one.tensor.data_ptr()) % VECTOR_BYTES
        or view.tensor.element_size() != one.tensor.element_size()
        or not _agree(view, one, width)
        for view in present
    ):
        width, phased = 1, False
    row_bytes = vocab * logits.element_size()
    shape = tile(
        row_bytes,
        logits.element_size(),
        singles=width == 1,
        halvings=2 * (ref_logits is not None) + (softmax.softcap is not None),
        swept_once=sweeps == 1,
    )
    held = 0 if sweeps == 1 else row_bytes * (1 + (ref_logits is not None))
    programs = _program_count(logits.device, n, held, shape)
    return _Launch(**views, grid=(programs,), tile=shape, vector_width=width, phased=phased)


def ppo_loss(
    logits: Tensor,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    *,
    ref_logits: Tensor | None = None,
    need_grad: bool = True,
    inplace: bool = False,
) -> PPORows:
    """`definition.ppo_loss`, one read and (with `need_grad`) one write of the logits.

    Args:
        logits: [N, V] or [B, T, V], bf16, fp16 or fp32, any strides, dense last axis.
        inplace: write the gradient over the logits.

    Returns:
        PPORows, fp32; grad in the logits' dtype, rounded once.

    Raises:
        ValueError: fp64 logits; `inplace` on rows that overlap.
    """
    grad = None
    if need_grad:
        overlaps = 0 in (
            stride for stride, size in zip(logits.stride(), logits.shape, strict=True) if size > 1
        )
        if inplace and overlaps:
            raise ValueError("inplace=True needs rows that do not overlap, got expanded logits")
        contiguous = torch.contiguous_format
        grad = logits if inplace else torch.empty_like(logits, memory_format=contiguous)
    return _ppo_loss(logits, per_token, objective, softmax, ref_logits, grad)


def chunk_ppo_loss(
    logits: Tensor,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    *,
    ref_logits: Tensor | None = None,
    need_grad: bool = True,
) -> ChunkRows:
    """`ppo_loss` in place, for the chunk loop of `linear`: the gradient of every row."""
    grad = logits if need_grad else None
    rows = _ppo_loss(logits, per_token, objective, softmax, ref_logits, grad)
    return ChunkRows(rows.logprobs, rows.entropy, rows.kl, rows.sums, rows.grad)


def _ppo_loss(
    logits: Tensor,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    ref_logits: Tensor | None,
    grad: Tensor | None,
) -> PPORows:
    """Writes the gradient into `grad`."""
    check_dtype("logits", logits)
    n, vocab = logits.shape[:-1].numel(), logits.shape[-1]
    if objective.kl_estimator != "full":
        ref_logits = None
    logprobs, entropy, kl = (logits.new_empty(n, dtype=torch.float32) for _ in range(3))
    row_sums = logits.new_empty((len(SUMS), n), dtype=torch.float32)
    sums = logits.new_empty(len(SUMS), dtype=torch.float32)
    launch = _launch_over(logits, softmax, ref_logits, grad, sweeps=1 if grad is None else 2)
    with current(logits.device):
        if n > 0:
            _ppo_loss_kernel[launch.grid](
                launch.logits,
                launch.ref_logits,
                launch.grad,
                dense_record(per_token),
                # Names are no values of a kernel, but compile-time constants of it.
                objective._replace(
                    kl_estimator=tl.constexpr(objective.kl_estimator),
                    kl_ratio_weighted=tl.constexpr(objective.kl_ratio_weighted),
                ),
                dense_record(softmax),
                logprobs,
                entropy,
                kl,
                row_sums,
                n,
                vocab,
                BLOCK_V=launch.tile.block_v,
                LANES=32 * launch.tile.num_warps,
                VEC=launch.vector_width,
                PHASED=launch.phased,
                num_warps=launch.tile.num_warps,
                maxnreg=launch.tile.registers,
                enable_fp_fusion=True,
            )
        _add_sums_kernel[(len(SUMS),)](
            row_sums, sums, n, BLOCK_N=SUMS_BLOCK, num_warps=8, enable_fp_fusion=True
        )
    return PPORows(sums, logprobs, entropy, kl, grad)


def token_stats(
    logits: Tensor, tokens: Tensor, softmax: Softmax, *, ref_logits: Tensor | None = None
) -> TokenStats:
    """`definition.token_stats` in one read of the logits; bf16, fp16 or fp32, else ValueError."""
    check_dtype("logits", logits)
    n, vocab = logits.shape[:-1].numel(), logits.shape[-1]
    columns = (logits.new_empty(n, dtype=torch.float32) for _ in range(5))
    normalizers = (logits.new_empty((n, 2), dtype=torch.float32) for _ in range(2))
    stats = TokenStats(*columns, *normalizers)
    launch = _launch_over(logits, softmax, ref_logits, sweeps=1)
    if n > 0:
        with current(logits.device):
            _token_stats_kernel[launch.grid](
                launch.logits,
                launch.ref_logits,
                dense(tokens),
                dense_record(softmax),
                stats,
                n,
                vocab,
                BLOCK_V=launch.tile.block_v,
                LANES=32 * launch.tile.num_warps,
                VEC=launch.vector_width,
                PHASED=launch.phased,
                num_warps=launch.tile.num_warps,
                maxnreg=launch.tile.registers,
                enable_fp_fusion=True,
            )
    return stats


def token_stats_backward(
    grads: StatsGradients,
    logits: Tensor,
    tokens: Tensor,
    stats: TokenStats,
    softmax: Softmax,
    *,
    ref_logits: Tensor | None = None,
) -> Tensor:
    """`definition.token_stats_backward`: one write, and one read of the rows with a gradient."""
    check_dtype("logits", logits)
    n, vocab = logits.shape[:-1].numel(), logits.shape[-1]
    if grads.kl is None:
        ref_logits = None
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    launch = _launch_over(logits, softmax, ref_logits, grad, sweeps=1)
    if n > 0:
        with current(logits.device):
            _token_stats_backward_kernel[launch.grid](
                launch.logits,
                launch.ref_logits,
                launch.grad,
                dense_record(grads),
                dense(tokens),
                dense_record(stats),
                dense_record(softmax),
                n,
                vocab,
                BLOCK_V=launch.tile.block_v,
                LANES=32 * launch.tile.num_warps,
                VEC=launch.vector_width,
                PHASED=launch.phased,
                num_warps=launch.tile.num_warps,
                maxnreg=launch.tile.registers,
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
    check_dtype("x", x)
    if x.numel() == 0:
        return x
    flat = x.view(-1, x.shape[-1]) if x.dim() != 2 and x.is_contiguous() else x
    rows, columns = flat.shape[:-1].numel(), flat.shape[-1]
    multiprocessors, _ = device_limits(x.device)
    tiles = rows * triton.cdiv(columns, SCALE_BLOCK)
    programs = min(tiles, multiprocessors * SCALE_PROGRAMS)
    with current(x.device):
        _scale_kernel[(programs,)](
            _view(flat),
            factor,
            rows,
            columns,
            BLOCK_V=SCALE_BLOCK,
            num_warps=SCALE_WARPS,
            enable_fp_fusion=True,
        )
    return x
