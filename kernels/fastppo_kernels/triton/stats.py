"""Statistics of rows of logits, and the gradient of the logits from theirs, with one read each.

The operations are `definition.token_stats` and its backward pass: the two sweeps of `sweeps`, run
separately. The StatsRows carry the state from the first to the second.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastppo_kernels.records import Softmax, StatsGradients, StatsRows
from fastppo_kernels.triton.full_kl import row_statistics_with_reference
from fastppo_kernels.triton.jit import WHOLE_LIMIT, row_scale
from fastppo_kernels.triton.launch import check_dtype, current, dense, dense_record
from fastppo_kernels.triton.sweeps import (
    RefStats,
    RowStats,
    defined_maximum,
    pair_of,
    row_statistics,
    store_stats,
    write_gradient,
)
from fastppo_kernels.triton.views import (
    launch_over,
    logit_at,
    place_of,
    row_at,
    same_row,
    write_zeros,
)


@triton.jit(do_not_specialize=["n"])
def _token_stats_kernel(logits, tokens, softmax, results, n, vocab, cut):
    """Write the results of the first sweep to the StatsRows `results`."""
    for index in range(tl.program_id(0), n, tl.num_programs(0)):
        token = tl.load(tokens + index)
        x_token = logit_at(logits, index, token, vocab)
        scale, _ = row_scale(index, softmax)
        row = row_at(logits, index, vocab, cut)
        place = place_of(token, row, vocab)
        stats = row_statistics(row, x_token, place, softmax, scale, cut, "evict_first")
        row_max = defined_maximum(row, stats.row_max, stats.total, softmax, cut)
        store_stats(results, index, stats, row_max)


@triton.jit(do_not_specialize=["n"])
def _token_stats_full_kl_kernel(logits, ref_logits, tokens, softmax, results, n, vocab, cut):
    """`_token_stats_kernel` with the reference's logits."""
    for index in range(tl.program_id(0), n, tl.num_programs(0)):
        token = tl.load(tokens + index)
        ref_token = logit_at(ref_logits, index, token, vocab)
        x_token = logit_at(logits, index, token, vocab)
        scale, _ = row_scale(index, softmax)
        row = row_at(logits, index, vocab, cut)
        ref_row = same_row(row, ref_logits, index, cut)
        place = place_of(token, row, vocab)
        stats, ref_stats = row_statistics_with_reference(
            row, ref_row, x_token, ref_token, place, softmax, scale, cut, "evict_first"
        )
        row_max = defined_maximum(row, stats.row_max, stats.total, softmax, cut)
        ref_max = defined_maximum(ref_row, ref_stats.row_max, ref_stats.total, softmax, cut)
        store_stats(results, index, stats, row_max, ref_stats, ref_max)


@triton.jit
def _load_gradients(grads, index):
    """Load a row of StatsGradients; None is 0."""
    g_entropy = 0.0
    if grads.entropy is not None:
        g_entropy = tl.load(grads.entropy + index).to(tl.float32)
    g_kl = 0.0
    if grads.kl is not None:
        g_kl = tl.load(grads.kl + index).to(tl.float32)
    return StatsGradients(tl.load(grads.logprobs + index).to(tl.float32), g_entropy, g_kl)


@triton.jit
def _load_stats(saved, index, scale, CLAMPED: tl.constexpr):
    """Load the RowStats of the second sweep from a row of the StatsRows.

    They do not record −inf among the logits, so a row counts as plain only if the sweep clamps its
    whole tiles.
    """
    normalizer = pair_of(saved.normalizer, index)
    row_max = tl.load(normalizer)
    log_sum = tl.load(normalizer + 1)
    entropy = tl.load(saved.entropy + index)
    plain = False
    if CLAMPED:
        plain = tl.abs(row_max * scale) < WHOLE_LIMIT
    return RowStats(
        logprob=tl.load(saved.logprobs + index),
        entropy=entropy,
        row_max=row_max,
        log_sum=log_sum,
        total=tl.exp(log_sum),
        mean_shifted=log_sum - entropy,
        others=tl.load(saved.p_others + index),
        plain=plain,
    )


@triton.jit
def _load_ref_stats(saved, index):
    normalizer = pair_of(saved.ref_normalizer, index)
    log_sum = tl.load(normalizer + 1)
    return RefStats(
        kl=tl.load(saved.kl + index),
        mean_gap=tl.load(saved.mean_gap + index),
        token_gap=tl.load(saved.token_gap + index),
        row_max=tl.load(normalizer),
        log_sum=log_sum,
        total=tl.exp(log_sum),
    )


