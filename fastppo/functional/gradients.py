"""Autograd functions of the losses and of the tokens' statistics.

The forward pass of PPO's loss computes the gradient, and the backward pass scales it
(`PPOLossFunction`). The gradients of statistics depend on incoming gradients, so their backward
pass reads the logits again, or recomputes them.

An fp16 gradient must be multiplied by the loss scale before it is rounded, and the scale is known
only in the backward pass. `fastppo.functional.losses` therefore uses the statistics for fp16.
"""

from __future__ import annotations

from typing import Any

import torch
from fastppo_kernels.records import (
    Gemm,
    GradientsWanted,
    Projection,
    Softmax,
    StatsGradients,
    StatsRows,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastppo.functional import operators


class PPOLossFunction(torch.autograd.Function):
    """Return PPO's loss, whose gradients are already known.

    `gradients` has an entry for each of the `inputs`: a tensor, or None without a gradient. The
    inputs are the logits, or a projection's hidden states, weight and bias.
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
    """Return gradient·factor for a saved gradient and the 0-d gradient of the loss.

    In eager mode a factor of 1 costs no pass over memory: a CPU reads its value, and the Triton
    kernel checks it on the device. The saved buffer itself is returned (and scaled) only if
    autograd frees it after this call, since the receiver may add to it in place. With
    retain_graph=True it is copied. Only a private function of torch tells; copying always would
    double the gradient's memory.
    """
    if not torch.compiler.is_compiling():
        stays = torch._C._autograd._get_current_graph_task_keep_graph()
        if backend == "triton":
            scale_ = operators.row_functions_of(backend, gradient.dtype).scale_
            return scale_(gradient.clone() if stays else gradient, factor)
        if factor.device.type == "cpu":
            return gradient if factor.item() == 1.0 and not stays else gradient * factor
    # A 0-d factor would otherwise be rounded to the gradient's dtype before the product.
    wide = torch.promote_types(gradient.dtype, factor.dtype)
    return (gradient.to(wide) * factor).to(gradient.dtype)


class TokenStatisticsFunction(torch.autograd.Function):
    """Compute (logprobs, entropy, full KL), differentiable in the logits.

    The backward pass reads the logits again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        softmax: Softmax,
        ref_logits: Tensor | None,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        stats = operators.token_stats_op(
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
        grad = operators.token_stats_backward_op(
            grads=StatsGradients(by_logprobs, by_entropy, None if ref_logits is None else by_kl),
            logits=logits,
            tokens=tokens,
            stats=StatsRows(*stats),
            softmax=ctx.softmax._replace(temperatures=temperatures),
            ref_logits=ref_logits,
            backend=ctx.backend,
        )
        return grad, None, None, None, None


class LinearTokenStatisticsFunction(torch.autograd.Function):
    """Compute (logprobs, entropy, full KL), differentiable in hidden, weight and bias.

    The backward pass recomputes the logits.
    """

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
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        stats = operators.linear_token_stats_op(
            projection=Projection(hidden, weight, bias),
            tokens=tokens,
            softmax=softmax,
            ref_projection=ref_projection,
            gemm=gemm,
            backend=backend,
        )
        ref_hidden, ref_weight, ref_bias = ref_projection or (None, None, None)
        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            ref_hidden,
            ref_weight,
            ref_bias,
            tokens,
            softmax.temperatures,
            *stats,
        )
        ctx.softmax = softmax._replace(temperatures=None)
        ctx.gemm = gemm
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
        wanted = GradientsWanted(*ctx.needs_input_grad[:3])
        grads = operators.linear_token_stats_backward_op(
            grads=StatsGradients(by_logprobs, by_entropy, by_kl if has_ref else None),
            projection=Projection(hidden, weight, bias),
            tokens=tokens,
            stats=StatsRows(*stats),
            softmax=ctx.softmax._replace(temperatures=temperatures),
            ref_projection=Projection(ref_hidden, ref_weight, ref_bias) if has_ref else None,
            gemm=ctx.gemm,
            wanted=wanted,
            backend=ctx.backend,
        )
        return *operators.only_wanted(grads, wanted), None, None, None, None, None
