"""The row kernels of the full KL, which reads the reference's logits beside the policy's.

The first sweep carries, beside the policy's sums (`triton_sweeps`), with r_j the reference's
shifted scores and m' its maximum,

    ref_mass = Σ e^{r_j}               gap = Σ e^{t_j}·(t_j − r_j)

and when the maxima move, every t_j − r_j moves by apart = ((m_old − m_new) − (m'_old − m'_new))·c:

    gap ← (gap + apart·mass)·e^shift

Columns that the reference rules out (q = 0) are counted apart in `lost`, whose p-mass makes the KL
infinite. With γ = gap/S, the KL and the gradient are

    KL   = γ − log S + log S_ref
    dz_j = (1/T)·{ g_l·[j=y] + p_j·( −g_l − g_h·(t_j − μ) + g_k·(t_j − r_j − γ) ) }

At the token, t_y − r_y − γ comes from the sums over the others: the difference has no digits where
p_y is near 1. Where another column j has nearly all of p, its t_j − r_j − γ is off by some 2⁻²³ of
|t_j − r_j|, of which the row's largest entry is a (1 − p_j)-th part if the loss depends on the KL
alone.

The kernels are launched by `triton_loss` and `triton_stats`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastppo_kernels.jit import (
    FIRST_MAX,
    LN_2,
    LOG2_E,
    LOWEST,
    capped,
    fma,
    row_scale,
    shifted,
)
from fastppo_kernels.records import StatsGradients
from fastppo_kernels.triton_sweeps import (
    LaneSums,
    RowStats,
    by_lanes,
    defined_maximum,
    dot_of_lanes,
    fold_whole,
    is_plain,
    load_policy_tile,
    max_of_lanes,
    no_sums,
    relative_to_maximum,
    rounded_away,
    shifted_whole,
    store_part,
    store_stats,
    store_whole,
    sum_across_lanes,
    sum_of_lanes,
    token_gradient,
    with_token,
)
from fastppo_kernels.triton_token_loss import is_dead, store_nothing, store_token, token_loss
from fastppo_kernels.triton_views import (
    load_part,
    load_whole,
    logit_at,
    part_of,
    part_start,
    place_of,
    places_in_whole_tiles,
    row_at,
    row_beside,
    write_zeros,
)


class _RefSums(NamedTuple):
    """The running sums that the reference adds to a row's first sweep, one of each per lane."""

    row_max: Any
    mass: Any
    gap: Any
    lost: Any


class _RefAnchors(NamedTuple):
    """What the reference's sums and the gap are relative to in a sweep's whole tiles: the maximum
    times c·log₂e, and the policy's anchor less it, both rounded."""

    row_max: Any
    apart: Any


class _RefStats(NamedTuple):
    """What a row's first sweep leaves of the reference, in nats."""

    kl: Any
    mean_gap: Any  # γ
    token_gap: Any  # t_y − r_y − γ
    row_max: Any
    log_sum: Any  # log S_ref
    total: Any  # S_ref


@triton.jit
def _gap(values, ref_values, t, r, row_max, ref_max, scale):
    """t − r. Near the reference from the difference of the scores themselves, which is exact where
    that of the two shifted and scaled ones is not; ruled-out columns keep their stand-ins."""
    near = ((values - ref_values) - (row_max - ref_max)) * scale
    return tl.where((t <= LOWEST) | (r <= LOWEST), t - r, near)


# ---------------------------------------------------------------------------------- first sweep


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
    """One tile inside the row into the reference's sums; `mass` is the policy's before this tile,
    `values`, `e`, `decay` and `anchor` what `fold_whole` took and gave."""
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
    """As `relative_to_maximum`; `sums` are the policy's before that."""
    back = tl.exp2(-rounded_away(sums.row_max, anchor, scale))
    ref_mass = ref_sums.mass * tl.exp2(-rounded_away(ref_sums.row_max, ref_anchors.row_max, scale))
    moved_apart = rounded_away(sums.row_max - ref_sums.row_max, ref_anchors.apart, scale)
    seen = (sums.row_max > LOWEST) & (ref_sums.row_max > LOWEST)
    gap = (ref_sums.gap - tl.where(seen, moved_apart, 0.0) * sums.mass) * back
    return _RefSums(ref_sums.row_max, ref_mass, gap, ref_sums.lost)


@triton.jit
def _moved(sums, ref_sums, new_max, new_ref_max, shift, ref_shift, apart):
    """Both sums after the maxima rose: t moves by `shift`, r by `ref_shift`, neither above 0, and
    t − r by `apart`."""
    decay = tl.exp2(shift)
    # A reference maximum that rises from nothing rules out whatever stood before it.
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
    """Both sums after the maxima rose."""
    shift = shifted(sums.row_max, new_max, scale)
    ref_shift = shifted(ref_sums.row_max, new_ref_max, scale)
    apart = _gap(sums.row_max, ref_sums.row_max, shift, ref_shift, new_max, new_ref_max, scale)
    return _moved(sums, ref_sums, new_max, new_ref_max, shift, ref_shift, apart)


