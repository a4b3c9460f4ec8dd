"""The first sweep for the full KL, which reads the reference's logits and the policy's.

In addition to the policy's sums (`sweeps`), with r_j the reference's shifted scores and m' its
maximum, it carries

    ref_mass = Σ e^{r_j}               gap = Σ e^{t_j}·(t_j − r_j)

When the maxima move, every t_j − r_j moves by apart = ((m_old − m_new) − (m'_old − m'_new))·c:

    gap ← (gap + apart·mass)·e^shift

Columns that the reference rules out (q = 0) are summed separately in `lost`; their p-mass makes the
KL infinite. With γ = gap/S, the KL and the gradient are

    KL   = γ − log S + log S_ref
    dz_j = (1/T)·{ g_l·[j=y] + p_j·( −g_l − g_h·(t_j − μ) + g_k·(t_j − r_j − γ) ) }

At the token, t_y − r_y − γ is computed from the sums over the others, because the difference has no
digits for p_y near 1. If another column j has nearly all of p, its t_j − r_j − γ is off by about
2⁻²³ of |t_j − r_j|, of which the row's largest entry is a (1 − p_j)-th part if the loss depends
only on the KL.

The kernels are in `loss` and `stats`; the second sweep, in `sweeps`, takes the reference's row too.
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
    capped,
    fma,
    gap_between,
    shifted,
)
from fastppo_kernels.triton.sweeps import (
    LaneSums,
    RefStats,
    by_lanes,
    dot_of_lanes,
    fold_whole,
    is_plain,
    load_policy_tile,
    max_of_lanes,
    no_sums,
    relative_to_maximum,
    rounded_away,
    sum_across_lanes,
    sum_of_lanes,
    with_token,
)
from fastppo_kernels.triton.views import (
    load_part,
    load_whole,
    part_start,
    places_in_whole_tiles,
)


class _RefSums(NamedTuple):
    """The reference's running sums in the first sweep, per lane."""

    row_max: Any
    mass: Any
    gap: Any
    lost: Any


class _RefAnchors(NamedTuple):
    """The rounded anchors of the reference's sums in whole tiles: its maximum times c·log₂e, and
    the policy's anchor minus it, for the gap."""

    row_max: Any
    apart: Any


@triton.jit
def _no_ref_sums(cut):
    lowest = tl.full([cut.lanes], FIRST_MAX, tl.float32)
    zero = tl.zeros([cut.lanes], tl.float32)
    return _RefSums(lowest, zero, zero, zero)


@triton.jit
def _fold_ref_whole(
    ref_sums,
    ref_anchors,
    mass,
    values,
    e,
    decay,
    anchor,
    ref_row,
    start,
    softmax,
    scale,
    cut,
    HINT: tl.constexpr,
):
    """Add a whole tile to the reference's sums.

    `mass` is the policy's before this tile; `values`, `e`, `decay` and `anchor` are the arguments
    and results of `fold_whole`.
    """
    ref_values, _ = load_whole(ref_row.entries, start, softmax, cut, HINT)
    ref_values = by_lanes(ref_values, cut)
    ref_top = max_of_lanes(ref_values)
    ref_anchor = tl.maximum(ref_anchors.row_max, ref_top * scale)
    r = fma(ref_values, scale, -ref_anchor[None, :, None])
    ref_mass = ref_sums.mass * tl.exp2(ref_anchors.row_max - ref_anchor)
    ref_mass += sum_of_lanes(tl.exp2(r))
    apart_anchor = anchor - ref_anchor
    apart = fma(values - ref_values, scale, -apart_anchor[None, :, None])
    gap = (ref_sums.gap + (ref_anchors.apart - apart_anchor) * mass) * decay
    gap += dot_of_lanes(e, apart)
    ref_max = tl.maximum(ref_sums.row_max, ref_top)
    return _RefSums(ref_max, ref_mass, gap, ref_sums.lost), _RefAnchors(ref_anchor, apart_anchor)


