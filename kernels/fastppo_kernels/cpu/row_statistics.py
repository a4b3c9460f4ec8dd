"""The statistics of one row of logits on a CPU, and its gradient from them.

With the shifted scores t and the gaps of `row_sweeps`,

    S       = Σ_j e^{t_j}         the token's term is added last, so 1 − p_y keeps its digits
    μ       = Σ_j e^{t_j}·t_j/S
    logprob = t_y − log S         entropy = log S − μ
    KL      = γ − log S + log S_ref     with γ = Σ_j e^{t_j}·gap_j/S

and with the loss's derivatives g_l, g_h and g_k by logprob, entropy and KL,

    dz_j = (1/T)·{ g_l·[j=y] + p_j·( −g_l − g_h·(t_j − μ) + g_k·(gap_j − γ) ) }
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fastppo_kernels.cpu.arithmetic import F32, LOWEST_32, ONE
from fastppo_kernels.cpu.operands import BLOCK
from fastppo_kernels.cpu.row_sweeps import (
    Factors,
    Maxima,
    block_gradient,
    cap_slope,
    copy_to,
    exponential_sums,
    exponentials_of,
    gap_between,
    gap_sums,
    largest_score,
    reference_scores,
    row_at,
    score_at,
    scores,
    store_at,
    to_fp32,
)
from fastppo_kernels.cpu.threads import compiled
from fastppo_kernels.records import LOWEST


class RowStatistics(NamedTuple):
    """The statistics of a row, fp64 except the maxima. Those of a missing reference are 0."""

    maximum: float
    ref_maximum: float
    shifted_token: float  # t_y
    token_gap: float  # gap_y − γ
    total: float  # S
    log_total: float
    ref_log_total: float
    mean: float  # μ
    mean_gap: float  # γ
    p_others: float  # 1 − p_y
    logprob: float
    entropy: float
    kl: float


@compiled
def scales_of(softmax, i):
    """Return (factor of the shifted scores, dt/dx without the cap's slope) of row i."""
    temperature = softmax.temperature
    if len(softmax.temperatures):
        temperature = softmax.temperatures[i]
    return softmax.shifted_scale / temperature, softmax.logit_scale / temperature


@compiled
def _sums(x, block, token, scale, softmax, exponentials):
    """Return (m, t_y, Σ e^t of the other columns, Σ e^t·t, log Σ e^t)."""
    maximum = largest_score(x, softmax)
    factor = F32(scale)
    others, moment = exponential_sums(x, block, token, maximum, factor, softmax, exponentials)
    shifted = np.float64((score_at(x, token, softmax) - maximum) * factor)
    shifted = LOWEST if shifted < LOWEST else shifted
    exponential = math.exp(shifted)
    moment += exponential * shifted
    return maximum, shifted, others, moment, math.log1p(others + (exponential - 1.0))


@compiled
def row_statistics(x, ref_rows, buffers, token, scale, softmax, i):
    """Compute the statistics of row i, and keep its e^t if the buffers have room for it."""
    blocks = buffers.scores
    maximum, shifted, others, moment, log_total = _sums(
        x, blocks[0], token, scale, softmax, buffers.exponentials
    )
    exponential = math.exp(shifted)
    total = others + exponential
    logprob = shifted - log_total
    if exponential > others:
        logprob = -math.log1p(others / exponential)
    mean = moment / total
    ref_maximum = maximum
    ref_log_total = 0.0
    token_gap = 0.0
    mean_gap = 0.0
    kl = 0.0
    if ref_rows is not None:
        ref_x = row_at(ref_rows, i)
        ref_maximum, _, _, _, ref_log_total = _sums(ref_x, blocks[1], token, scale, softmax, None)
        maxima = Maxima(maximum, ref_maximum)
        factor = F32(scale)
        gaps, ruled_out = gap_sums(x, ref_x, blocks, token, maxima, factor, softmax)
        z = score_at(x, token, softmax)
        ref_z = score_at(ref_x, token, softmax)
        token_gap = np.float64(gap_between(z, ref_z, maxima, factor))
        if (ref_z - ref_maximum) * factor <= LOWEST_32 and exponential > 0:
            ruled_out += ONE
        mean_gap = np.inf if ruled_out > 0 else (gaps + exponential * token_gap) / total
        kl = mean_gap - log_total + ref_log_total
    return RowStatistics(
        maximum=maximum,
        ref_maximum=ref_maximum,
        shifted_token=shifted,
        token_gap=0.0 if shifted <= LOWEST else token_gap - mean_gap,
        total=total,
        log_total=log_total,
        ref_log_total=ref_log_total,
        mean=mean,
        mean_gap=mean_gap,
        p_others=others / total,
        logprob=logprob,
        entropy=log_total - mean,
        kl=kl,
    )


@compiled
def write_gradient(x, ref_rows, buffers, row, grad, token, derivatives, softmax, i):
    """Write dL/dx of row i from its statistics and the derivatives (g_l, g_h, g_k).

    `grad` may alias `x`.
    """
    by_logprob, by_entropy, by_kl = derivatives
    scale, slope = scales_of(softmax, i)
    probability = math.exp(row.logprob)
    per_row = slope / row.total
    constant = by_entropy * row.mean - by_logprob
    at_token = by_logprob * row.p_others
    at_token += probability * by_entropy * (row.mean - row.shifted_token)
    if by_kl != 0:
        constant -= by_kl * row.mean_gap
        at_token += probability * by_kl * row.token_gap
    maxima = Maxima(row.maximum, row.ref_maximum)
    factors = Factors(
        constant=F32(constant * per_row),
        linear=F32(-by_entropy * per_row),
        gap=F32(by_kl * per_row),
    )
    token_slope = cap_slope(to_fp32(x[token]), softmax.softcap, softmax.logit_scale)
    token_gradient = F32(slope * at_token) * token_slope
    for start in range(0, len(x), BLOCK):
        stop = min(start + BLOCK, len(x))
        logits = copy_to(buffers.logits, x[start:stop])
        z = scores(logits, buffers.scores[0], softmax.softcap, softmax.logit_scale)
        # An infinite KL that is only reported does not affect the gradient.
        ref_stop = start if by_kl == 0 else stop
        ref_z = reference_scores(ref_rows, i, start, ref_stop, buffers.scores[1], softmax)
        out = grad[start:stop]
        exponentials = exponentials_of(buffers.exponentials, start, stop)
        block_gradient(logits, z, ref_z, out, maxima, F32(scale), factors, softmax, exponentials)
        if start <= token < stop:
            store_at(out, token - start, token_gradient)


@compiled
def saved_statistics(x, stats, token, softmax, i):
    """Restore the statistics of a row from the `StatsRows` of the forward pass."""
    maximum = F32(stats.normalizer[i, 0] * softmax.unit)
    log_total = np.float64(stats.normalizer[i, 1])
    shifted = np.float64(score_at(x, token, softmax) - maximum) * scales_of(softmax, i)[0]
    return RowStatistics(
        maximum=maximum,
        ref_maximum=F32(stats.ref_normalizer[i, 0] * softmax.unit),
        shifted_token=LOWEST if shifted < LOWEST else shifted,
        token_gap=np.float64(stats.token_gap[i]),
        total=math.exp(log_total),
        log_total=log_total,
        ref_log_total=np.float64(stats.ref_normalizer[i, 1]),
        mean=log_total - stats.entropy[i],
        mean_gap=np.float64(stats.mean_gap[i]),
        p_others=np.float64(stats.p_others[i]),
        logprob=np.float64(stats.logprobs[i]),
        entropy=np.float64(stats.entropy[i]),
        kl=np.float64(stats.kl[i]),
    )