@triton.jit(do_not_specialize=["n"])
def _token_stats_backward_kernel(logits, grad, grads, tokens, saved, softmax, n, vocab, cut):
    """Run the second sweep from the StatsRows `saved` and the StatsGradients `grads` without KL."""
    for index in range(tl.program_id(0), n, tl.num_programs(0)):
        g = _load_gradients(grads, index)
        if (g.logprobs == 0) & (g.entropy == 0):
            write_zeros(row_at(grad, index, vocab, cut), vocab, cut)
        else:
            token = tl.load(tokens + index)
            scale, slope = row_scale(index, softmax)
            row = row_at(logits, index, vocab, cut)
            write_gradient(
                row,
                same_row(row, grad, index, cut),
                logit_at(logits, index, token, vocab),
                place_of(token, row, vocab),
                _load_stats(saved, index, scale, CLAMPED=True),
                g,
                softmax,
                scale,
                slope,
                cut,
                CLAMPED=True,
            )


@triton.jit(do_not_specialize=["n"])
def _token_stats_backward_full_kl_kernel(
    logits, ref_logits, grad, grads, tokens, saved, softmax, n, vocab, cut
):
    """`_token_stats_backward_kernel` with the reference's logits."""
    for index in range(tl.program_id(0), n, tl.num_programs(0)):
        g = _load_gradients(grads, index)
        if (g.logprobs == 0) & (g.entropy == 0) & (g.kl == 0):
            write_zeros(row_at(grad, index, vocab, cut), vocab, cut)
        else:
            token = tl.load(tokens + index)
            scale, slope = row_scale(index, softmax)
            row = row_at(logits, index, vocab, cut)
            write_gradient(
                row,
                same_row(row, grad, index, cut),
                logit_at(logits, index, token, vocab),
                place_of(token, row, vocab),
                _load_stats(saved, index, scale, CLAMPED=False),
                g,
                softmax,
                scale,
                slope,
                cut,
                CLAMPED=False,
                ref_row=same_row(row, ref_logits, index, cut),
                ref_stats=_load_ref_stats(saved, index),
            )


def token_stats(
    logits: Tensor, tokens: Tensor, softmax: Softmax, *, ref_logits: Tensor | None = None
) -> StatsRows:
    """Compute `definition.token_stats` with one read of the logits, for bf16, fp16 and fp32."""
    check_dtype("logits", logits)
    n = logits.shape[:-1].numel()

    def empty(*shape: int) -> Tensor:
        return logits.new_empty((n, *shape), dtype=torch.float32)

    stats = StatsRows(
        logprobs=empty(),
        entropy=empty(),
        kl=empty(),
        p_others=empty(),
        mean_gap=empty(),
        token_gap=empty(),
        normalizer=empty(2),
        ref_normalizer=empty(2),
    )
    if n == 0:
        return stats
    launch = launch_over(logits, softmax, ref_logits, sweeps=1)
    operands = {
        "logits": launch.logits,
        "tokens": dense(tokens),
        "softmax": dense_record(softmax),
        "results": stats,
        "n": n,
        "vocab": launch.vocab,
    }
    with current(logits.device):
        if ref_logits is None:
            _token_stats_kernel[launch.grid](**operands, **launch.options)
        else:
            operands["ref_logits"] = launch.ref_logits
            _token_stats_full_kl_kernel[launch.grid](**operands, **launch.options)
    return stats


def token_stats_backward(
    grads: StatsGradients,
    logits: Tensor,
    tokens: Tensor,
    stats: StatsRows,
    softmax: Softmax,
    *,
    ref_logits: Tensor | None = None,
) -> Tensor:
    """The gradient of `token_stats`, with one write and one read of the rows with a gradient."""
    check_dtype("logits", logits)
    if grads.kl is None:
        ref_logits = None
    n = logits.shape[:-1].numel()
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if n == 0:
        return grad
    launch = launch_over(logits, softmax, ref_logits, grad, sweeps=1)
    operands = {
        "logits": launch.logits,
        "grad": launch.grad,
        "grads": dense_record(grads),
        "tokens": dense(tokens),
        "saved": dense_record(stats),
        "softmax": dense_record(softmax),
        "n": n,
        "vocab": launch.vocab,
    }
    with current(logits.device):
        if ref_logits is None:
            _token_stats_backward_kernel[launch.grid](**operands, **launch.options)
        else:
            operands["ref_logits"] = launch.ref_logits
            _token_stats_backward_full_kl_kernel[launch.grid](**operands, **launch.options)
    return grad
