"""PPO's loss from hidden states and the lm-head: cuBLAS products around the Triton row kernel.

The definitions are those of `fastppo_kernels.reference`, under the same names and signatures:
`linear_ppo_loss`, `linear_token_stats`, `linear_token_stats_backward`. For a chunk of rows,
X [n, H], and the head W [V, H]:

    Z  = X Wᵀ + b             into a buffer [n, V] that every chunk uses again
    G  = dL/dZ                the row kernel, in place: the buffer now holds the gradient
    dX = G W                  into the chunk's rows of dX
    dW += Gᵀ X,  db += Σ G    in fp32, cast once behind the last chunk

PPO's loss is a weighted sum whose weights are known beforehand, so G is known as soon as a row's
softmax is, and nothing is formed twice: 6·N·H·V FLOP. A loss that recomputes Z in a backward pass
takes 8·N·H·V. Bytes besides the GEMMs' own operands, for b bytes per logit: N·V·b written by the
first GEMM, 2·N·V·b by the row kernel, 2·N·V·b read by the last two GEMMs, and 8·H·V per chunk
behind the first for reading and writing the fp32 dW. That last term is why chunks are as large as
the memory budget allows (`reference.linear_chunk_size`); with a single chunk there is no
accumulator, and dW is written in the weight's own dtype (the GEMM accumulates in fp32 inside).

Rows of the buffer lie `ROW_ALIGNMENT` bytes apart or a multiple of it, so that an odd vocabulary
(50257) costs the GEMMs none of their speed. The host looks at no tensor unless `compact` is asked
for: the launcher can be captured in a CUDA graph. Sums are added in a fixed order.

What this does not do: rows whose gradient is exactly zero go through the last two GEMMs like any
other (to leave them out, the host would have to learn how many there are); the GEMM and the softmax
are not one kernel (`linear_stats` is, for the statistics alone). fp64 has no kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastppo_kernels import row_loss
from fastppo_kernels.reference import (
    SUMS,
    LinearPPORows,
    TokenStats,
    combine_sums,
    linear_chunk_size,
)

ROW_ALIGNMENT = 128
"""Bytes between rows of the logits' buffer: a cache line, and a multiple of the 16 bytes on which
tensor-core GEMMs want the leading dimension."""


def _buffer(rows: int, vocab: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, V] with aligned rows; what lies between them is never read."""
    step = ROW_ALIGNMENT // dtype.itemsize
    return like.new_empty((rows, -(-vocab // step) * step), dtype=dtype)[:, :vocab]


def _mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, accumulated in fp32 and rounded once to the dtype of `out`."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda and out.dtype == torch.float32:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:  # cuBLAS widens and nothing else, torch on a CPU does not even that: rounded twice
        out.copy_(a @ b)


def _add_mm(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, in the GEMM's own epilogue."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out += a @ b


class _Head:
    """The lm-head in the GEMMs' dtype, and the one buffer that its logits are formed in."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, chunk_rows: int
    ) -> None:
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.buffer = _buffer(chunk_rows, weight.shape[0], weight, dtype)

    def logits(self, x: Tensor) -> Tensor:
        """[n, V] of hidden states [n, H], in the buffer's first rows."""
        out = self.buffer[: x.shape[0]]
        if self.bias is None:
            return torch.mm(x, self.weight.T, out=out)
        return torch.addmm(self.bias, x, self.weight.T, out=out)


class _Gradients:
    """dX, dW and dbias, gathered chunk by chunk; each is None where it is not asked for.

    dW and dbias are accumulated in fp32 unless they are complete after one chunk of GEMMs in the
    parameter's own dtype. A frozen head costs no dW, frozen hidden states no dX.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        need: tuple[bool, bool, bool],
        *,
        one_chunk: bool,
        every_row: bool,
    ) -> None:
        contiguous = torch.contiguous_format
        new_hidden = torch.empty_like if every_row else torch.zeros_like
        self.hidden = new_hidden(hidden, memory_format=contiguous) if need[0] else None
        self.weight, self.bias = None, None
        if need[1]:
            dtype = weight.dtype if one_chunk else torch.float32
            self.weight = torch.empty_like(weight, dtype=dtype, memory_format=contiguous)
        if need[2] and bias is not None:
            self.bias = torch.zeros_like(bias, dtype=torch.float32)
        self.is_first = True

    def add(self, rows: slice | Tensor, grad: Tensor, x: Tensor, head: Tensor) -> None:
        """The share of `grad` [n, V], the gradient of the logits of hidden states `x` [n, H]."""
        if self.hidden is not None:
            if isinstance(rows, slice):
                _mm(grad, head, out=self.hidden[rows])
            else:
                self.hidden[rows] = (grad @ head).to(self.hidden.dtype)
        if self.weight is not None:
            if self.is_first:
                _mm(grad.T, x, out=self.weight)
            else:
                _add_mm(self.weight, grad.T, x)
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=torch.float32)
        self.is_first = False

    def finished(
        self, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.is_first:  # there were no rows
            for grad in (self.hidden, self.weight):
                if grad is not None:
                    grad.zero_()
        return (
            self.hidden,
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


def _chunks(rows: int, step: int, kept: Tensor | None) -> list[slice | Tensor]:
    starts = range(0, rows, step)
    slices = [slice(start, min(start + step, rows)) for start in starts]
    return [*slices] if kept is None else [kept[part] for part in slices]


def _at(x: Any, rows: slice | Tensor) -> Any:
    return x[rows] if isinstance(x, Tensor) else x


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    bias: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    importance_weights: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    compute_dtype: torch.dtype | None = None,
    need: tuple[bool, bool, bool] = (True, True, True),
    compact: bool = False,
) -> LinearPPORows:
    """`reference.linear_ppo_loss` with one keyword more.

    Args:
        hidden: [N, H]; weight: [V, H]; bf16, fp16 or fp32. The rest as in the definition.
        compact: cut rows of weight 0 out before the first GEMM. It costs one synchronisation, for
            their number. Without it they go through the GEMMs with a gradient of 0.

    Returns:
        LinearPPORows; statistics fp32, gradients in the dtypes of their parameters.

    Raises:
        ValueError: GEMMs in fp64.
    """
    n, vocab = hidden.shape[0], weight.shape[0]
    dtype = compute_dtype or hidden.dtype
    kept = (weights != 0).nonzero().squeeze(-1) if compact else None
    count = n if kept is None else kept.numel()
    step = chunk_size or linear_chunk_size(count, vocab, hidden.device)
    head = _Head(weight, bias, dtype, min(step, count))
    ref_head = None
    if ref_weight is not None and kl_estimator == "full":
        ref_head = _Head(ref_weight, ref_bias, dtype, min(step, count))
    grads = _Gradients(hidden, weight, bias, need, one_chunk=count <= step, every_row=kept is None)
    logprobs, entropy, kl = (hidden.new_zeros(n, dtype=torch.float32) for _ in range(3))
    sums = hidden.new_zeros(len(SUMS), dtype=torch.float32)
    for rows in _chunks(count, step, kept):
        x = hidden[rows].to(dtype)
        ref_logits = None
        if ref_head is not None and ref_hidden is not None:
            ref_logits = ref_head.logits(ref_hidden[rows].to(dtype))
        chunk = row_loss.ppo_loss(
            head.logits(x),
            tokens[rows],
            old_logprobs[rows],
            advantages[rows],
            weights[rows],
            importance_weights=_at(importance_weights, rows),
            ref_logprobs=_at(ref_logprobs, rows),
            ref_logits=ref_logits,
            temperature=_at(temperature, rows),
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
            kl_coef=kl_coef,
            kl_estimator=kl_estimator,
            entropy_coef=entropy_coef,
            logit_scale=logit_scale,
            softcap=softcap,
            need_grad=any(need),
            inplace=True,
        )
        logprobs[rows], entropy[rows], kl[rows] = chunk.logprobs, chunk.entropy, chunk.kl
        sums = combine_sums(sums, chunk.sums)
        if chunk.grad is not None:
            if need[1] and kept is None:
                # A masked row may hold anything, and 0·NaN would reach all of dW.
                x = torch.where((weights[rows] != 0).unsqueeze(-1), x, 0.0)
            grads.add(rows, chunk.grad, x, head.weight)
    return LinearPPORows(sums, logprobs, entropy, kl, *grads.finished(weight, bias))


def linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> TokenStats:
    """`reference.linear_token_stats`: 2·N·H·V FLOP, and one write and one read of the logits."""
    n, vocab = hidden.shape[0], weight.shape[0]
    dtype = compute_dtype or hidden.dtype
    step = chunk_size or linear_chunk_size(n, vocab, hidden.device)
    head = _Head(weight, bias, dtype, min(step, n))
    logprobs, entropy, kl = (hidden.new_zeros(n, dtype=torch.float32) for _ in range(3))
    normalizer, ref_normalizer = (hidden.new_zeros((n, 2), dtype=torch.float32) for _ in range(2))
    for rows in _chunks(n, step, None):
        stats = row_loss.token_stats(
            head.logits(hidden[rows].to(dtype)),
            tokens[rows],
            temperature=_at(temperature, rows),
            logit_scale=logit_scale,
            softcap=softcap,
        )
        logprobs[rows], entropy[rows] = stats.logprobs, stats.entropy
        normalizer[rows] = stats.normalizer
    return TokenStats(logprobs, entropy, kl, normalizer, ref_normalizer)


def linear_token_stats_backward(
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    stats: TokenStats,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    compute_dtype: torch.dtype | None = None,
    need: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`reference.linear_token_stats_backward`; holds the gradient of a chunk beside its logits."""
    n, vocab = hidden.shape[0], weight.shape[0]
    dtype = compute_dtype or hidden.dtype
    step = chunk_size or linear_chunk_size(n, vocab, hidden.device)
    head = _Head(weight, bias, dtype, min(step, n))
    grads = _Gradients(hidden, weight, bias, need, one_chunk=n <= step, every_row=True)
    for rows in _chunks(n, step, None):
        x = hidden[rows].to(dtype)
        grad = row_loss.token_stats_backward(
            grad_logprobs[rows],
            _at(grad_entropy, rows),
            None,
            head.logits(x),
            tokens[rows],
            TokenStats(*(part[rows] for part in stats)),
            temperature=_at(temperature, rows),
            logit_scale=logit_scale,
            softcap=softcap,
        )
        grads.add(rows, grad, x, head.weight)
    return grads.finished(weight, bias)
