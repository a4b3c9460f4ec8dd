"""GAE, reward shaping and whitening on a CPU: compiled loops over each sequence.

For the unmasked tokens of a sequence, in fp64 and with c = γλ:

    r_t = −kl_coef·KL_t + token_reward_t   (+ the score on the last token)
    δ_t = r_t + γ·V_{t+1} − V_t
    A_t = δ_t + c·δ_{t+1} + c²·δ_{t+2} + c³·δ_{t+3} + c⁴·A_{t+4}      return_t = A_t + V_t

The recurrence looks four tokens ahead: A_t = δ_t + c·A_{t+1} would wait for the next token at every
token, while everything else is vector instructions.

A row with gaps gives the same bits as the row without them, and packed rows the same as padded
ones. Moments for whitening are summed by sequence in the same loop, then over sequences in order.
`whiten` alone sums blocks of a fixed size. The bits do not depend on the number of threads.

Source: Schulman et al. 2016, eq. 11, 12 and 16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastppo_kernels.cpu.row_sweeps import clear
from fastppo_kernels.cpu.threads import (
    CLEARANCE,
    compiled,
    compiled_in_lanes,
    fresh,
    in_threads,
    kernel,
)
from fastppo_kernels.cpu.token_terms import ESTIMATORS, number_of, sampled_kl
from fastppo_kernels.records import (
    WHITEN_EPSILON,
    Discounts,
    Gae,
    ShapedAdvantages,
    Shaping,
    Trajectory,
    accumulation_dtype,
)

BLOCK = 2**14
"""Entries that whitening processes at once."""


class _Tokens(NamedTuple):
    """Flat arrays with an entry per token; a missing operand is an empty array."""

    values: Any
    rewards: Any
    logprobs: Any
    ref_logprobs: Any


class _Sequences(NamedTuple):
    """Arrays with an entry per sequence; `bounds` [B + 1] are the starts, and the last end."""

    bounds: Any
    scores: Any
    bootstrap: Any
    gammas: Any
    lams: Any


class _Buffers(NamedTuple):
    """The buffers of a thread, as long as the longest sequence.

    residuals: δ in fp64.
    estimates: the advantages in fp64.
    gathered: [6, longest sequence] in the dtype of the values, if there is a mask.
    """

    residuals: Any
    estimates: Any
    gathered: Any


@compiled
def _count(mask):
    """Count the unmasked entries."""
    count = 0
    for t in range(len(mask)):
        count += mask[t]
    return count


@compiled
def _gather(x, mask, out):
    """Gather the unmasked entries at the start of `out`, and return them."""
    place = 0
    for t in range(len(x)):
        out[place] = x[t]
        place += mask[t]
    return out[:place]


@compiled
def _scatter(values, mask, out):
    """Scatter values to the unmasked places of `out`, with zeros in between."""
    place = 0
    for t in range(len(out)):
        out[t] = values[place] if mask[t] else 0.0
        place += mask[t]


@compiled_in_lanes
def _rewards(tokens, kl_coef, estimator, rewards):
    """Write the shaped rewards without the score to `rewards`, and return ΣKL."""
    total = 0.0
    clear(rewards[: len(tokens.values)])
    for t in range(len(tokens.ref_logprobs)):
        difference = np.float64(tokens.logprobs[t]) - np.float64(tokens.ref_logprobs[t])
        kl = sampled_kl(difference, estimator)[0]
        total += kl
        rewards[t] = -kl_coef * kl
    for t in range(len(tokens.rewards)):
        rewards[t] += tokens.rewards[t]
    return total


@compiled
def _recurrence(delta, advantages, factor):
    """Compute A, of a multiple of four tokens, from δ with three zeros after it."""
    for t in range(len(advantages)):
        near = delta[t + 2] + factor * delta[t + 3]
        advantages[t] = delta[t] + factor * (delta[t + 1] + factor * near)
    by_four = factor * factor * factor * factor
    a0 = 0.0
    a1 = 0.0
    a2 = 0.0
    a3 = 0.0
    for start in range(len(advantages) - 4, -1, -4):
        four = advantages[start : start + 4]
        a0 = four[0] + by_four * a0
        a1 = four[1] + by_four * a1
        a2 = four[2] + by_four * a2
        a3 = four[3] + by_four * a3
        four[0] = a0
        four[1] = a1
        four[2] = a2
        four[3] = a3


@compiled
def _round(estimates, values, advantages, returns):
    """Round advantages and returns to their dtype."""
    for t in range(len(values)):
        advantages[t] = estimates[t]
        returns[t] = estimates[t] + values[t]


@compiled_in_lanes
def _sums(x):
    """Return (Σx, Σx²) in fp64."""
    total = 0.0
    squares = 0.0
    for t in range(len(x)):
        wide = np.float64(x[t])
        total += wide
        squares += wide * wide
    return total, squares


@compiled
def _estimate(tokens, sequences, kl_coef, estimator, i, delta, estimates):
    """Write A of the contiguous unmasked tokens of sequence i to `estimates`, and return ΣKL."""
    values = tokens.values
    last = len(tokens.values) - 1
    if last < 0:
        return 0.0
    kl = _rewards(tokens, kl_coef, estimator, delta)
    delta[last] += sequences.scores[i]
    gamma = sequences.gammas[i]
    for t in range(last):
        delta[t] = delta[t] + gamma * values[t + 1] - values[t]
    delta[last] = delta[last] + gamma * sequences.bootstrap[i] - values[last]
    fours = (last + 4) // 4 * 4
    for t in range(last + 1, fours + 3):
        delta[t] = 0.0
    _recurrence(delta, estimates[:fours], gamma * sequences.lams[i])
    return kl


@kernel
def _advantage_rows(
    start, stop, buffers, tokens, mask, sequences, kl_coef, estimator, advantages, returns, sums
):
    """Write the advantages and returns of sequences start to stop, and their (count, ΣA, ΣA², ΣKL)
    to sums [B, 4]."""
    for i in range(start, stop):
        begin = sequences.bounds[i]
        end = sequences.bounds[i + 1]
        first = begin
        while first < end and len(mask) and not mask[first]:
            first += 1
        counts = mask[first:end]
        count = _count(counts) if len(mask) else end - first
        has_gaps = _count(counts[count:]) > 0
        last = end if has_gaps else first + count
        operands = _Tokens(
            tokens.values[first:last],
            tokens.rewards[first:last],
            tokens.logprobs[first:last],
            tokens.ref_logprobs[first:last],
        )
        out_advantages = advantages[first:last]
        out_returns = returns[first:last]
        if has_gaps:
            operands = _Tokens(
                _gather(operands.values, counts, buffers.gathered[0]),
                _gather(operands.rewards, counts, buffers.gathered[1]),
                _gather(operands.logprobs, counts, buffers.gathered[2]),
                _gather(operands.ref_logprobs, counts, buffers.gathered[3]),
            )
            out_advantages = buffers.gathered[4, :count]
            out_returns = buffers.gathered[5, :count]
        estimates = buffers.estimates
        kl = _estimate(operands, sequences, kl_coef, estimator, i, buffers.residuals, estimates)
        _round(estimates, operands.values, out_advantages, out_returns)
        total, squares = _sums(out_advantages)
        if has_gaps:
            _scatter(out_advantages, counts, advantages[first:last])
            _scatter(out_returns, counts, returns[first:last])
        for out in (advantages, returns):
            clear(out[begin:first])
            clear(out[last:end])
        sums[i, 0] = count
        sums[i, 1] = total
        sums[i, 2] = squares
        sums[i, 3] = kl


@compiled_in_lanes
def _block_moments(x, mask, center):
    """Return (count, Σ(x − center), Σ(x − center)²) of a block, in fp64."""
    count = 0.0
    total = 0.0
    squares = 0.0
    for j in range(len(x)):
        is_counted = len(mask) == 0 or mask[j]
        off = np.float64(x[j]) - center if is_counted else 0.0
        count += 1.0 if is_counted else 0.0
        total += off
        squares += off * off
    return count, total, squares


@kernel
def _moment_blocks(start, stop, x, mask, center, sums):
    """Write (count, Σ(x − center), Σ(x − center)²) of blocks start to stop to sums [blocks, 3]."""
    for block in range(start, stop):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        count, total, squares = _block_moments(x[part], mask[part], center)
        sums[block, 0] = count
        sums[block, 1] = total
        sums[block, 2] = squares


@kernel
def _whiten_blocks(start, stop, x, mask, mean, scale, shift, out):
    """Write (x − mean)·scale + shift of blocks start to stop, and 0 where masked."""
    for block in range(start, stop):
        part = x[block * BLOCK : (block + 1) * BLOCK]
        counts = mask[block * BLOCK : (block + 1) * BLOCK]
        whitened = out[block * BLOCK : (block + 1) * BLOCK]
        for j in range(len(part)):
            white = (np.float64(part[j]) - mean) * scale + shift
            whitened[j] = white if len(counts) == 0 or counts[j] else 0.0


# --------------------------------------------------------------------------------------- operations


_EMPTY = {
    dtype: torch.empty(0, dtype=dtype).numpy()
    for dtype in (torch.float32, torch.float64, torch.bool)
}


def _flat(x: Tensor | None, dtype: torch.dtype) -> Any:
    """Flatten a tensor to an array of this dtype; None gives an empty array."""
    if x is None:
        return _EMPTY[dtype]
    return x.detach().to(dtype).contiguous().numpy().reshape(-1)


def _each(number: float, values: Tensor | None, count: int) -> Any:
    """Return an fp64 number per sequence: `values`, or the same `number` for all."""
    return np.full(count, number) if values is None else _flat(values, torch.float64)


class _Estimated(NamedTuple):
    """Advantages and returns, and per sequence the sums [B, 4] fp64 of (count, ΣA, ΣA², ΣKL)."""

    estimates: Gae
    sums: Tensor


def _estimate_all(
    trajectory: Trajectory, discounts: Discounts, shaping: Shaping | None
) -> _Estimated:
    """Run the loop over all sequences."""
    values = trajectory.token_values
    ends = trajectory.cu_seqlens
    dtype = accumulation_dtype(values.dtype)
    if ends is None:
        bounds = np.arange(values.shape[0] + 1, dtype=np.int64) * values.shape[1]
    else:
        bounds = _flat(ends, torch.int64)
    count = len(bounds) - 1
    if shaping is None:
        shaping = Shaping(torch.zeros(count), values)
    scores = shaping.scores.double()
    if shaping.score_clip is not None:
        scores = scores.clamp(-shaping.score_clip, shaping.score_clip)
    has_kl = shaping.ref_logprobs is not None
    mask = _flat(trajectory.mask, torch.bool)
    longest = int(np.diff(bounds).max(initial=0))

    def allocate_buffers() -> _Buffers:
        gathered = np.empty((6, longest if len(mask) else 0), advantages.numpy().dtype)
        residuals = np.empty(CLEARANCE + longest + 6)[CLEARANCE:]
        return _Buffers(residuals, np.empty(longest + 3), gathered)

    advantages = fresh(values, dtype)
    returns = fresh(values, dtype)
    sums = np.empty((count, 4))
    in_threads(
        _advantage_rows,
        count,
        _Tokens(
            values=_flat(values, dtype),
            rewards=_flat(trajectory.token_rewards, dtype),
            logprobs=_flat(shaping.logprobs if has_kl else None, dtype),
            ref_logprobs=_flat(shaping.ref_logprobs, dtype),
        ),
        mask,
        _Sequences(
            bounds=bounds,
            scores=_flat(scores, torch.float64),
            bootstrap=_each(0.0, trajectory.bootstrap, count),
            gammas=_each(discounts.gamma, discounts.gammas, count),
            lams=_each(discounts.lam, discounts.lams, count),
        ),
        float(shaping.kl_coef),
        number_of("kl_estimator", shaping.kl_estimator, ESTIMATORS),
        advantages.view(-1).numpy(),
        returns.view(-1).numpy(),
        sums,
        entries=values.numel(),
        buffers=allocate_buffers,
    )
    return _Estimated(Gae(advantages, returns), torch.from_numpy(sums))


def gae(trajectory: Trajectory, discounts: Discounts) -> Gae:
    """Compute `definition.gae`."""
    return _estimate_all(trajectory, discounts, None).estimates


def shaped_advantages(
    trajectory: Trajectory, shaping: Shaping, discounts: Discounts
) -> ShapedAdvantages:
    """Compute `definition.shaped_advantages`."""
    (advantages, returns), sums = _estimate_all(trajectory, discounts, shaping)
    kl = sums[:, 3].to(returns.dtype)
    return ShapedAdvantages(advantages, returns, kl, sums[:, :3].sum(0))


def _moments_around(x: Any, mask: Any, center: float) -> Any:
    """Return (count, Σ(x − center), Σ(x − center)²) over the mask, fp64 [3]."""
    blocks = -(-len(x) // BLOCK)
    sums = np.zeros((blocks, 3))
    in_threads(_moment_blocks, blocks, x, mask, center, sums, entries=len(x))
    return sums.sum(0)


def _mean_and_variance(x: Any, mask: Any) -> tuple[float, float]:
    """Return mean and variance (divided by n − 1) over the mask, in one pass if possible.

    Σx² − n·mean² cancels if the mean is far from 0, and sums around a number close to the mean do
    not. The mean of the first block is such a number, unless it is far from the others.
    """
    count, total, _ = _moments_around(x[:BLOCK], mask[:BLOCK], 0.0)
    for _ in range(2):
        center = total / max(count, 1.0)
        count, rest, squares = _moments_around(x, mask, center)
        excess = rest * rest / max(count, 1.0)
        total = count * center + rest
        if excess <= squares / 2:
            break
    return total / max(count, 1.0), (squares - excess) / max(count - 1.0, 1.0)


def whiten(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    shift_mean: bool = True,
    moments: Tensor | None = None,
) -> Tensor:
    """Compute `definition.whiten`.

    Args:
        moments: (count, Σx, Σx²) [3] of the whole global batch; None computes those of x.
    """
    dtype = accumulation_dtype(x.dtype)
    flat = _flat(x, dtype)
    flat_mask = _flat(mask, torch.bool)
    if moments is not None:
        count, total, squares = moments.tolist()
        mean = total / max(count, 1.0)
        variance = (squares - count * mean * mean) / max(count - 1.0, 1.0)
    else:
        mean, variance = _mean_and_variance(flat, flat_mask)
    scale = float(1.0 / np.sqrt(np.maximum(variance, 0.0) + WHITEN_EPSILON))
    out = fresh(x, dtype)
    in_threads(
        _whiten_blocks,
        -(-len(flat) // BLOCK),
        flat,
        flat_mask,
        float(mean),
        scale,
        0.0 if shift_mean else float(mean),
        out.view(-1).numpy(),
        entries=len(flat),
    )
    return out
