"""The value loss, `Σ w·½(V − R)²`, with an optional clip range around the values of the rollout."""

from __future__ import annotations

from typing import Any

import torch
from fastppo_kernels.records import accumulation_dtype
from torch import Tensor

from fastppo.functional import arguments, scalars
from fastppo.functional.aggregation import token_weights


def value_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor | None = None,
    *,
    old_values: Tensor | None = None,
    clip_ratio: float | None = None,
    aggregation: str = "token-mean",
    denominator: float | Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return `Σ w·½(V − R)²`, or clipped `Σ w·½max((V−R)², (V_old + clip(V−V_old, ±c) − R)²)`.

    Args:
        values: (...), differentiable.
        returns: (...). No gradient.
        old_values: (...), the values of the rollout, for clipping.
        clip_ratio: c > 0, the clip range in units of the values. It needs `old_values`.
        mask, aggregation, denominator, weights: see `ppo_loss` and `aggregation_weights`.

    Returns:
        Tensor () fp32, differentiable in the values. It is half the value term of `total_loss`.

    Source: Schulman et al. 2017, eq. 9, which lacks the ½. The ½ and clipping: OpenAI baselines.
    """
    arguments.tensor("values", values)
    shape = values.shape
    arguments.tensor("returns", returns, shape=shape, like=values)
    weights = token_weights(
        mask,
        aggregation=aggregation,
        denominator=denominator,
        weights=weights,
        shape=shape,
        like=values,
    )
    if clip_ratio is not None:
        scalars.at_least("clip_ratio", clip_ratio, 0.0, strictly=True)
        if old_values is None:
            raise ValueError("clip_ratio needs old_values, the values of the rollout, got None")
        arguments.tensor("old_values", old_values, shape=shape, like=values)
        old_values = old_values.detach()
    loss, _ = ValueLossFunction.apply(values, returns.detach(), weights, old_values, clip_ratio)
    return loss


class ValueLossFunction(torch.autograd.Function):
    """Compute (Σ w·½(V − R)², the number of tokens with a clipped error), 0-d each.

    The first result is twice differentiable in the values. A token whose clipped error is the
    larger one has no derivative. Within the clip range both errors are equal. NaN counts as clipped
    and stays visible.
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
        wide = accumulation_dtype(values.dtype)
        wide_values = values.to(wide)
        wide_returns = returns.to(wide)
        weights = weights.to(wide)
        uncounted = weights == 0
        still = uncounted  # tokens without a derivative
        error = (wide_values - wide_returns).square()
        clipped_count = error.new_zeros(())
        if old_values is not None and clip_ratio is not None:
            old = old_values.to(wide)
            change = wide_values - old
            clipped_values = old + change.clamp(-clip_ratio, clip_ratio)
            clipped_error = (clipped_values - wide_returns).square()
            moves = (clipped_error <= error) | (change.abs() <= clip_ratio)
            error = torch.where(moves, error, clipped_error)
            still = uncounted | ~moves
            clipped_count = (still & ~uncounted).sum(dtype=wide)
        ctx.save_for_backward(values, returns, weights, still)
        ctx.mark_non_differentiable(clipped_count)
        # Masked entries may hold anything, and 0·NaN is not 0.
        return 0.5 * (weights * error).masked_fill_(uncounted, 0.0).sum(), clipped_count

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor, by_clipped_count: Tensor) -> tuple[Tensor | None, ...]:
        values, returns, weights, still = ctx.saved_tensors
        slope = values.to(weights.dtype) - returns.to(weights.dtype)
        grad = (weights * slope * by_loss).masked_fill_(still, 0.0)
        return grad.to(values.dtype), None, None, None, None
