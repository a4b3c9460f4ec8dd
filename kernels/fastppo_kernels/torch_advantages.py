"""GAE, reward shaping and whitening: the torch backend.

The operations are those of `fastppo_kernels.definition`, with no loop over time or over the batch.
The tokens that count are cut out of their gaps and laid end to end; with the decay set to 0 after
each sequence the whole batch is one linear recurrence, scanned in blocks side by side, in fp64. So
a row with gaps gives the same bits as the row without them, and packed rows the same bits as padded
ones; of whitening that holds where its moments are given, which are fp64 sums too. By itself it
adds up rows in fp32 first, and layouts agree to rounding.

Source: Schulman et al. 2016, eq. 11, 12 and 16.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastppo_kernels.records import (
    WHITEN_EPSILON,
    Advantages,
    Discounts,
    Gae,
    Shaping,
    Trajectory,
    accumulation_dtype,
)
from fastppo_kernels.torch_rows import sampled_kl

SCAN_BLOCK = 64
"""Steps of the blocked scan: blocks of 64 make log₆₄(N) levels of 64 vector operations each."""


def _reverse_scan(decay: Tensor, x: Tensor) -> Tensor:
    """y_t = x_t + decay_t · y_{t+1} over flat [N] tensors, in blocks that are scanned side by side.

    Each block is scanned as if nothing followed it, keeping the product of its decays; the blocks'
    carries are the same recurrence, one block per step, and are solved by recursion.
    """
    n = x.numel()
    if n <= SCAN_BLOCK:
        # Python's numbers are fp64 too, and one of torch's operations takes as long as all of them.
        factors, sums = decay.tolist(), x.tolist()
        for t in reversed(range(n - 1)):
            sums[t] += factors[t] * sums[t + 1]
        return x.new_tensor(sums)
    # At least one column of padding, and odd: rows a power of two apart would share cache sets.
    blocks = (n // SCAN_BLOCK + 1) | 1
    # [SCAN_BLOCK, blocks]: a step of the scan is one contiguous row.
    a, y = x.new_empty((2, SCAN_BLOCK, blocks))
    full = n // SCAN_BLOCK
    for columns, flat in ((a.T, decay), (y.T, x)):
        columns[:full] = flat[: full * SCAN_BLOCK].view(full, SCAN_BLOCK)
        columns[full:] = 0.0
        columns[full, : n - full * SCAN_BLOCK] = flat[full * SCAN_BLOCK :]
    of_decay, of_y = a.unbind(), y.unbind()
    for t in reversed(range(SCAN_BLOCK - 1)):
        of_y[t].addcmul_(of_decay[t], of_y[t + 1])
        of_decay[t].mul_(of_decay[t + 1])
    first = _reverse_scan(a[0], y[0])  # y at the first token of each block, carries included
    carry = torch.cat([first[1:], first.new_zeros(1)])
    y.addcmul_(a, carry)
    return y.T.reshape(-1)[:n]


class _Valid(NamedTuple):
    """The tokens that count, laid end to end, and the sequences that have any."""

    indices: Tensor
    """[n] int64: where each is among all tokens."""
    counts: Tensor
    """[B] int64: how many each sequence has."""
    some: Tensor
    """[S] int64: the sequences that have one."""
    last: Tensor
    """[S] int64: where the last of each of those is among the n."""


def _valid(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> _Valid:
    """Of values [B, T] or packed [total]; without a mask all count."""
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    index = mask.reshape(-1).nonzero().squeeze(-1)
    if cu_seqlens is None:
        counts = mask.sum(1)
    else:
        upto = torch.nn.functional.pad(mask.long().cumsum(0), (1, 0))
        counts = upto[cu_seqlens.long()].diff()
    some = counts.nonzero().squeeze(-1)
    return _Valid(index, counts, some, counts.cumsum(0)[some] - 1)


def _per_token(value: float, values: Tensor | None, counts: Tensor) -> float | Tensor:
    """A discount, or its value at each token where there is one per sequence."""
    return value if values is None else values.double().repeat_interleave(counts)


def gae(trajectory: Trajectory, discounts: Discounts) -> Gae:
    """(advantages, returns) like the values, fp32 or fp64, 0 where masked; see `definition.gae`."""
    values = trajectory.token_values
    dtype = accumulation_dtype(values.dtype)
    index, counts, some, last = _valid(values, trajectory.mask, trajectory.cu_seqlens)
    v = values.reshape(-1).index_select(0, index).double()
    next_value = torch.cat([v[1:], v.new_zeros(1)])[: v.numel()]
    ends = trajectory.bootstrap
    next_value[last] = 0.0 if ends is None else ends.double()[some]
    discount = _per_token(discounts.gamma, discounts.gammas, counts)
    smoothing = _per_token(discounts.lam, discounts.lams, counts)
    decay = discount * smoothing
    decay = decay if isinstance(decay, Tensor) else torch.full_like(v, decay)
    decay[last] = 0.0
    delta = next_value.mul_(discount)
    if trajectory.token_rewards is not None:
        delta.add_(trajectory.token_rewards.reshape(-1).index_select(0, index).double())
    delta.sub_(v)
    if not delta.sum().isfinite():  # one read; to look at each entry first takes five passes
        broken = ~delta.isfinite()
        # 0·NaN is NaN: the scan would carry it over the end of a sequence into the one before.
        summed = _reverse_scan(decay, delta.masked_fill(broken, 0.0))
        carries = torch.ones_like(v)
        carries[last] = 0.0
        reached = _reverse_scan(carries, broken.double()) > 0
        summed.masked_fill_(reached, math.nan)
    else:
        summed = _reverse_scan(decay, delta)
    advantages, returns = (values.new_zeros(values.numel(), dtype=dtype) for _ in range(2))
    advantages.index_copy_(0, index, summed.to(dtype))
    returns.index_copy_(0, index, summed.add_(v).to(dtype))
    return Gae(advantages.view(values.shape), returns.view(values.shape))


def whitening_moments(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """(count, Σx, Σx²) over the mask, fp64 [3]: they add up over ranks before `whiten`."""
    counted = _counted(x, mask)
    count = torch.full((), counted.numel(), dtype=torch.float64, device=counted.device)
    return torch.stack([count, counted.sum(), torch.dot(counted, counted)])


def _counted(x: Tensor, mask: Tensor | None) -> Tensor:
    """[n] fp64: the entries in the mask."""
    counted = x.reshape(-1)
    if mask is not None:
        # Three times as fast as x[mask], which counts twice.
        counted = counted.index_select(0, mask.reshape(-1).nonzero().squeeze(-1))
    return counted.double()


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
    # Memory of our own: new memory costs more than the arithmetic.
    white, bits = x.to(dtype, copy=mask is None), None
    if mask is not None:
        # A CPU selects by a bool more slowly: kernels/NOTES.md.
        bits = mask.to(torch.int64 if dtype.itemsize == 8 else torch.int32).neg_()
        white = (white.view(bits.dtype) & bits).view(dtype)
    if moments is None:
        count = torch.tensor(x.numel()) if bits is None else -bits.sum(-1, dtype=bits.dtype).sum()
        # About a number near the mean: Σx² − n·mean² of the entries as they are would have lost
        # what it is about where the mean is far from 0.
        high = (_total(white) / count.clamp(min=1)).to(dtype)
        _keep(white.sub_(high), bits)
        rest, squares = _total(white) / count.clamp(min=1), _total(white * white)
        if not squares.isfinite():  # beyond 1e19 they overflow fp32
            squares = white.double().square().sum()
        variance = (squares - count * rest * rest) / (count - 1).clamp(min=1)
        low = rest.to(dtype)
    else:
        count, total, squares = moments
        mean = total / count.clamp(min=1)
        variance = (squares - count * mean * mean) / (count - 1).clamp(min=1)
        # In two parts, so that x − mean keeps its digits in fp32 however far the mean is from 0.
        high = mean.to(dtype)
        low = (mean - high.double()).to(dtype)
        white.sub_(high)
    scale = torch.rsqrt(variance.clamp(min=0) + WHITEN_EPSILON).to(dtype)
    white.sub_(low).mul_(scale)
    if not shift_mean:
        white.add_(high + low)
    return _keep(white, bits).contiguous()


def _total(x: Tensor) -> Tensor:
    """0-d fp64, of the sums of rows in x's own dtype, unless one leaves it."""
    total = x.sum(-1).double().sum()
    return total if total.isfinite() else x.double().sum()


