"""Logprobs, entropies and KLs from logits on a CPU, and their backward pass.

Both are compiled loops that read each row from memory once. Rows are distributed over as many
threads as torch has; the bits do not depend on their number.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastppo_kernels.cpu.operands import (
    allocate_buffers,
    softmax_operand,
    view_reference,
    view_rows,
)
from fastppo_kernels.cpu.row_statistics import (
    row_statistics,
    saved_statistics,
    scales_of,
    write_gradient,
)
from fastppo_kernels.cpu.row_sweeps import clear, row_at
from fastppo_kernels.cpu.threads import fresh, in_threads, kernel
from fastppo_kernels.records import Softmax, StatsGradients, StatsRows


@kernel
def _statistics_rows(
    start, stop, buffers, rows, ref_rows, tokens, softmax, statistics, normalizers
):
    """Write (logprob, entropy, KL, 1 − p, γ, gap_y − γ) of rows start to stop to statistics [6, N],
    and the normalizers of policy and reference to normalizers [2, N, 2]."""
    for i in range(start, stop):
        x = row_at(rows, i)
        row = row_statistics(x, ref_rows, buffers, tokens[i], scales_of(softmax, i)[0], softmax, i)
        statistics[0, i] = row.logprob
        statistics[1, i] = row.entropy
        statistics[2, i] = row.kl
        statistics[3, i] = row.p_others
        statistics[4, i] = row.mean_gap
        statistics[5, i] = row.token_gap
        # One by one: assigning a tuple to an array takes three seconds to compile.
        normalizers[0, i, 0] = row.maximum / softmax.unit
        normalizers[0, i, 1] = row.log_total
        if ref_rows is not None:
            normalizers[1, i, 0] = row.ref_maximum / softmax.unit
            normalizers[1, i, 1] = row.ref_log_total


@kernel
def _gradient_rows(start, stop, buffers, rows, ref_rows, tokens, softmax, derivatives, stats, grad):
    """Write dL/dx of rows start to stop from the results of `_statistics_rows` and the loss's
    derivatives [3, N] by logprob, entropy and KL."""
    for i in range(start, stop):
        by_logprob = derivatives[0, i]
        by_entropy = derivatives[1, i]
        by_kl = derivatives[2, i]
        if by_logprob == 0 and by_entropy == 0 and by_kl == 0:
            clear(row_at(grad, i))
            continue
        x = row_at(rows, i)
        out = row_at(grad, i)
        row = saved_statistics(x, stats, tokens[i], softmax, i)
        by_statistics = (by_logprob, by_entropy, by_kl)
        write_gradient(x, ref_rows, buffers, row, out, tokens[i], by_statistics, softmax, i)


def _correct_normalizers(normalizers: Any, logits: Tensor) -> None:
    """Set the normalizers [N, 2] of rows with NaN to NaN, and those of rows of −inf to −inf.

    The sweep for the maximum misses a NaN with a sign bit, which an x86 CPU's conversion to bf16
    creates.
    """
    maximum, log_total = normalizers.T
    for i in np.flatnonzero((maximum == -np.inf) | np.isnan(log_total)):
        row = logits.detach()[np.unravel_index(i, logits.shape[:-1])]
        if row.isnan().any():
            normalizers[i] = np.nan
        elif maximum[i] == -np.inf:
            normalizers[i] = -np.inf


def token_stats(
    logits: Tensor, tokens: Tensor, softmax: Softmax, *, ref_logits: Tensor | None = None
) -> StatsRows:
    """Return the token's logprob, entropy and, with `ref_logits`, full KL of each row.

    Args:
        logits: [N, V] or [B, T, V] with a dense last axis; bf16, fp16 or fp32.
    """
    count = tokens.numel()
    statistics = np.empty((6, count), np.float32)
    normalizers = np.zeros((2, count, 2), np.float32)
    in_threads(
        _statistics_rows,
        count,
        view_rows(logits, logits),
        view_reference(ref_logits, logits),
        tokens.contiguous().numpy(),
        softmax_operand(softmax),
        statistics,
        normalizers,
        entries=logits.numel(),
        buffers=functools.partial(allocate_buffers, logits),
    )
    _correct_normalizers(normalizers[0], logits)
    if ref_logits is not None:
        _correct_normalizers(normalizers[1], ref_logits)
    columns = [*torch.from_numpy(statistics), *torch.from_numpy(normalizers)]
    return StatsRows(*[x.clone() for x in columns])


def token_stats_backward(
    grads: StatsGradients,
    logits: Tensor,
    tokens: Tensor,
    stats: StatsRows,
    softmax: Softmax,
    *,
    ref_logits: Tensor | None = None,
) -> Tensor:
    """Return dL/dlogits in the logits' shape and dtype, reading rows with a gradient once more.

    The entropy's part is p·(μ − t) with μ = log S − entropy, which fp32 keeps to 5e-7 nats. For
    rows with a standard deviation of σ, the error is about 1e-7/σ of the row's largest entry.
    """
    grad = fresh(logits)
    derivatives = np.zeros((3, tokens.numel()))
    for row, derivative in zip(derivatives, grads, strict=True):
        if derivative is not None:
            row[:] = derivative.numpy()
    stats_arrays: list[Any] = [x.detach().numpy() for x in stats]
    in_threads(
        _gradient_rows,
        tokens.numel(),
        view_rows(logits, logits),
        view_reference(None if grads.kl is None else ref_logits, logits),
        tokens.contiguous().numpy(),
        softmax_operand(softmax),
        derivatives,
        StatsRows(*stats_arrays),
        view_rows(grad, logits),
        entries=logits.numel(),
        buffers=functools.partial(allocate_buffers, logits),
    )
    return grad
