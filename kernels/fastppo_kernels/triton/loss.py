"""PPO's loss from logits and its gradient: each row is read from memory once.

The operation is `definition.ppo_loss`. A program takes whole rows, one after the other: the first
sweep (`sweeps.row_statistics`), the token's loss (`token_loss`), and the second sweep, which writes
the gradient while the end of the row is still in the caches.

Rows of weight 0 are not read. Rows with zero derivatives (clipped, without entropy or KL terms) are
not read twice. Sums for the metrics are written per row and added in a fixed order by a second
kernel, so every run gives the same bits on any number of programs. Tokens outside the vocabulary
give NaN and no stray read. There is no kernel for fp64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastppo_kernels.records import (
    RATIO_MAX,
    SUMS,
    Objective,
    PerToken,
    PPORows,
    Softmax,
)
from fastppo_kernels.triton import programs
from fastppo_kernels.triton.full_kl import row_statistics_with_reference
from fastppo_kernels.triton.jit import row_scale
from fastppo_kernels.triton.launch import check_dtype, current, dense_record, launch_options
from fastppo_kernels.triton.sweeps import row_statistics, write_gradient
from fastppo_kernels.triton.token_loss import (
    LossResults,
    is_dead,
    store_nothing,
    store_token,
    token_loss,
)
from fastppo_kernels.triton.views import (
    launch_over,
    logit_at,
    place_of,
    row_at,
    same_row,
    write_zeros,
)

MAX_ENTRY = tl.constexpr(RATIO_MAX)


@triton.jit
def _finish_row(
    index,
    row,
    x_token,
    place,
    stats,
    weight,
    scale,
    slope,
    grad,
    per_token,
    objective,
    softmax,
    results,
    n,
    vocab,
    cut,
    ref_row=None,
    ref_stats=None,
):
    """The token's loss and the second sweep of a row."""
    full_kl = None if ref_stats is None else ref_stats.kl
    kl, g, shares = token_loss(index, stats, full_kl, weight, per_token, objective)
    store_token(results, index, n, stats, kl, shares)
    if grad is not None:
        grad_row = same_row(row, grad, index, cut)
        if is_dead(g, stats):
            write_zeros(grad_row, vocab, cut)
        else:
            write_gradient(
                row,
                grad_row,
                x_token,
                place,
                stats,
                g,
                softmax,
                scale,
                slope,
                cut,
                CLAMPED=False,
                ref_row=ref_row,
                ref_stats=ref_stats,
            )


@triton.jit
def _leave_out(index, grad, results, n, vocab, cut):
    """Write zeros for a row of weight 0."""
    store_nothing(results, index, n)
    if grad is not None:
        write_zeros(row_at(grad, index, vocab, cut), vocab, cut)


@triton.jit(do_not_specialize=["n"])
def _ppo_loss_kernel(logits, grad, per_token, objective, softmax, results, n, vocab, cut):
    """Process rows program_id, program_id + num_programs, …

    Operands that are None cost nothing. `grad` is None if no gradient is needed.
    """
    # Keep the row for the second sweep, or evict it at once.
    HINT: tl.constexpr = "evict_first" if grad is None else "evict_last"
    # No loop-invariant code motion: keeping values of all rows would cost registers.
    for index in tl.range(tl.program_id(0), n, tl.num_programs(0), disable_licm=True):
        weight = tl.load(per_token.weights + index).to(tl.float32)
        if weight != 0:
            token = tl.load(per_token.tokens + index)
            x_token = logit_at(logits, index, token, vocab)
            scale, slope = row_scale(index, softmax)
            row = row_at(logits, index, vocab, cut)
            place = place_of(token, row, vocab)
            stats = row_statistics(row, x_token, place, softmax, scale, cut, HINT)
            _finish_row(
                index,
                row,
                x_token,
                place,
                stats,
                weight,
                scale,
                slope,
                grad,
                per_token,
                objective,
                softmax,
                results,
                n,
                vocab,
                cut,
            )
        else:
            _leave_out(index, grad, results, n, vocab, cut)


