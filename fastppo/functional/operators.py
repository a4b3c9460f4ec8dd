"""Custom operators, their autograd functions, and the choice of backend.

The layer between the public functions and `fastppo_kernels`. Each operator is opaque to
`torch.compile` (a registered custom operator with a fake kernel, so `fullgraph=True` works) and
runs a backend. Operands arrive checked, one entry per token: `[N]`, in records; `record_operator`
flattens them for torch.

PPO's gradient is formed in the forward pass; the backward pass scales it by the incoming gradient.
fp16 is the exception: its loss scale is known in the backward pass only, and a gradient rounded to
fp16 before the scaling would underflow, so `fastppo.functional.losses` takes the statistics' path
there, from logits and from hidden states alike.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import torch
from fastppo_kernels import linear, torch_advantages, torch_rows
from fastppo_kernels.records import (
    SUMS,
    Advantages,
    Gae,
    Gemm,
    GradientsWanted,
    LinearPPORows,
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
    return importlib.import_module(f"fastppo_kernels.{backend}_rows")


def _advantages(backend: str) -> ModuleType:
    return importlib.import_module(f"fastppo_kernels.{backend}_advantages")


def _check_tokens(tokens: Tensor, vocabulary: int, weights: Tensor | None = None) -> None:
    """Refuses tokens outside the vocabulary where the check does not synchronise with a GPU.

    FASTPPO_CHECK_TOKENS=1 asks for it everywhere. Tokens of weight 0 may be anything.
    """
    if tokens.device.type == "cpu" or os.environ.get("FASTPPO_CHECK_TOKENS") == "1":
        arguments.check_tokens(tokens, vocabulary, weights)


# ------------------------------------------------------------------------------------- statistics


@operator("token_stats", like=torch_rows.token_stats)
def token_stats_op(backend: str, **operands: Any) -> TokenStats:
    _check_tokens(operands["tokens"], operands["logits"].shape[-1])
    return _rows(backend).token_stats(**operands)


@token_stats_op.register_fake
def _(logits: Tensor, tokens: Tensor) -> TokenStats:
    return _empty_stats(tokens, accumulation_dtype(logits.dtype))


def _empty_stats(tokens: Tensor, dtype: torch.dtype) -> TokenStats:
    columns = {name: tokens.new_empty(tokens.shape, dtype=dtype) for name in TokenStats._fields}
    for name in ("normalizer", "ref_normalizer"):
        columns[name] = tokens.new_empty((*tokens.shape, 2), dtype=dtype)
    return TokenStats(**columns)


@operator("token_stats_backward", like=torch_rows.token_stats_backward)
def token_stats_backward_op(backend: str, **operands: Any) -> Tensor:
    return _rows(backend).token_stats_backward(**operands)


@token_stats_backward_op.register_fake
def _(logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


class TokenStatisticsFunction(torch.autograd.Function):
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
        stats = token_stats_op(
            logits=logits, tokens=tokens, softmax=softmax, ref_logits=ref_logits, backend=backend
        )
        ctx.save_for_backward(logits, tokens, softmax.temperatures, ref_logits, *stats)
        ctx.softmax = softmax._replace(temperatures=None)
        ctx.backend = backend
        return stats.logprobs, stats.entropy, stats.kl

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, by_logprobs: Tensor, by_entropy: Tensor, by_kl: Tensor
    ) -> tuple[Tensor | None, ...]:
        logits, tokens, temperatures, ref_logits, *stats = ctx.saved_tensors
        grad = token_stats_backward_op(
            grads=StatsGradients(by_logprobs, by_entropy, None if ref_logits is None else by_kl),
            logits=logits,
            tokens=tokens,
            stats=TokenStats(*stats),
            softmax=ctx.softmax._replace(temperatures=temperatures),
            ref_logits=ref_logits,
            backend=ctx.backend,
        )
        return grad, None, None, None, None


# -------------------------------------------------------------------------------- loss from logits


@operator("ppo_loss", like=torch_rows.ppo_loss, without=("inplace",))
def ppo_loss_op(backend: str, **operands: Any) -> PPORows:
    per_token = operands["per_token"]
    _check_tokens(per_token.tokens, operands["logits"].shape[-1], per_token.weights)
    return _rows(backend).ppo_loss(**operands)


@ppo_loss_op.register_fake
def _(logits: Tensor, per_token: PerToken, need_grad: bool) -> PPORows:
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format) if need_grad else None
    return _empty_rows(per_token.tokens, logits.dtype)._replace(grad=grad)


def _empty_rows(tokens: Tensor, dtype: torch.dtype) -> PPORows:
    wide = accumulation_dtype(dtype)
    logprobs, entropy, kl = (tokens.new_empty(tokens.shape, dtype=wide) for _ in range(3))
    return PPORows(tokens.new_empty(len(SUMS), dtype=wide), logprobs, entropy, kl)


@operator(
    "ppo_loss_inplace", like=torch_rows.ppo_loss, without=("need_grad", "inplace"), mutates="logits"
)
def ppo_loss_inplace_op(backend: str, **operands: Any) -> PPORows:
    """The gradient is written over the logits, and is not among the results."""
    per_token = operands["per_token"]
    _check_tokens(per_token.tokens, operands["logits"].shape[-1], per_token.weights)
    return _rows(backend).ppo_loss(**operands, inplace=True)._replace(grad=None)


@ppo_loss_inplace_op.register_fake
def _(logits: Tensor, per_token: PerToken) -> PPORows:
    return _empty_rows(per_token.tokens, logits.dtype)


class PPOLossFunction(torch.autograd.Function):
    """PPO's loss, whose gradients by its `inputs` were formed together with it.

    `gradients` has an entry for each of the `inputs`, None where it has no gradient. Of logits, of
    a projection's hidden states, weight and bias, or of the tokens' statistics.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        gradients: tuple[Tensor | None, ...],
        backend: str,
        *inputs: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.backend = backend
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            None if gradient is None else _scaled(gradient, by_loss, ctx.backend)
            for gradient in ctx.saved_tensors
        ]
        return None, None, None, *gradients