@triton.jit
def _fold_part(sums, ref_sums, row, ref_row, start, token, softmax, scale, cut, HINT: tl.constexpr):
    """One tile into both sums, whatever is in it and however much of it is the row."""
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
    apart = _gap(
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
    """The lanes become one."""
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
def _row_statistics(
    row, ref_row, x_token, ref_token, token, softmax, scale, cut, HINT: tl.constexpr
):
    """(RowStats, _RefStats); as `triton_sweeps.row_statistics`, over two rows."""
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

    # The token joins the others. The reference's maximum has seen its column: it does not move.
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
    apart = _gap(token_value, ref_value, t_token, r_token, row_max, ref_max, scale2)
    gap = ref_joined.gap + tl.where(token_lost, 0.0, e_token * apart)
    lost = ref_joined.lost + tl.where(token_lost, e_token, 0.0)
    to_mean = LN_2 / stats.total
    mean_gap = tl.where(lost > 0, float("inf"), gap * to_mean)
    kl = mean_gap - stats.log_sum + ref_log_sum
    # From the others' sums: apart − γ has no digits where p_y is near 1, and γ near apart.
    token_gap = tl.where(lost > 0, -float("inf"), (apart * others - ref_joined.gap) * to_mean)
    return stats, _RefStats(
        kl=kl,
        mean_gap=mean_gap,
        token_gap=tl.where(stats.logprob <= LOWEST, 0.0, token_gap),
        row_max=ref_max,
        log_sum=ref_log_sum,
        total=ref_joined.mass,
    )


# ---------------------------------------------------------------------------------- second sweep


@triton.jit
def _write_gradient(
    row,
    ref_row,
    grad_row,
    x_token,
    token,
    stats,
    ref_stats,
    g,
    softmax,
    scale,
    slope,
    slope_over_total,
    cut,
    CLAMPED: tl.constexpr,
):
    """As `triton_sweeps.write_gradient`, over two rows."""
    # An infinite KL that is only reported does not touch the gradient.
    kl_share = tl.where(g.kl != 0, g.kl * ref_stats.token_gap, 0.0)
    at_token = token_gradient(x_token, kl_share, stats, g, softmax, scale, slope)
    constant = g.entropy * stats.mean_shifted - g.logprobs
    constant -= tl.where(g.kl != 0, g.kl * ref_stats.mean_gap, 0.0)
    # The sweep's t and r have base 2: ln 2 goes into their coefficients.
    constant *= slope_over_total
    linear = -g.entropy * LN_2 * slope_over_total
    kl_linear = g.kl * LN_2 * slope_over_total
    scale2 = scale * LOG2_E
    # A part's stores may be masked by the element, whose addresses take registers.
    PART: tl.constexpr = part_of(cut.block, cut.lanes * cut.vector)
    covered = tl.where(stats.plain, places_in_whole_tiles(row.end, PART, cut), 0)
    for part in range(0, tl.cdiv(row.end - covered, PART)):
        start = part_start(part, covered, PART, cut)
        values, cap_slope = load_part(row, start, None, softmax, PART, cut, "evict_first")
        ref_values, _ = load_part(ref_row, start, None, softmax, PART, cut, "evict_first")
        t = shifted(values, stats.row_max, scale2)
        r = shifted(ref_values, ref_stats.row_max, scale2)
        factor = constant + linear * t
        factor += kl_linear * _gap(
            values, ref_values, t, r, stats.row_max, ref_stats.row_max, scale2
        )
        grad = tl.exp2(t) * factor
        store_part(grad_row, start, grad, cap_slope, token, at_token, softmax, PART)
    if covered > 0:
        anchor = stats.row_max * scale2
        residual = fma(stats.row_max, scale2, -anchor)
        apart_max = stats.row_max - ref_stats.row_max
        apart_anchor = apart_max * scale2
        whole_constant = constant - linear * residual
        whole_constant -= kl_linear * fma(apart_max, scale2, -apart_anchor)
        back = tl.exp2(-residual)
        whole_constant *= back
        whole_linear = linear * back
        whole_kl_linear = kl_linear * back
        last = covered + (PART if cut.phased else 0)
        for done in range(cut.block, covered + cut.block, cut.block):
            start = last - done
            values, cap_slope = load_whole(row.entries, start, softmax, cut, "evict_first")
            ref_values, _ = load_whole(ref_row.entries, start, softmax, cut, "evict_first")
            t = shifted_whole(values, anchor, scale2, CLAMPED)
            factor = fma(t, whole_linear, whole_constant)
            factor = fma(fma(values - ref_values, scale2, -apart_anchor), whole_kl_linear, factor)
            grad = tl.exp2(t) * factor
            store_whole(grad_row, start, grad, cap_slope, token, at_token, softmax, cut)


# ---------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["n"])
def _ppo_loss_full_kl_kernel(
    logits, ref_logits, grad, per_token, objective, softmax, results, n, vocab, cut
):
    """As `triton_loss._ppo_loss_kernel`."""
    HINT: tl.constexpr = "evict_first" if grad is None else "evict_last"
    for index in tl.range(tl.program_id(0), n, tl.num_programs(0), disable_licm=True):
        weight = tl.load(per_token.weights + index).to(tl.float32)
        if weight != 0:
            token = tl.load(per_token.tokens + index)
            x_token = logit_at(logits, index, token, vocab)
            ref_token = logit_at(ref_logits, index, token, vocab)
            scale, slope = row_scale(index, softmax)
            row = row_at(logits, index, vocab, cut)
            ref_row = row_beside(row, ref_logits, index, cut)
            place = place_of(token, row, vocab)
            stats, ref_stats = _row_statistics(
                row, ref_row, x_token, ref_token, place, softmax, scale, cut, HINT
            )
            kl, g, shares = token_loss(index, stats, ref_stats.kl, weight, per_token, objective)
            store_token(results, index, n, stats, kl, shares)
            if grad is not None:
                grad_row = row_beside(row, grad, index, cut)
                if is_dead(g, stats):
                    write_zeros(grad_row, vocab, cut)
                else:
                    _write_gradient(
                        row,
                        ref_row,
                        grad_row,
                        x_token,
                        place,
                        stats,
                        ref_stats,
                        g,
                        softmax,
                        scale,
                        slope,
                        slope_over_total=slope / stats.total,
                        cut=cut,
                        CLAMPED=False,
                    )
        else:
            store_nothing(results, index, n)
            if grad is not None:
                write_zeros(row_at(grad, index, vocab, cut), vocab, cut)


@triton.jit(do_not_specialize=["n"])
def _token_stats_full_kl_kernel(logits, ref_logits, tokens, softmax, results, n, vocab, cut):
    """As `triton_stats._token_stats_kernel`."""
    for index in range(tl.program_id(0), n, tl.num_programs(0)):
        token = tl.load(tokens + index)
        ref_token = logit_at(ref_logits, index, token, vocab)
        x_token = logit_at(logits, index, token, vocab)
        scale, _ = row_scale(index, softmax)
        row = row_at(logits, index, vocab, cut)
        ref_row = row_beside(row, ref_logits, index, cut)
        stats, ref_stats = _row_statistics(
            row,
            ref_row,
            x_token,
            ref_token,
            place_of(token, row, vocab),
            softmax,
            scale,
            cut,
            "evict_first",
        )
        store_stats(
            results,
            index,
            stats,
            defined_maximum(row, stats.row_max, stats.total, softmax, cut),
            kl=ref_stats.kl,
            mean_gap=ref_stats.mean_gap,
            token_gap=ref_stats.token_gap,
            ref_max=defined_maximum(ref_row, ref_stats.row_max, ref_stats.total, softmax, cut),
            ref_log_sum=ref_stats.log_sum,
        )


@triton.jit(do_not_specialize=["n"])
def _token_stats_backward_full_kl_kernel(
    logits, ref_logits, grad, grads, tokens, saved, softmax, n, vocab, cut
):
    """As `triton_stats._token_stats_backward_kernel`; of the StatsGradients `grads` the KL's is
    there."""
    for index in range(tl.program_id(0), n, tl.num_programs(0)):
        g_logprob = tl.load(grads.logprobs + index).to(tl.float32)
        g_entropy = 0.0
        if grads.entropy is not None:
            g_entropy = tl.load(grads.entropy + index).to(tl.float32)
        g_kl = tl.load(grads.kl + index).to(tl.float32)
        if (g_logprob == 0) & (g_entropy == 0) & (g_kl == 0):
            write_zeros(row_at(grad, index, vocab, cut), vocab, cut)
        else:
            token = tl.load(tokens + index)
            row_max = tl.load(saved.normalizer + 2 * index)
            log_sum = tl.load(saved.normalizer + 2 * index + 1)
            entropy = tl.load(saved.entropy + index)
            scale, slope = row_scale(index, softmax)
            # Nothing tells of −inf among the logits: every tile is taken the careful way.
            plain = index < 0
            stats = RowStats(
                logprob=tl.load(saved.logprobs + index),
                entropy=entropy,
                row_max=row_max,
                log_sum=log_sum,
                total=tl.exp(log_sum),
                mean_shifted=log_sum - entropy,
                others=tl.load(saved.p_others + index),
                plain=plain,
            )
            ref_stats = _RefStats(
                kl=0.0,
                mean_gap=tl.load(saved.mean_gap + index),
                token_gap=tl.load(saved.token_gap + index),
                row_max=tl.load(saved.ref_normalizer + 2 * index),
                log_sum=0.0,
                total=0.0,
            )
            g = StatsGradients(g_logprob, g_entropy, g_kl)
            row = row_at(logits, index, vocab, cut)
            _write_gradient(
                row,
                row_beside(row, ref_logits, index, cut),
                row_beside(row, grad, index, cut),
                logit_at(logits, index, token, vocab),
                place_of(token, row, vocab),
                stats,
                ref_stats,
                g,
                softmax,
                scale,
                slope,
                slope_over_total=slope * tl.exp(-log_sum),
                cut=cut,
                CLAMPED=True,
            )