@triton.jit(do_not_specialize=["n"])
def _ppo_loss_full_kl_kernel(
    logits, ref_logits, grad, per_token, objective, softmax, results, n, vocab, cut
):
    """`_ppo_loss_kernel` with the reference's logits."""
    HINT: tl.constexpr = "evict_first" if grad is None else "evict_last"
    for index in tl.range(tl.program_id(0), n, tl.num_programs(0), disable_licm=True):
        weight = tl.load(per_token.weights + index).to(tl.float32)
        if weight != 0:
            token = tl.load(per_token.tokens + index)
            x_token = logit_at(logits, index, token, vocab)
            ref_token = logit_at(ref_logits, index, token, vocab)
            scale, slope = row_scale(index, softmax)
            row = row_at(logits, index, vocab, cut)
            ref_row = same_row(row, ref_logits, index, cut)
            place = place_of(token, row, vocab)
            stats, ref_stats = row_statistics_with_reference(
                row, ref_row, x_token, ref_token, place, softmax, scale, cut, HINT
            )
            _finish_row(
                index,
                row,
                x_token,
                place,
                stats,
                weight,
                scale,
                slope,
                grad,
                per_token,
                objective,
                softmax,
                results,
                n,
                vocab,
                cut,
                ref_row,
                ref_stats,
            )
        else:
            _leave_out(index, grad, results, n, vocab, cut)


@triton.jit(do_not_specialize=["n"])
def _add_sums_kernel(row_sums, sums, n, BLOCK_N: tl.constexpr):
    """Add row k of [len(SUMS), N] in program k, or take its maximum, in a fixed order."""
    entry = tl.program_id(0)
    row_sums += entry * n.to(tl.int64)
    takes_max = entry == MAX_ENTRY
    joined = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, n, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        x = tl.load(row_sums + index, index < n, other=0.0)
        largest = tl.maximum(joined, x, propagate_nan=tl.PropagateNan.ALL)
        joined = tl.where(takes_max, largest, joined + x)
    # A reduction by max ignores NaN.
    total = tl.sum(joined, 0)
    largest = tl.where(total == total, tl.max(joined, 0), total)
    tl.store(sums + entry, tl.where(takes_max, largest, total))


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
    """Compute `definition.ppo_loss` with one read and, if `need_grad`, one write of the logits.

    Args:
        logits: [N, V] or [B, T, V], bf16, fp16 or fp32, any strides, dense last axis.
        ref_logits: like `logits`; read only for `kl_estimator="full"`.
        inplace: write the gradient over the logits, whose rows must not overlap.

    Returns:
        PPORows, fp32; grad in the logits' dtype, rounded once.

    Raises:
        ValueError: fp64 logits.
    """
    check_dtype("logits", logits)
    if objective.kl_estimator != "full":
        ref_logits = None
    grad = None
    if need_grad:
        contiguous = torch.contiguous_format
        grad = logits if inplace else torch.empty_like(logits, memory_format=contiguous)
    n = logits.shape[:-1].numel()
    logprobs, entropy, kl = (logits.new_empty(n, dtype=torch.float32) for _ in range(3))
    row_sums = logits.new_empty((len(SUMS), n), dtype=torch.float32)
    sums = logits.new_empty(len(SUMS), dtype=torch.float32)
    launch = launch_over(logits, softmax, ref_logits, grad, sweeps=1 if grad is None else 2)
    # Names are compile-time constants of a kernel.
    objective = objective._replace(
        kl_estimator=tl.constexpr(objective.kl_estimator),
        kl_ratio_weighted=tl.constexpr(objective.kl_ratio_weighted),
        policy_term=tl.constexpr(objective.policy_term),
    )
    operands = {
        "logits": launch.logits,
        "grad": launch.grad,
        "per_token": dense_record(per_token),
        "objective": objective,
        "softmax": dense_record(softmax),
        "results": LossResults(logprobs, entropy, kl, row_sums),
        "n": n,
        "vocab": launch.vocab,
    }
    with current(logits.device):
        if n > 0 and ref_logits is None:
            _ppo_loss_kernel[launch.grid](**operands, **launch.options)
        elif n > 0:
            operands["ref_logits"] = launch.ref_logits
            _ppo_loss_full_kl_kernel[launch.grid](**operands, **launch.options)
        program = programs.TABLE["sums of the loss"]
        _add_sums_kernel[(len(SUMS),)](
            row_sums,
            sums,
            n,
            BLOCK_N=program.block,
            **launch_options(program, fp_fusion=True),
        )
    return PPORows(sums, logprobs, entropy, kl, grad)