def _scaled(gradient: Tensor, factor: Tensor, backend: str) -> Tensor:
    """gradient·factor for a gradient saved in the forward pass and the 0-d gradient of the loss.

    In eager mode a factor of exactly 1 costs no pass over memory: on a CPU its value is looked at,
    and the Triton kernel looks at it on the device. The saved buffer itself is handed out (and
    scaled) only where autograd frees it after this call: whoever receives it may add to it in
    place. Where it stays for another backward pass (retain_graph=True), it is copied. Whether it
    stays is known to a private function of torch alone; a copy in every case would double the
    memory of the gradient.
    """
    if not torch.compiler.is_compiling():
        stays = torch._C._autograd._get_current_graph_task_keep_graph()
        if backend == "triton":
            return _rows(backend).scale_(gradient.clone() if stays else gradient, factor)
        if factor.device.type == "cpu":
            return gradient if factor.item() == 1.0 and not stays else gradient * factor
    # Elsewhere a 0-d factor is rounded to the gradient's dtype before the product.
    wide = torch.promote_types(gradient.dtype, factor.dtype)
    return (gradient.to(wide) * factor).to(gradient.dtype)


# ------------------------------------------------------------------------------- the fused lm-head


@operator("linear_ppo_loss", like=linear.ppo_loss, without=("rows",))
def linear_ppo_loss_op(backend: str, **operands: Any) -> LinearPPORows:
    per_token = operands["per_token"]
    weight = operands["projection"].weight
    _check_tokens(per_token.tokens, weight.shape[0], per_token.weights)
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        operands["compact"] = False  # it takes a synchronisation, and a capture allows none
    return linear.ppo_loss(**operands, rows=_rows(backend))


@linear_ppo_loss_op.register_fake
def _(
    projection: Projection, per_token: PerToken, gemm: Gemm, wanted: GradientsWanted
) -> LinearPPORows:
    rows = _empty_rows(per_token.tokens, gemm.dtype or projection.hidden.dtype)
    grads = _empty_gradients(projection, wanted)
    return LinearPPORows(rows.sums, rows.logprobs, rows.entropy, rows.kl, grads)


def _empty_gradients(projection: Projection, wanted: GradientsWanted) -> ProjectionGradients:
    """Contiguous, whatever hidden states and weight are."""
    parts = [None if part is None else part.new_empty(part.shape) for part in projection]
    return only_wanted(ProjectionGradients(*parts), wanted)