def _keep(x: Tensor, bits: Tensor | None) -> Tensor:
    """x with 0 where no bit is set, in place."""
    if bits is not None:
        x.view(bits.dtype).bitwise_and_(bits)
    return x


def shaped_advantages(trajectory: Trajectory, shaping: Shaping, discounts: Discounts) -> Advantages:
    """Shaped rewards, then GAE; no whitening. See `definition.shaped_advantages`."""
    values, mask = trajectory.token_values, trajectory.mask
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    dtype = accumulation_dtype(values.dtype)
    scores = shaping.scores.to(dtype)
    if shaping.score_clip is not None:
        scores = scores.clamp(-shaping.score_clip, shaping.score_clip)
    token_kl = torch.zeros_like(values, dtype=dtype)
    if shaping.ref_logprobs is not None:
        difference = shaping.logprobs.to(dtype) - shaping.ref_logprobs.to(dtype)
        token_kl = torch.where(mask, sampled_kl(difference, shaping.kl_estimator), 0.0)
    rewards = -shaping.kl_coef * token_kl
    if trajectory.token_rewards is not None:
        rewards = rewards + torch.where(mask, trajectory.token_rewards.to(dtype), 0.0)
    index, _, some, last = _valid(values, mask, trajectory.cu_seqlens)
    flat = rewards.reshape(-1).clone()
    flat[index[last]] += scores[some]
    # Differences of one running sum, in fp64: the same for both layouts, since masked tokens add 0,
    # and an indexed add would be atomic on a GPU.
    running = torch.nn.functional.pad(token_kl.double().reshape(-1).cumsum(0), (1, 0))
    if trajectory.cu_seqlens is None:
        ends = torch.arange(values.shape[0] + 1, device=values.device) * values.shape[1]
    else:
        ends = trajectory.cu_seqlens.long()
    kl = running[ends].diff().to(dtype)
    advantages, returns = gae(trajectory._replace(token_rewards=flat.view(values.shape)), discounts)
    return Advantages(advantages, returns, kl, whitening_moments(advantages, mask))
