"""Where a run computes, and in which precision its matrix products are formed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU if there is one.

    Raises:
        ValueError: no device of that name is there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda, cuda:1, …, got {name!r}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={name}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs here"
        )
    return device


def compute_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The dtype of the matrix products, or None for that of the weights.

    Args:
        precision: bf16, fp32, or auto: bf16 on a GPU.
    """
    if precision == "bf16" or (precision == "auto" and device.type == "cuda"):
        return torch.bfloat16
    return None


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager:
    """Matrix products in `dtype` on the device; None leaves them in the dtype of the weights."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def cast_frozen(trunk: nn.Module, dtype: torch.dtype | None) -> None:
    """Keeps the frozen matrices of linear layers in the dtype of their products.

    Autocast casts an fp32 weight anew in every call, at each decoding step; cast once, it gives the
    same bits and takes half of the memory. From then on the trunk runs under autocast alone.

    Args:
        dtype: None leaves everything as it is.
    """
    for module in trunk.modules():
        # GPT-2's Conv1D is a linear layer with its weight transposed.
        if dtype is not None and (
            isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        ):
            weight = module.weight
            if not weight.requires_grad and weight.dtype == torch.float32:
                weight.data = weight.data.to(dtype)
