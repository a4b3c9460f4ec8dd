"""GAE, reward shaping and whitening on a CPU: compiled loops over each sequence.

The operations are those of `fastppo_kernels.definition`, under the same names and with the same
operands. A sequence is walked from its last token to its first, stepping over tokens that the mask
leaves out, in fp64:

    r_t = −kl_coef·KL_t + token_reward_t   (+ the score on the last token)
    δ_t = r_t + γ·V_next − V_t             A_t = δ_t + γλ·A_next             return_t = A_t + V_t

So a row with gaps gives the same bits as the row without them, and packed rows those of padded
ones. Moments for whitening are summed by sequence in the same walk, and over sequences in their
order; `whiten` by itself sums blocks of a fixed size: the bits do not depend on the threads.

Source: Schulman et al. 2016, eq. 11, 12 and 16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastppo_kernels.cpu_rows import ESTIMATORS, sampled_kl
from fastppo_kernels.cpu_threads import compiled, compiled_in_lanes, fresh, in_threads
from fastppo_kernels.records import (
    WHITEN_EPSILON,
    Advantages,
    Discounts,
    Gae,
    Shaping,
    Trajectory,
    accumulation_dtype,
)

BLOCK = 2**14
"""Entries whose sums are taken together in whitening."""


class _Tokens(NamedTuple):
    """What there is per token, flat; an empty array where it is not given."""

    values: Any
    rewards: Any
    mask: Any
    logprobs: Any
    ref_logprobs: Any


class _Sequences(NamedTuple):
    """What there is per sequence; `bounds` [B + 1] are where each begins and the last ends."""

    bounds: Any
    scores: Any
    bootstrap: Any
    gammas: Any
    lams: Any


@compiled
def _walk(start, stop, tokens, sequences, kl_coef, estimator, advantages, returns, kls, moments):
    """Sequences `start` to `stop`: advantages and returns, KL [B], (count, ΣA, ΣA²) [B, 3]."""
    for i in range(start, stop):
        gamma, lam = sequences.gammas[i], sequences.lams[i]
        score = sequences.scores[i]
        next_value, advantage = sequences.bootstrap[i], 0.0
        count, total, squares, kl_total = 0.0, 0.0, 0.0, 0.0
        for t in range(sequences.bounds[i + 1] - 1, sequences.bounds[i] - 1, -1):
            if len(tokens.mask) and not tokens.mask[t]:
                advantages[t] = 0.0
                returns[t] = 0.0
                continue
            reward = 0.0
            if len(tokens.ref_logprobs):
                difference = np.float64(tokens.logprobs[t]) - np.float64(tokens.ref_logprobs[t])
                kl = sampled_kl(difference, estimator)[0]
                kl_total += kl
                reward = -kl_coef * kl
            if len(tokens.rewards):
                reward += tokens.rewards[t]
            value = np.float64(tokens.values[t])
            delta = reward + score + gamma * next_value - value
            advantage = delta + gamma * lam * advantage
            score, next_value = 0.0, value  # the score is the last token's alone
            advantages[t] = advantage
            returns[t] = advantage + value
            count += 1.0
            total += advantages[t]
            squares += np.float64(advantages[t]) * np.float64(advantages[t])
        kls[i] = kl_total
        moments[i, 0], moments[i, 1], moments[i, 2] = count, total, squares


@compiled_in_lanes
def _sum_of_blocks(start, stop, x, mask, about, sums):
    """(count, Σ(x − about), Σ(x − about)²) of each block, fp64, to sums [blocks, 3]."""
    for block in range(start, stop):
        part = x[block * BLOCK : (block + 1) * BLOCK]
        bits = mask[block * BLOCK : (block + 1) * BLOCK]
        count, total, squares = 0.0, 0.0, 0.0
        for j in range(len(part)):
            is_counted = len(bits) == 0 or bits[j]
            off = np.float64(part[j]) - about if is_counted else 0.0
            count += 1.0 if is_counted else 0.0
            total += off
            squares += off * off
        sums[block, 0], sums[block, 1], sums[block, 2] = count, total, squares


@compiled
def _whiten_blocks(start, stop, x, mask, mean, scale, shift, out):
    """(x − mean)·scale + shift in the mask, 0 outside it."""
    for block in range(start, stop):
        part = x[block * BLOCK : (block + 1) * BLOCK]
        bits = mask[block * BLOCK : (block + 1) * BLOCK]
        into = out[block * BLOCK : (block + 1) * BLOCK]
        for j in range(len(part)):
            white = (np.float64(part[j]) - mean) * scale + shift
            into[j] = white if len(bits) == 0 or bits[j] else 0.0


# ----------------------------------------------------------------------------------- the operations


def _flat(x: Tensor | None, dtype: torch.dtype) -> Any:
    """The entries, in their order, as an array; empty for None."""
    if x is None:
        return torch.empty(0, dtype=dtype).numpy()
    return x.detach().to(dtype).reshape(-1).contiguous().numpy()


def _each(number: float, values: Tensor | None, count: int) -> Any:
    """A number for each sequence, fp64."""
    return np.full(count, number) if values is None else _flat(values, torch.float64)


class _Walked(NamedTuple):
    estimates: Gae
    kl: Tensor
    moments: Tensor


def _walk_all(trajectory: Trajectory, discounts: Discounts, shaping: Shaping | None) -> _Walked:
    values, ends = trajectory.token_values, trajectory.cu_seqlens
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
    advantages, returns = fresh(values, dtype), fresh(values, dtype)
    kls, moments = np.empty(count), np.empty((count, 3))
    in_threads(
        _walk,
        count,
        _Tokens(
            values=_flat(values, dtype),
            rewards=_flat(trajectory.token_rewards, dtype),
            mask=_flat(trajectory.mask, torch.bool),
            logprobs=_flat(shaping.logprobs if has_kl else None, dtype),
            ref_logprobs=_flat(shaping.ref_logprobs, dtype),
        ),
        _Sequences(
            bounds=bounds,
            scores=_flat(scores, torch.float64),
            bootstrap=_each(0.0, trajectory.bootstrap, count),
            gammas=_each(discounts.gamma, discounts.gammas, count),
            lams=_each(discounts.lam, discounts.lams, count),
        ),
        float(shaping.kl_coef),
        ESTIMATORS[shaping.kl_estimator],
        advantages.view(-1).numpy(),
        returns.view(-1).numpy(),
        kls,
        moments,
    )
    return _Walked(
        Gae(advantages, returns), torch.from_numpy(kls), torch.from_numpy(moments).sum(0)
    )


def gae(trajectory: Trajectory, discounts: Discounts) -> Gae:
    """(advantages, returns) like the values, fp32 or fp64, 0 where masked; see `definition.gae`."""
    return _walk_all(trajectory, discounts, None).estimates


def shaped_advantages(trajectory: Trajectory, shaping: Shaping, discounts: Discounts) -> Advantages:
    """Shaped rewards, then GAE; no whitening. See `definition.shaped_advantages`."""
    walked = _walk_all(trajectory, discounts, shaping)
    advantages, returns = walked.estimates
    return Advantages(advantages, returns, walked.kl.to(returns.dtype), walked.moments)


def _moments_about(x: Any, mask: Any, about: float) -> Any:
    blocks = -(-len(x) // BLOCK)
    sums = np.zeros((blocks, 3))
    in_threads(_sum_of_blocks, blocks, x, mask, about, sums)
    return sums.sum(0)


def whitening_moments(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """(count, Σx, Σx²) over the mask, fp64 [3]: they add up over ranks before `whiten`."""
    flat = _flat(x, accumulation_dtype(x.dtype))
    return torch.from_numpy(_moments_about(flat, _flat(mask, torch.bool), 0.0))


def whiten(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    shift_mean: bool = True,
    moments: Tensor | None = None,
) -> Tensor:
    """(x − mean)·rsqrt(var + 1e-8) over the mask, Bessel-corrected; 0 where masked.

    `shift_mean=False` puts the mean back. `moments` are those of the whole global batch.
    """
    dtype = accumulation_dtype(x.dtype)
    flat, bits = _flat(x, dtype), _flat(mask, torch.bool)
    if moments is not None:
        count, total, squares = moments.tolist()
        mean = total / max(count, 1.0)
        variance = (squares - count * mean * mean) / max(count - 1.0, 1.0)
    else:
        # About the mean, twice: Σx² − n·mean² would have lost what it is about where the mean is
        # far from 0.
        count, total, _ = _moments_about(flat, bits, 0.0)
        mean = total / max(count, 1.0)
        _, rest, squares = _moments_about(flat, bits, mean)
        variance = (squares - rest * rest / max(count, 1.0)) / max(count - 1.0, 1.0)
    scale = float(1.0 / np.sqrt(np.maximum(variance, 0.0) + WHITEN_EPSILON))
    out = fresh(x, dtype)
    in_threads(
        _whiten_blocks,
        -(-len(flat) // BLOCK),
        flat,
        bits,
        float(mean),
        scale,
        0.0 if shift_mean else float(mean),
        out.view(-1).numpy(),
    )
    return out