@triton.jit
def _ref_relative_to_maximum(ref_sums, ref_anchors, sums, anchor, scale):
    """`relative_to_maximum` for the reference; `sums` are the policy's before that call."""
    back = tl.exp2(-rounded_away(sums.row_max, anchor, scale))
    ref_mass = ref_sums.mass * tl.exp2(-rounded_away(ref_sums.row_max, ref_anchors.row_max, scale))
    moved_apart = rounded_away(sums.row_max - ref_sums.row_max, ref_anchors.apart, scale)
    seen = (sums.row_max > LOWEST) & (ref_sums.row_max > LOWEST)
    gap = (ref_sums.gap - tl.where(seen, moved_apart, 0.0) * sums.mass) * back
    return _RefSums(ref_sums.row_max, ref_mass, gap, ref_sums.lost)


@triton.jit
def _moved(sums, ref_sums, new_max, new_ref_max, shift, ref_shift, apart):
    """Update both sums after the maxima rose.

    t moves by `shift` and r by `ref_shift`, both ≤ 0, and t − r by `apart`.
    """
    decay = tl.exp2(shift)
    # A reference maximum that rises from nothing rules out all columns before it.
    gone = ref_shift <= LOWEST
    lost = tl.where(gone, ref_sums.lost + sums.mass, ref_sums.lost)
    mass = tl.where(gone, 0.0, sums.mass)
    gap = (tl.where(gone, 0.0, ref_sums.gap) + apart * mass) * decay
    moment = (sums.moment + shift * (mass + lost)) * decay
    return (
        LaneSums(new_max, mass * decay, moment),
        _RefSums(new_ref_max, ref_sums.mass * tl.exp2(ref_shift), gap, lost * decay),
    )


@triton.jit
def _moved_to(sums, ref_sums, new_max, new_ref_max, scale):
    """Update both sums for new maxima."""
    shift = shifted(sums.row_max, new_max, scale)
    ref_shift = shifted(ref_sums.row_max, new_ref_max, scale)
    apart = gap_between(
        sums.row_max, ref_sums.row_max, shift, ref_shift, new_max, new_ref_max, scale
    )
    return _moved(sums, ref_sums, new_max, new_ref_max, shift, ref_shift, apart)


@triton.jit
def _fold_part(sums, ref_sums, row, ref_row, start, token, softmax, scale, cut, HINT: tl.constexpr):
    """Add a tile with any values, partly outside the row, to both sums."""
    values, _ = load_part(row, start, token, softmax, cut.block, cut, HINT)
    values = by_lanes(values, cut)
    ref_values, _ = load_part(ref_row, start, None, softmax, cut.block, cut, HINT)
    ref_values = by_lanes(ref_values, cut)
    new_max = tl.maximum(sums.row_max, max_of_lanes(values))
    new_ref_max = tl.maximum(ref_sums.row_max, max_of_lanes(ref_values))
    sums, ref_sums = _moved_to(sums, ref_sums, new_max, new_ref_max, scale)
    t = shifted(values, new_max[None, :, None], scale)
    r = shifted(ref_values, new_ref_max[None, :, None], scale)
    e = tl.exp2(t)
    counted = tl.where(r <= LOWEST, 0.0, e)
    apart = gap_between(
        values, ref_values, t, r, new_max[None, :, None], new_ref_max[None, :, None], scale
    )
    return (
        LaneSums(new_max, sums.mass + sum_of_lanes(counted), sums.moment + sum_of_lanes(e * t)),
        _RefSums(
            new_ref_max,
            ref_sums.mass + sum_of_lanes(tl.exp2(r)),
            ref_sums.gap + sum_of_lanes(counted * apart),
            ref_sums.lost + sum_of_lanes(e - counted),
        ),
    )


@triton.jit
def _joined(sums, ref_sums, scale):
    """Combine the lanes."""
    top = tl.max(sums.row_max, 0)
    ref_top = tl.max(ref_sums.row_max, 0)
    sums, ref_sums = _moved_to(sums, ref_sums, top, ref_top, scale)
    return (
        LaneSums(top, sum_across_lanes(sums.mass), sum_across_lanes(sums.moment)),
        _RefSums(
            ref_top,
            sum_across_lanes(ref_sums.mass),
            sum_across_lanes(ref_sums.gap),
            sum_across_lanes(ref_sums.lost),
        ),
    )


