"""The PyTorch backend, for devices without kernels and for fp64 logits on a CPU.

It is slow and simple. Logits are processed in chunks of rows, so that the softmax of only one chunk
is in memory, and autograd differentiates `fastppo_kernels.definition`. Advantages are computed
token by token in Python on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fastppo_kernels import definition
from fastppo_kernels.records import (
    SUMS,
    Discounts,
    Gae,
    Objective,
    PerToken,
    PPORows,
    ShapedAdvantages,
    Shaping,
    Softmax,
    StatsGradients,
    StatsRows,
    Trajectory,
    accumulation_dtype,
    combine_sums,
    map_tensors,
)

CHUNK_ELEMENTS = 2**22
"""Logits per chunk."""

READS_VALUES = True
"""The host reads values between operations, so rows of weight 0 skip the lm-head's GEMMs."""


def _chunks(logits: Tensor) -> Iterator[Tensor]:
    """Yield the row indices of each chunk, [n] int64."""
    count = logits.shape[:-1].numel()
    vocab = logits.shape[-1]
    rows = torch.arange(count, device=logits.device)
    return iter(rows.split(max(1, CHUNK_ELEMENTS // max(1, vocab))))


def _place(x: Tensor, rows: Tensor) -> Any:
    """Return the index of rows in [N, V], or in [B, T, V] numbered along B·T."""
    return rows if x.dim() == 2 else (rows // x.shape[1], rows % x.shape[1])


def _differentiated(function: Callable[..., Any], x: Tensor) -> tuple[Tensor, Any]:
    """Return (the gradient by `x` of the first result of `function(x)`, the second result).

    Autograd is off inside an operator on the calling thread, so another thread differentiates.
    """

    def work() -> tuple[Tensor, Any]:
        leaf = x.detach().requires_grad_()
        total, rest = function(leaf)
        return torch.autograd.grad(total, leaf)[0], rest

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


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
    """Compute `definition.ppo_loss`; `inplace` writes dL/dlogits over the logits."""
    wide = accumulation_dtype(logits.dtype)
    logprobs, entropy, kl = (
        torch.zeros(logits.shape[:-1].numel(), dtype=wide, device=logits.device) for _ in range(3)
    )
    sums = torch.zeros(len(SUMS), dtype=wide, device=logits.device)
    grad = None
    if need_grad:
        contiguous = torch.contiguous_format
        grad = logits if inplace else torch.empty_like(logits, memory_format=contiguous)
    for rows in _chunks(logits):
        place = _place(logits, rows)
        loss = functools.partial(
            definition.loss,
            per_token=per_token.at(rows),
            objective=objective,
            softmax=softmax.at(rows),
            ref=None if ref_logits is None else ref_logits[_place(ref_logits, rows)],
        )
        x = logits[place].detach()
        if grad is None:
            _, part = loss(x)
        else:
            grad[place], part = _differentiated(loss, x)
        logprobs[rows] = part.logprobs
        entropy[rows] = part.entropy
        kl[rows] = part.kl
        sums = combine_sums(sums, part.sums)
    return PPORows(sums, logprobs, entropy, kl, grad)


def token_stats(
    logits: Tensor, tokens: Tensor, softmax: Softmax, *, ref_logits: Tensor | None = None
) -> StatsRows:
    """Compute `definition.token_stats` without a gradient."""
    parts = []
    for rows in _chunks(logits):
        parts.append(
            definition.token_stats(
                logits[_place(logits, rows)].detach(),
                tokens[rows],
                softmax.at(rows),
                ref_logits=None if ref_logits is None else ref_logits[_place(ref_logits, rows)],
            )
        )
    return StatsRows(*[torch.cat(columns) for columns in zip(*parts, strict=True)])


def token_stats_backward(
    grads: StatsGradients,
    logits: Tensor,
    tokens: Tensor,
    stats: StatsRows,
    softmax: Softmax,
    *,
    ref_logits: Tensor | None = None,
) -> Tensor:
    """Return dL/dlogits in the logits' shape and dtype, by autograd of the definition."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for rows in _chunks(logits):
        by_statistics = grads.at(rows)
        weighted = functools.partial(
            _weighted_statistics,
            tokens=tokens[rows],
            softmax=softmax.at(rows),
            ref_logits=None if ref_logits is None else ref_logits[_place(ref_logits, rows)],
            by_statistics=by_statistics,
        )
        place = _place(logits, rows)
        row_grads, moves = _differentiated(weighted, logits[place])
        # Uncounted rows may hold anything, and 0·NaN is not 0.
        grad[place] = torch.where(moves.unsqueeze(-1), row_grads, 0.0)
    return grad


def _weighted_statistics(
    logits: Tensor,
    *,
    tokens: Tensor,
    softmax: Softmax,
    ref_logits: Tensor | None,
    by_statistics: StatsGradients,
) -> tuple[Tensor, Tensor]:
    """Return (Σ derivative·statistic, 0-d; the rows with a derivative, [n] bool)."""
    stats = definition.token_stats(logits, tokens, softmax, ref_logits=ref_logits)
    total = stats.logprobs.new_zeros(())
    moves = torch.zeros_like(tokens, dtype=torch.bool)
    pairs = zip(by_statistics, (stats.logprobs, stats.entropy, stats.kl), strict=True)
    for derivative, statistic in pairs:
        if derivative is not None:
            # An infinite KL that is only reported does not touch the gradient.
            total = total + torch.where(derivative != 0, derivative * statistic, 0.0).sum()
            moves = moves | (derivative != 0)
    return total, moves


def _move(record: Any, device: torch.device | str) -> Any:
    """Move the record's tensors to a device."""
    return map_tensors(lambda x: x.to(device), record)


def gae(trajectory: Trajectory, discounts: Discounts) -> Gae:
    """Compute `definition.gae`."""
    estimates = definition.gae(_move(trajectory, "cpu"), _move(discounts, "cpu"))
    return _move(estimates, trajectory.token_values.device)


def shaped_advantages(
    trajectory: Trajectory, shaping: Shaping, discounts: Discounts
) -> ShapedAdvantages:
    """Compute `definition.shaped_advantages`."""
    estimates = definition.shaped_advantages(
        _move(trajectory, "cpu"), _move(shaping, "cpu"), _move(discounts, "cpu")
    )
    return _move(estimates, trajectory.token_values.device)


def whiten(
    x: Tensor, mask: Tensor | None = None, *, shift_mean: bool = True, moments: Tensor | None = None
) -> Tensor:
    """Compute `definition.whiten`."""
    return definition.whiten(x, mask, shift_mean=shift_mean, moments=moments)
