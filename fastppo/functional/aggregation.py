"""The weight of each token in a loss, `Σ w_t · token_loss_t`."""

from __future__ import annotations

import torch
from fastppo_kernels.records import accumulation_dtype
from torch import Tensor

from fastppo.functional.arguments import NUMBERS, check_positive, tensor
from fastppo.functional.scalars import at_least, choice, describe, finite

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum")


def aggregation_weights(
    mask: Tensor,
    aggregation: str = "token-mean",
    denominator: float | Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the weight w_t of each token, for `loss = Σ w_t · token_loss_t`.

    | aggregation           | w_t                  | default denominator D              |
    |-----------------------|----------------------|------------------------------------|
    | `token-mean`          | mask / D             | Σ mask                             |
    | `seq-mean-token-mean` | mask / (length · D)  | sequences with at least one token  |
    | `seq-mean-token-sum`  | mask / D             | sequences with at least one token  |
    | `token-sum`           | mask / D             | 1                                  |

    With the *global* denominator, over all microbatches and ranks, the loss does not depend on how
    the batch is split.

    Args:
        mask: (...) bool. The seq modes need (..., T), with sequences along the last axis.
        denominator: a number > 0 or a 0-d tensor, in place of the default.
        dtype: fp32, or fp64 for a loss in fp64, because 1/D in fp32 is off by 3e-8.

    Returns:
        Tensor (...) of `dtype`, 0 where masked, and all 0 if everything is masked.

    Raises:
        ValueError, TypeError: the mask is not bool, the aggregation is unknown, the denominator is
            not positive or not 0-d, or a seq mode gets no axis of sequences.
    """
    choice("aggregation", aggregation, AGGREGATIONS)
    tensor("mask", mask, dtypes=(torch.bool,))
    if isinstance(denominator, Tensor):
        tensor("denominator", denominator, shape=(), dtypes=NUMBERS)
        if denominator.device.type not in (mask.device.type, "cpu"):
            raise ValueError(
                f"denominator must be on {mask.device} like the mask, got {denominator.device}"
            )
        denominator = denominator.detach()
        check_positive("denominator", denominator)
    elif denominator is not None:
        finite("denominator", at_least("denominator", denominator, 0.0, strictly=True))
    weights = mask.to(dtype)
    by_sequence = aggregation.startswith("seq-")
    if by_sequence and mask.dim() < 2:
        raise ValueError(
            f"aggregation={aggregation!r} needs sequences along the last axis, (..., T), got mask "
            f"of shape {list(mask.shape)}; for a flat list of tokens pass `weights`"
        )
    lengths = weights.sum(-1, keepdim=True) if by_sequence else None
    if denominator is None:
        if lengths is not None:
            denominator = (lengths > 0).sum().clamp(min=1)
        else:
            denominator = weights.sum().clamp(min=1) if aggregation == "token-mean" else 1.0
    if aggregation == "seq-mean-token-mean":
        assert lengths is not None
        weights = weights / lengths.clamp(min=1)
    return weights / denominator


def token_weights(
    mask: Tensor | None,
    *,
    aggregation: str,
    denominator: float | Tensor | None,
    weights: Tensor | None,
    shape: torch.Size,
    like: Tensor,
) -> Tensor:
    """Check the arguments that weight tokens, and return their weights, 0 where masked.

    Args:
        shape: the shape of the tokens.
        like: the tensor whose accumulation dtype the weights have.
    """
    if mask is not None:
        tensor("mask", mask, shape=shape, like=like, dtypes=(torch.bool,))
    wide = accumulation_dtype(like.dtype)
    if weights is None:
        if mask is None:
            mask = torch.ones(shape, dtype=torch.bool, device=like.device)
        return aggregation_weights(mask, aggregation, denominator, dtype=wide)
    choice("aggregation", aggregation, AGGREGATIONS)
    if denominator is not None or aggregation != "token-mean":
        raise ValueError(
            "weights replace aggregation and denominator, which must be left out, got "
            f"aggregation={aggregation!r} and denominator={describe(denominator)}"
        )
    tensor("weights", weights, shape=shape, like=like)
    weights = weights.detach().to(wide)
    return weights if mask is None else torch.where(mask, weights, 0.0)
