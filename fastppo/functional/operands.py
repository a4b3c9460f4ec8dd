"""Put the arguments that losses and statistics share into records.

The records of `fastppo_kernels.records` are flat: they have one entry per token, `[N]`, in the
accumulation dtype.
"""

from __future__ import annotations

import torch
from fastppo_kernels.records import (
    Gemm,
    GradientsWanted,
    Projection,
    Softmax,
    accumulation_dtype,
)
from torch import Tensor

from fastppo.functional.arguments import NUMBERS, check_positive, dtype_name, tensor
from fastppo.functional.scalars import at_least, finite


def rows_view(name: str, logits: Tensor) -> Tensor:
    """Check logits, and return them as [N, V], or as [B, T, V] where [N, V] would need a copy."""
    tensor(name, logits)
    if logits.dim() < 2:
        raise ValueError(f"{name} must be (..., V) with at least 2 axes, got {list(logits.shape)}")
    if logits.shape[-1] == 0:
        raise ValueError(f"{name} must have a vocabulary of at least 1, got {list(logits.shape)}")
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        raise ValueError(f"{name} must have a dense last axis, got strides {logits.stride()}")
    if logits.dim() == 2:
        return logits
    if logits.dim() == 3 and logits.stride(0) != logits.shape[1] * logits.stride(1):
        return logits
    return logits.reshape(-1, logits.shape[-1])


def token_ids(tokens: Tensor, shape: torch.Size, like: Tensor) -> Tensor:
    """Check tokens (...) int64, and return them as [N]."""
    tensor("tokens", tokens, shape=shape, like=like, dtypes=(torch.int64,))
    return tokens.reshape(-1)


def needs_gradient(x: Tensor | None) -> bool:
    """Return whether autograd records operations on a tensor."""
    return x is not None and x.requires_grad and torch.is_grad_enabled()


def softmax(
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    *,
    shape: torch.Size,
    like: Tensor,
    counted: Tensor | None = None,
) -> Softmax:
    """Check the arguments of the softmax.

    Args:
        shape: the shape of the tokens.
        like: the logits or hidden states.
        counted: bool, shaped like the tokens. Other tokens' temperatures may be anything.
    """
    at_least("logit_scale", logit_scale, 0.0, strictly=True)
    finite("logit_scale", logit_scale)
    if softcap is not None:
        finite("softcap", at_least("softcap", softcap, 0.0, strictly=True))
        softcap = float(softcap)
    if not isinstance(temperature, Tensor):
        finite("temperature", at_least("temperature", temperature, 0.0, strictly=True))
        return Softmax(float(temperature), None, float(logit_scale), softcap)
    temperature = temperature.detach()
    checked = temperature
    if temperature.dim() > 0:
        tensor("temperature", temperature, shape=shape, like=like, wants="one per token")
        if counted is not None:
            checked = torch.where(counted, temperature, 1)
    tensor("temperature", temperature, dtypes=NUMBERS)
    check_positive("temperature", checked)
    wide = accumulation_dtype(like.dtype)
    temperatures = temperature.to(like.device, wide).expand(shape).reshape(-1)
    return Softmax(1.0, temperatures, float(logit_scale), softcap)


def projection(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Projection:
    """Check the lm-head, and return it with the hidden states as [N, H]."""
    tensor("hidden", hidden)
    tensor("weight", weight, like=hidden)
    if hidden.dim() < 2:
        raise ValueError(f"hidden must be (..., H) with at least 2 axes, got {list(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight must be [V, H] with H = {hidden.shape[-1]} as in hidden, "
            f"got {list(weight.shape)}"
        )
    if bias is not None:
        tensor("bias", bias, shape=(weight.shape[0],), like=hidden)
    for name, part in (("weight", weight), ("bias", bias)):
        if part is not None and (part.dtype == torch.float64) != (hidden.dtype == torch.float64):
            raise ValueError(
                f"{name} and hidden must both be float64 or neither, got {name} in "
                f"{dtype_name(part.dtype)} and hidden in {dtype_name(hidden.dtype)}"
            )
    return Projection(hidden.reshape(-1, hidden.shape[-1]), weight, bias)


def gradients_wanted(parts: Projection) -> GradientsWanted:
    """Return which parts of a projection need a gradient."""
    hidden, weight, bias = (needs_gradient(part) for part in parts)
    return GradientsWanted(hidden, weight, bias)


def choose_gemm(chunk_size: int | None, hidden: Tensor) -> Gemm:
    """Check the chunk size, and choose the dtype of the GEMMs: that of autocast where it is on."""
    if chunk_size is not None:
        at_least("chunk_size", chunk_size, 1)
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    return Gemm(chunk_size, dtype)


def ref_projection(
    ref_hidden: Tensor | None,
    ref_weight: Tensor | None,
    ref_bias: Tensor | None,
    *,
    hidden: Tensor,
    weight: Tensor,
) -> Projection | None:
    """Check the reference's head, which may have any width H', and detach it."""
    if (ref_hidden is None) != (ref_weight is None):
        alone = "ref_hidden" if ref_weight is None else "ref_weight"
        raise ValueError(f"ref_hidden and ref_weight must be passed together, got only {alone}")
    if ref_bias is not None and ref_weight is None:
        raise ValueError("ref_bias needs ref_hidden and ref_weight, got None")
    if ref_hidden is None or ref_weight is None:
        return None
    tensor("ref_weight", ref_weight, like=hidden)
    if ref_weight.dim() != 2 or ref_weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"ref_weight must be [V, H'] with V = {weight.shape[0]}, got {list(ref_weight.shape)}"
        )
    expected_shape = (*hidden.shape[:-1], ref_weight.shape[1])
    tensor("ref_hidden", ref_hidden, shape=expected_shape, like=hidden)
    if ref_bias is not None:
        tensor("ref_bias", ref_bias, shape=(weight.shape[0],), like=hidden)
    return Projection(
        ref_hidden.detach().reshape(-1, ref_weight.shape[1]),
        ref_weight.detach(),
        None if ref_bias is None else ref_bias.detach(),
    )
