"""PPO's loss from logits on a CPU: a compiled loop that reads each row from memory once.

Rows are distributed over as many threads as torch has; the bits do not depend on their number. Rows
of weight 0 are not read.

Sources: Schulman et al. 2017, eq. 7; Ziegler et al. 2019; Ye et al. 2020 (dual clip).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastppo_kernels.cpu.arithmetic import F32
from fastppo_kernels.cpu.operands import (
    allocate_buffers,
    softmax_operand,
    token_operands,
    view_reference,
    view_rows,
)
from fastppo_kernels.cpu.row_statistics import row_statistics, scales_of, write_gradient
from fastppo_kernels.cpu.row_sweeps import clear, row_at
from fastppo_kernels.cpu.threads import fresh, in_threads, kernel
from fastppo_kernels.cpu.token_terms import contributions, objective_operand, token_loss
from fastppo_kernels.records import RATIO_MAX, SUMS, Objective, PerToken, PPORows, Softmax

GEMM_ROWS = 8
"""Rows with a gradient are padded to a multiple of this: an odd number makes the GEMM of dW a
seventh slower (255 rows against 252 or 256; sgemm, V = 32000, H = 1024)."""


@kernel
def _loss_rows(
    start,
    stop,
    buffers,
    rows,
    ref_rows,
    token,
    loss,
    softmax,
    statistics,
    terms,
    has_gradient,
    grad,
):
    """Compute the loss of rows start to stop.

    For rows of non-zero weight, write (logprob, entropy, KL) to statistics [3, N], their
    contributions to `SUMS` to terms [N, len(SUMS)], and has_gradient [N]. For all rows, write the
    gradient to `grad` if it has columns.
    """
    for i in range(start, stop):
        if token.weights[i] == 0:
            clear(row_at(grad, i))
            continue
        x = row_at(rows, i)
        scale = scales_of(softmax, i)[0]
        row = row_statistics(x, ref_rows, buffers, token.tokens[i], scale, softmax, i)
        logprob = np.float64(F32(row.logprob))  # rounded as the caller gets it
        policy, ratio, kl, derivatives = token_loss(logprob, row.kl, token, loss, i)
        statistics[0, i] = logprob
        statistics[1, i] = row.entropy
        statistics[2, i] = kl
        token_terms = contributions(logprob, row.entropy, kl, policy, ratio, token, loss, i)
        for k in range(len(token_terms)):
            terms[i, k] = token_terms[k]
        by_logprob, by_entropy, by_kl = derivatives
        has_gradient[i] = grad.vocab > 0 and (by_logprob != 0 or by_entropy != 0 or by_kl != 0)
        if has_gradient[i]:
            out = row_at(grad, i)
            write_gradient(x, ref_rows, buffers, row, out, token.tokens[i], derivatives, softmax, i)
        else:
            clear(row_at(grad, i))


class _Pass(NamedTuple):
    """The results of a pass over all rows, besides the gradient.

    sums: [len(SUMS)] fp32.
    statistics: [3, N] fp32, the logprobs, entropies and KLs.
    has_gradient: [N] bool.
    """

    sums: Tensor
    statistics: Tensor
    has_gradient: Tensor


def _loss_pass(
    logits: Tensor,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    *,
    ref_logits: Tensor | None,
    grad: Tensor | None,
) -> _Pass:
    """Run the loop over all rows, and sum the tokens' terms."""
    count = per_token.tokens.numel()
    statistics = np.zeros((3, count), np.float32)
    terms = np.zeros((count + 1, len(SUMS)))
    has_gradient = np.zeros(count, np.bool_)
    if objective.kl_estimator != "full":
        ref_logits = None
    in_threads(
        _loss_rows,
        count,
        view_rows(logits, logits),
        view_reference(ref_logits, logits),
        token_operands(per_token),
        objective_operand(objective),
        softmax_operand(softmax),
        statistics,
        terms,
        has_gradient,
        view_rows(grad, logits),
        entries=logits.numel(),
        buffers=functools.partial(allocate_buffers, logits, keeps_exponentials=True),
    )
    all_terms = torch.from_numpy(terms)
    sums = all_terms.sum(0)
    sums[RATIO_MAX] = all_terms[:, RATIO_MAX].max()  # propagates NaN
    return _Pass(sums.float(), torch.from_numpy(statistics), torch.from_numpy(has_gradient))


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
    """Compute the loss of every row, its statistics, and its gradient in the same pass.

    Args:
        logits: [N, V] or [B, T, V] with a dense last axis; bf16, fp16 or fp32.
        ref_logits: shaped like the logits; read only for `kl_estimator="full"`.
        need_grad: compute dL/dlogits.
        inplace: write dL/dlogits over the logits.
    """
    grad = (logits if inplace else fresh(logits)) if need_grad else None
    done = _loss_pass(logits, per_token, objective, softmax, ref_logits=ref_logits, grad=grad)
    logprobs, entropy, kl = (x.clone() for x in done.statistics)
    return PPORows(done.sums, logprobs, entropy, kl, grad)


def chunk_ppo_loss(
    logits: Tensor,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    *,
    ref_logits: Tensor | None = None,
    need_grad: bool = True,
) -> tuple[PPORows, Tensor | None]:
    """Compute `ppo_loss` in place for a chunk [n, V] of rows with non-zero weight.

    Rows with a gradient are moved together, so that the GEMMs skip the others, which are clipped or
    have A = 0, without entropy or KL terms.

    Returns:
        (PPORows with grad [m, V] or None, the int64 indices [m] of the rows in grad or None for
        all n).
    """
    grad = logits if need_grad else None
    done = _loss_pass(logits, per_token, objective, softmax, ref_logits=ref_logits, grad=grad)
    logprobs, entropy, kl = done.statistics
    chunk = PPORows(done.sums, logprobs, entropy, kl)
    count = int(done.has_gradient.sum())
    if count == 0:
        return chunk, None
    size = min(len(logits), -(-count // GEMM_ROWS) * GEMM_ROWS)
    if size == len(logits):
        return chunk._replace(grad=logits), None
    fillers = done.has_gradient.logical_not().nonzero()[: size - count]
    live = torch.cat([done.has_gradient.nonzero(), fillers]).squeeze(-1).sort().values
    for place, row in enumerate(live.tolist()):  # ascending: overwrites only rows already moved
        if place != row:
            logits[place] = logits[row]
    return chunk._replace(grad=logits[:size]), live