def only_wanted(grads: ProjectionGradients, wanted: GradientsWanted) -> ProjectionGradients:
    """None in place of the others, for which an operator returns an empty tensor."""
    return ProjectionGradients(
        hidden=grads.hidden if wanted.hidden else None,
        weight=grads.weight if wanted.weight else None,
        bias=grads.bias if wanted.bias else None,
    )


@operator("linear_token_stats", like=linear.token_stats, without=("rows",))
def linear_token_stats_op(backend: str, **operands: Any) -> TokenStats:
    _check_tokens(operands["tokens"], operands["projection"].weight.shape[0])
    return linear.token_stats(**operands, rows=_rows(backend))


@linear_token_stats_op.register_fake
def _(projection: Projection, tokens: Tensor, gemm: Gemm) -> TokenStats:
    return _empty_stats(tokens, accumulation_dtype(gemm.dtype or projection.hidden.dtype))


@operator("linear_token_stats_backward", like=linear.token_stats_backward, without=("rows",))
def linear_token_stats_backward_op(backend: str, **operands: Any) -> ProjectionGradients:
    return linear.token_stats_backward(**operands, rows=_rows(backend))


@linear_token_stats_backward_op.register_fake
def _(projection: Projection, wanted: GradientsWanted) -> ProjectionGradients:
    return _empty_gradients(projection, wanted)


class LinearTokenStatisticsFunction(torch.autograd.Function):
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
        wanted: GradientsWanted,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        stats = linear_token_stats_op(
            projection=Projection(hidden, weight, bias),
            tokens=tokens,
            softmax=softmax,
            ref_projection=ref_projection,
            gemm=gemm,
            backend=backend,
        )
        ref = (None, None, None) if ref_projection is None else ref_projection
        ctx.save_for_backward(hidden, weight, bias, *ref, tokens, softmax.temperatures, *stats)
        ctx.softmax = softmax._replace(temperatures=None)
        ctx.gemm = gemm
        ctx.wanted = wanted
        ctx.backend = backend
        return stats.logprobs, stats.entropy, stats.kl

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, by_logprobs: Tensor, by_entropy: Tensor, by_kl: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ref_hidden, ref_weight, ref_bias, tokens, temperatures, *stats = (
            ctx.saved_tensors
        )
        has_ref = ref_hidden is not None
        grads = linear_token_stats_backward_op(
            grads=StatsGradients(by_logprobs, by_entropy, by_kl if has_ref else None),
            projection=Projection(hidden, weight, bias),
            tokens=tokens,
            stats=TokenStats(*stats),
            softmax=ctx.softmax._replace(temperatures=temperatures),
            ref_projection=Projection(ref_hidden, ref_weight, ref_bias) if has_ref else None,
            gemm=ctx.gemm,
            wanted=ctx.wanted,
            backend=ctx.backend,
        )
        return *only_wanted(grads, ctx.wanted), None, None, None, None, None, None


# -------------------------------------------------------------------------------------- advantages


@operator("gae", like=torch_advantages.gae)
def gae_op(backend: str, **operands: Any) -> Gae:
    return _advantages(backend).gae(**operands)


@gae_op.register_fake
def _(trajectory: Trajectory) -> Gae:
    return _empty_advantages(trajectory.token_values)


def _empty_advantages(values: Tensor) -> Gae:
    dtype = accumulation_dtype(values.dtype)
    return Gae(
        advantages=values.new_empty(values.shape, dtype=dtype),
        returns=values.new_empty(values.shape, dtype=dtype),
    )


@operator("shaped_advantages", like=torch_advantages.shaped_advantages)
def shaped_advantages_op(backend: str, **operands: Any) -> Advantages:
    """Not yet whitened."""
    return _advantages(backend).shaped_advantages(**operands)


@shaped_advantages_op.register_fake
def _(trajectory: Trajectory, shaping: Shaping) -> Advantages:
    estimates = _empty_advantages(trajectory.token_values)
    kl = estimates.returns.new_empty(shaping.scores.shape)
    return Advantages(*estimates, kl, kl.new_empty(3, dtype=torch.float64))


@operator("whiten", like=torch_advantages.whiten)
def whiten_op(backend: str, **operands: Any) -> Tensor:
    return _advantages(backend).whiten(**operands)


@whiten_op.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=accumulation_dtype(x.dtype))
