"""Custom operators, their autograd, and the choice of backend.

The layer between the public functions and `fastppo_kernels`. Each operator is opaque to
`torch.compile` (a registered custom operator with a fake kernel, so `fullgraph=True` works), runs
a backend, and is made differentiable by a small `autograd.Function`. Arguments arrive checked, one
entry per token: `[N]`, in records; `record_operator` flattens them for torch.

PPO's gradient is formed in the forward pass; the backward pass scales it by the incoming gradient.
fp16 is the exception: its loss scale is known in the backward pass only, and a gradient rounded to
fp16 before the scaling would underflow, so `fastppo.functional.losses` takes the statistics' path
there, from logits and from hidden states alike.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from fastppo_kernels import linear, torch_advantages, torch_rows
from fastppo_kernels.records import (
    LOSS,
    SUMS,
    Advantages,
    Discounts,
    Gae,
    Gemm,
    GradientsWanted,
    LinearPPORows,
    Objective,
    PerToken,
    PPORows,
    Projection,
    ProjectionGradients,
    Shaping,
    Softmax,
    StatsGradients,
    TokenStats,
    Trajectory,
    accumulation_dtype,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastppo.functional import arguments
from fastppo.functional.record_operator import operator


def _rows(backend: str) -> ModuleType:
    """A backend's operations on rows of logits; Triton is imported only where it is used."""
    if backend == "torch":
        return torch_rows
    return importlib.import_module("fastppo_kernels.triton_rows")


def _advantages(backend: str) -> ModuleType:
    if backend == "torch":
        return torch_advantages
    return importlib.import_module("fastppo_kernels.triton_advantages")


def _check_tokens(tokens: Tensor, vocab: int, weights: Tensor | None = None) -> None:
    """Refuses tokens outside the vocabulary where the check does not synchronise with a GPU.

    FASTPPO_CHECK_TOKENS=1 asks for it everywhere. Tokens of weight 0 may be anything.
    """
    if tokens.device.type == "cpu" or os.environ.get("FASTPPO_CHECK_TOKENS") == "1":
        arguments.vocabulary(tokens, vocab, weights)


def _no_autocast(x: Tensor) -> AbstractContextManager:
    """The operators choose their dtypes themselves; autocast must not reach inside them."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _scaled(grad: Tensor, by: Tensor, backend: str = "torch") -> Tensor:
    """grad·by for a gradient saved in the forward pass and the 0-d gradient of the loss.

    In eager mode a factor of exactly 1 costs no pass over memory: on a CPU its value is looked at,
    and the Triton kernel looks at it on the device. The saved buffer itself is handed out (and
    scaled) only where autograd frees it after this call: whoever receives it may add to it in
    place. Where it stays for another backward pass (retain_graph=True), it is copied.
    """
    if not torch.compiler.is_compiling():
        stays = torch._C._autograd._get_current_graph_task_keep_graph()
        if backend == "triton":
            return _rows(backend).scale_(grad.clone() if stays else grad, by)
        if by.device.type == "cpu":
            return grad if by.item() == 1.0 and not stays else grad * by
    # Elsewhere a 0-d factor is rounded to the gradient's dtype before the product.
    return (grad.to(torch.promote_types(grad.dtype, by.dtype)) * by).to(grad.dtype)


def _for_the_first(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of an autograd function's first inputs, and None for all the others."""
    return (*grads, *[None] * (len(ctx.needs_input_grad) - len(grads)))


# ------------------------------------------------------------------------------------- statistics


@operator("token_stats")
def token_stats_op(
    logits: Tensor, tokens: Tensor, softmax: Softmax, ref_logits: Tensor | None, backend: str
) -> TokenStats:
    _check_tokens(tokens, logits.shape[-1])
    with _no_autocast(logits):
        return _rows(backend).token_stats(logits, tokens, softmax, ref_logits=ref_logits)