@triton.jit
def row_statistics_with_reference(
    row, ref_row, x_token, ref_token, token, softmax, scale, cut, HINT: tl.constexpr
):
    """Return (RowStats, RefStats): `sweeps.row_statistics` over two rows."""
    token_value, _slope = capped(x_token, softmax)
    scale2 = scale * LOG2_E
    anchor = tl.full([cut.lanes], LOWEST, tl.float32)
    ref_anchors = _RefAnchors(anchor, anchor * 0.0)
    sums = no_sums(cut)
    ref_sums = _no_ref_sums(cut)
    first = cut.block if cut.phased else 0
    covered = places_in_whole_tiles(row.end, cut.block, cut)
    for start in range(first, covered + first, cut.block):
        values = load_policy_tile(row, start, token, softmax, cut, HINT)
        mass = sums.mass
        sums, anchor, e, decay = fold_whole(sums, anchor, values, scale2)
        ref_sums, ref_anchors = _fold_ref_whole(
            ref_sums,
            ref_anchors,
            mass,
            values,
            e,
            decay,
            anchor,
            ref_row,
            start,
            softmax,
            scale2,
            cut,
            HINT,
        )
    ref_sums = _ref_relative_to_maximum(ref_sums, ref_anchors, sums, anchor, scale2)
    sums = relative_to_maximum(sums, anchor, scale2)
    for part in range(0, tl.cdiv(row.end - covered, cut.block)):
        start = part_start(part, covered, cut.block, cut)
        sums, ref_sums = _fold_part(
            sums, ref_sums, row, ref_row, start, token, softmax, scale2, cut, HINT
        )
    joined, ref_joined = _joined(sums, ref_sums, scale2)
    plain = is_plain(joined.moment, joined.row_max, scale2)
    plain = plain & is_plain(ref_joined.gap, ref_joined.row_max, scale2)
    if plain == 0:
        sums = no_sums(cut)
        ref_sums = _no_ref_sums(cut)
        for part in range(0, tl.cdiv(row.end, cut.block)):
            sums, ref_sums = _fold_part(
                sums, ref_sums, row, ref_row, part * cut.block, token, softmax, scale2, cut, HINT
            )
        joined, ref_joined = _joined(sums, ref_sums, scale2)

    # Add the token. The reference's maximum already includes its column.
    row_max = tl.maximum(joined.row_max, token_value)
    ref_max = ref_joined.row_max
    shift = shifted(joined.row_max, row_max, scale2)
    stays = tl.zeros_like(shift)
    joined, ref_joined = _moved(joined, ref_joined, row_max, ref_max, shift, stays, shift)
    others = joined.mass + ref_joined.lost
    stats = with_token(row_max, others, joined.moment, token_value, scale, plain)
    t_token = shifted(token_value, row_max, scale2)
    e_token = tl.exp2(t_token)
    ref_log_sum = tl.log(ref_joined.mass)
    ref_value, _ref_slope = capped(ref_token, softmax)
    r_token = shifted(ref_value, ref_max, scale2)
    token_lost = r_token <= LOWEST
    apart = gap_between(token_value, ref_value, t_token, r_token, row_max, ref_max, scale2)
    gap = ref_joined.gap + tl.where(token_lost, 0.0, e_token * apart)
    lost = ref_joined.lost + tl.where(token_lost, e_token, 0.0)
    to_mean = LN_2 / stats.total
    mean_gap = tl.where(lost > 0, float("inf"), gap * to_mean)
    kl = mean_gap - stats.log_sum + ref_log_sum
    # From the others' sums: apart − γ has no digits for p_y near 1, where γ is near apart.
    token_gap = tl.where(lost > 0, -float("inf"), (apart * others - ref_joined.gap) * to_mean)
    return stats, RefStats(
        kl=kl,
        mean_gap=mean_gap,
        token_gap=tl.where(stats.logprob <= LOWEST, 0.0, token_gap),
        row_max=ref_max,
        log_sum=ref_log_sum,
        total=ref_joined.mass,
    )