@token_stats_op.register_fake
def _(
    logits: Tensor, tokens: Tensor, softmax: Softmax, ref_logits: Tensor | None, backend: str
) -> TokenStats:
    return _empty_stats(tokens, accumulation_dtype(logits.dtype))


def _empty_stats(tokens: Tensor, dtype: torch.dtype) -> TokenStats:
    (n,) = tokens.shape
    return TokenStats(
        *(tokens.new_empty(shape, dtype=dtype) for shape in (*[(n,)] * 5, (n, 2), (n, 2)))
    )


@operator("token_stats_backward")
def token_stats_backward_op(
    grads: StatsGradients,
    logits: Tensor,
    tokens: Tensor,
    stats: TokenStats,
    softmax: Softmax,
    ref_logits: Tensor | None,
    backend: str,
) -> Tensor:
    with _no_autocast(logits):
        return _rows(backend).token_stats_backward(
            grads, logits, tokens, stats, softmax, ref_logits=ref_logits
        )


@token_stats_backward_op.register_fake
def _(grads: StatsGradients, logits: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


class TokenStatistics(torch.autograd.Function):
    """(logprobs, entropy, full KL), differentiable by the logits; backward reads them again."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        softmax: Softmax,
        ref_logits: Tensor | None,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        stats = token_stats_op(logits, tokens, softmax, ref_logits, backend)
        ctx.save_for_backward(logits, tokens, softmax.temperatures, ref_logits, *stats)
        ctx.softmax, ctx.backend = softmax._replace(temperatures=None), backend
        return stats.logprobs, stats.entropy, stats.kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, tokens, temperatures, ref_logits, *stats = ctx.saved_tensors
        grads = StatsGradients(*upstream)
        grad = token_stats_backward_op(
            grads if ref_logits is not None else grads._replace(kl=None),
            logits,
            tokens,
            TokenStats(*stats),
            ctx.softmax._replace(temperatures=temperatures),
            ref_logits,
            ctx.backend,
        )
        return _for_the_first(ctx, grad)


# -------------------------------------------------------------------------------- loss from logits


@operator("ppo_loss")
def ppo_loss_op(
    logits: Tensor,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    ref_logits: Tensor | None,
    need_grad: bool,
    backend: str,
) -> PPORows:
    _check_tokens(per_token.tokens, logits.shape[-1], per_token.weights)
    with _no_autocast(logits):
        return _rows(backend).ppo_loss(
            logits, per_token, objective, softmax, ref_logits=ref_logits, need_grad=need_grad
        )


@ppo_loss_op.register_fake
def _(
    logits: Tensor,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    ref_logits: Tensor | None,
    need_grad: bool,
    backend: str,
) -> PPORows:
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format) if need_grad else None
    return _empty_rows(logits, per_token.tokens, logits.dtype)._replace(grad=grad)


def _empty_rows(x: Tensor, tokens: Tensor, dtype: torch.dtype) -> PPORows:
    wide, (n,) = accumulation_dtype(dtype), tokens.shape
    return PPORows(*(x.new_empty(m, dtype=wide) for m in (len(SUMS), n, n, n)))


@operator("ppo_loss_inplace", "logits")
def ppo_loss_inplace_op(
    logits: Tensor,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    ref_logits: Tensor | None,
    backend: str,
) -> PPORows:
    """The gradient is written over the logits, and not among the results."""
    _check_tokens(per_token.tokens, logits.shape[-1], per_token.weights)
    with _no_autocast(logits):
        rows = _rows(backend).ppo_loss(
            logits, per_token, objective, softmax, ref_logits=ref_logits, inplace=True
        )
    return rows._replace(grad=None)


@ppo_loss_inplace_op.register_fake
def _(logits: Tensor, per_token: PerToken, *others: Any) -> PPORows:
    return _empty_rows(logits, per_token.tokens, logits.dtype)


class PPOLoss(torch.autograd.Function):
    """(loss, sums, logprobs, entropy, kl); the loss alone is differentiable, by the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        per_token: PerToken,
        objective: Objective,
        softmax: Softmax,
        ref_logits: Tensor | None,
        need_grad: bool,
        inplace: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        operands = (per_token, objective, softmax, ref_logits)
        if inplace and need_grad:
            # The saved buffer is the caller's own logits: the one copy there is.
            buffer = logits.detach()
            rows = ppo_loss_inplace_op(buffer, *operands, backend)._replace(grad=buffer)
        else:
            rows = ppo_loss_op(logits, *operands, need_grad, backend)
        if need_grad:
            ctx.save_for_backward(rows.grad)
            ctx.backend = backend
        loss = rows.sums[LOSS].clone()
        statistics = (rows.sums, rows.logprobs, rows.entropy, rows.kl)
        ctx.mark_non_differentiable(*statistics)
        return (loss, *statistics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return _for_the_first(ctx, _scaled(grad, by, ctx.backend))


class TokenLoss(torch.autograd.Function):
    """(loss, sums, kl) from a row's statistics, differentiable by (logprobs, entropy, full KL).

    For fp16 logits: composed with TokenStatistics it forms their gradient in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        entropy: Tensor,
        full_kl: Tensor | None,
        per_token: PerToken,
        objective: Objective,
    ) -> tuple[Tensor, ...]:
        counts = per_token.weights != 0
        of_tokens = per_token, objective, counts
        terms, grads = torch_rows.token_loss(logprobs, full_kl, *of_tokens)
        sums = torch_rows.loss_sums(logprobs, entropy, terms, *of_tokens)
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(sums, terms.kl)
        return sums[LOSS].clone(), sums, terms.kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if grad is None else grad * by for grad in ctx.saved_tensors)
        return _for_the_first(ctx, *grads)


class ValueLoss(torch.autograd.Function):
    """(Σ w·½(V − R)², how many tokens' error is that of the clipped value), 0-d each.

    The first is differentiable by the values, twice too. A clipped value does not move, so that a
    token whose clipped error is the larger one has no derivative; within the clip range both errors
    are one. NaN counts as clipped, and shows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        returns: Tensor,
        weights: Tensor,
        old_values: Tensor | None,
        clip_ratio: float | None,
    ) -> tuple[Tensor, Tensor]:
        wide, counts = accumulation_dtype(values.dtype), weights != 0
        new, wanted, weights = values.to(wide), returns.to(wide), weights.to(wide)
        error = (new - wanted).square()
        count, moving = error.new_zeros(()), weights
        if old_values is not None and clip_ratio is not None:
            old = old_values.to(wide)
            moved = new - old
            of_clipped = (old + moved.clamp(-clip_ratio, clip_ratio) - wanted).square()
            within = (of_clipped <= error) | (moved.abs() <= clip_ratio)
            error = torch.where(within, error, of_clipped)
            count, moving = (~within & counts).sum(dtype=wide), weights * within
        ctx.save_for_backward(values, returns, moving)
        ctx.mark_non_differentiable(count)
        # Masked entries may hold anything, and 0·NaN is not 0.
        return 0.5 * torch.where(counts, weights * error, 0.0).sum(), count

    @staticmethod
    def backward(ctx: Any, by: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        values, returns, moving = ctx.saved_tensors
        slope = values.to(moving.dtype) - returns.to(moving.dtype)
        grad = torch.where(moving != 0, moving * slope * by, 0.0)
        return _for_the_first(ctx, grad.to(values.dtype))


# ------------------------------------------------------------------------------- the fused lm-head


@operator("linear_ppo_loss")
def linear_ppo_loss_op(
    projection: Projection,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    ref_projection: Projection | None,
    gemm: Gemm,
    asked: GradientsWanted,
    compact: bool,
    backend: str,
) -> LinearPPORows:
    """`compact` lets the host find the rows of weight 0 and leave them out, which takes a
    synchronisation; not in a graph capture, where none is allowed."""
    hidden = projection.hidden
    _check_tokens(per_token.tokens, projection.weight.shape[0], per_token.weights)
    capturing = hidden.is_cuda and torch.cuda.is_current_stream_capturing()
    with _no_autocast(hidden):
        return linear.ppo_loss(
            projection,
            per_token,
            objective,
            softmax,
            rows=_rows(backend),
            ref_projection=ref_projection,
            gemm=gemm,
            wanted=asked,
            compact=compact and not capturing,
        )


@linear_ppo_loss_op.register_fake
def _(
    projection: Projection,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    ref_projection: Projection | None,
    gemm: Gemm,
    asked: GradientsWanted,
    compact: bool,
    backend: str,
) -> LinearPPORows:
    hidden = projection.hidden
    rows = _empty_rows(hidden, per_token.tokens, gemm.dtype or hidden.dtype)
    grads = _empty_gradients(projection, asked)
    return LinearPPORows(rows.sums, rows.logprobs, rows.entropy, rows.kl, grads)


def _empty_gradients(projection: Projection, asked: GradientsWanted) -> ProjectionGradients:
    """Contiguous, whatever hidden states and weight are."""
    return ProjectionGradients(
        *(
            x.new_empty(x.shape) if x is not None and is_asked else None
            for x, is_asked in zip(projection, asked, strict=True)
        )
    )


class LinearPPOLoss(torch.autograd.Function):
    """(loss, sums, logprobs, entropy, kl); the loss is differentiable by hidden, weight, bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        per_token: PerToken,
        objective: Objective,
        softmax: Softmax,
        ref_projection: Projection | None,
        gemm: Gemm,
        asked: GradientsWanted,
        compact: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        rows = linear_ppo_loss_op(
            Projection(hidden, weight, bias),
            per_token,
            objective,
            softmax,
            ref_projection,
            gemm,
            asked,
            compact,
            backend,
        )
        ctx.save_for_backward(*rows.grads)
        ctx.asked, ctx.backend = asked, backend
        loss = rows.sums[LOSS].clone()
        statistics = (rows.sums, rows.logprobs, rows.entropy, rows.kl)
        ctx.mark_non_differentiable(*statistics)
        return (loss, *statistics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        grads = (
            _scaled(grad, by, ctx.backend) if is_asked else None
            for grad, is_asked in zip(ctx.saved_tensors, ctx.asked, strict=True)
        )
        return _for_the_first(ctx, *grads)


@operator("linear_token_stats")
def linear_token_stats_op(
    projection: Projection,
    tokens: Tensor,
    softmax: Softmax,
    ref_projection: Projection | None,
    gemm: Gemm,
    backend: str,
) -> TokenStats:
    _check_tokens(tokens, projection.weight.shape[0])
    with _no_autocast(projection.hidden):
        return linear.token_stats(
            projection,
            tokens,
            softmax,
            rows=_rows(backend),
            ref_projection=ref_projection,
            gemm=gemm,
        )


@linear_token_stats_op.register_fake
def _(
    projection: Projection,
    tokens: Tensor,
    softmax: Softmax,
    ref_projection: Projection | None,
    gemm: Gemm,
    backend: str,
) -> TokenStats:
    return _empty_stats(tokens, accumulation_dtype(gemm.dtype or projection.hidden.dtype))


@operator("linear_token_stats_backward")
def linear_token_stats_backward_op(
    grads: StatsGradients,
    projection: Projection,
    tokens: Tensor,
    stats: TokenStats,
    softmax: Softmax,
    ref_projection: Projection | None,
    gemm: Gemm,
    asked: GradientsWanted,
    backend: str,
) -> ProjectionGradients:
    with _no_autocast(projection.hidden):
        return linear.token_stats_backward(
            grads,
            projection,
            tokens,
            stats,
            softmax,
            rows=_rows(backend),
            ref_projection=ref_projection,
            gemm=gemm,
            wanted=asked,
        )


@linear_token_stats_backward_op.register_fake
def _(
    grads: StatsGradients,
    projection: Projection,
    tokens: Tensor,
    stats: TokenStats,
    softmax: Softmax,
    ref_projection: Projection | None,
    gemm: Gemm,
    asked: GradientsWanted,
    backend: str,
) -> ProjectionGradients:
    return _empty_gradients(projection, asked)


class LinearTokenStatistics(torch.autograd.Function):
    """(logprobs, entropy, full KL), differentiable by hidden, weight, bias; backward forms the
    logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        softmax: Softmax,
        ref_projection: Projection | None,
        gemm: Gemm,
        asked: GradientsWanted,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        projection = Projection(hidden, weight, bias)
        stats = linear_token_stats_op(projection, tokens, softmax, ref_projection, gemm, backend)
        ref = ref_projection or Projection(None, None)  # type: ignore[arg-type]
        ctx.save_for_backward(*projection, *ref, tokens, softmax.temperatures, *stats)
        ctx.softmax, ctx.gemm = softmax._replace(temperatures=None), gemm
        ctx.asked, ctx.backend = asked, backend
        return stats.logprobs, stats.entropy, stats.kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ref_hidden, ref_weight, ref_bias, tokens, temperatures, *stats = (
            ctx.saved_tensors
        )
        grads = StatsGradients(*upstream)
        gradients = linear_token_stats_backward_op(
            grads if ref_hidden is not None else grads._replace(kl=None),
            Projection(hidden, weight, bias),
            tokens,
            TokenStats(*stats),
            ctx.softmax._replace(temperatures=temperatures),
            None if ref_hidden is None else Projection(ref_hidden, ref_weight, ref_bias),
            ctx.gemm,
            ctx.asked,
            ctx.backend,
        )
        asked = (
            grad if is_asked else None for grad, is_asked in zip(gradients, ctx.asked, strict=True)
        )
        return _for_the_first(ctx, *asked)


# -------------------------------------------------------------------------------------- advantages


@operator("gae")
def gae_op(trajectory: Trajectory, discounts: Discounts, backend: str) -> Gae:
    return _advantages(backend).gae(trajectory, discounts)


@gae_op.register_fake
def _(trajectory: Trajectory, discounts: Discounts, backend: str) -> Gae:
    return _empty_advantages(trajectory.token_values)


def _empty_advantages(values: Tensor) -> Gae:
    dtype = accumulation_dtype(values.dtype)
    return Gae(*(values.new_empty(values.shape, dtype=dtype) for _ in Gae._fields))


@operator("shaped_advantages")
def shaped_advantages_op(
    trajectory: Trajectory, shaping: Shaping, discounts: Discounts, backend: str
) -> Advantages:
    """Not yet whitened."""
    return _advantages(backend).shaped_advantages(trajectory, shaping, discounts)


@shaped_advantages_op.register_fake
def _(trajectory: Trajectory, shaping: Shaping, discounts: Discounts, backend: str) -> Advantages:
    estimates = _empty_advantages(trajectory.token_values)
    kl = estimates.returns.new_empty(shaping.scores.shape)
    return Advantages(*estimates, kl, kl.new_empty(3, dtype=torch.float64))


@operator("whiten")
def whiten_op(
    x: Tensor, mask: Tensor | None, moments: Tensor | None, shift_mean: bool, backend: str
) -> Tensor:
    return _advantages(backend).whiten(x, mask, shift_mean=shift_mean, moments=moments)


@whiten_op.register_fake
def _(
    x: Tensor, mask: Tensor | None, moments: Tensor | None, shift_mean: bool, backend: str
) -> Tensor:
    return x.new_empty(x.shape, dtype=accumulation_dtype(x.dtype))
