"""Check single arguments of the public functions: tensors and the backend.

Wrong input raises an error before any work starts, with the argument's name, the value found and
the value expected. `scalars` checks numbers and choices. `operands` and `loss_operands` put the
checked arguments into the records of `fastppo_kernels.records`, and nothing is checked again after
that.
"""

from __future__ import annotations

import importlib.util
import math
import os

import torch
from torch import Tensor

from fastppo.functional.scalars import choice

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUMBERS = (*FLOATS, torch.int32, torch.int64)
HAS_TRITON = importlib.util.find_spec("triton") is not None
BACKENDS = ("auto", "triton", "cpu", "torch")
POSITIVE_LOGPROB = 0.1
"""Nats, above the rounding of bf16 logits around 30: 30 · 2⁻⁹."""


def tensor(
    name: str,
    value: object,
    *,
    shape: torch.Size | tuple[int, ...] | None = None,
    like: Tensor | None = None,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    wants: str = "",
) -> Tensor:
    """Check a tensor's shape, device and dtype, and return it.

    Args:
        like: a tensor on the expected device.
        dtypes: the allowed dtypes.
        wants: what the shape means, for the message.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if hasattr(value, "full_tensor"):
        # The local part would be read. `full_tensor()` alone treats its gradient as replicated:
        # each rank would keep only its own rows' part of the sum.
        raise TypeError(
            f"{name} must be a plain tensor, got a DTensor, of which each rank holds a part: "
            "call the loss inside the wrapped model's forward, where FSDP has gathered it, or "
            f"gather it with {name}.full_tensor(grad_placements=[Partial()]) (Partial from "
            "torch.distributed.tensor: the gradient is the sum over the ranks)"
        )
    if value.dtype not in dtypes:
        expected = ", ".join(dtype_name(dtype) for dtype in dtypes)
        hint = f": use {name}.bool()" if dtypes == (torch.bool,) else ""
        raise ValueError(f"{name} must be {expected}, got {dtype_name(value.dtype)}{hint}")
    if shape is not None and value.shape != torch.Size(shape):
        raise ValueError(
            f"{name} must have shape {list(shape)}{wants and f' ({wants})'}, "
            f"got {list(value.shape)}"
        )
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {value.device}")
    return value


def check_positive(name: str, x: Tensor) -> None:
    """Check that values are finite and > 0, if reading them is free."""
    if values_are_free(x):
        least = x.min().item()
        most = x.max().item()
        if not 0 < least <= most < math.inf:
            raise ValueError(f"{name} must be finite and > 0, got values from {least} to {most}")


def values_are_checked() -> bool:
    """Return whether FASTPPO_CHECK_VALUES=1 asks for checks that wait for a GPU to read values.

    They are off by default on CPUs too, because the trainer skips and counts steps with NaN.
    """
    return os.environ.get("FASTPPO_CHECK_VALUES") == "1" and not torch.compiler.is_compiling()


def check_values(name: str, x: Tensor, counted: Tensor | None = None) -> None:
    """Raise ValueError for NaN, and for a positive one of `…logprobs`, if FASTPPO_CHECK_VALUES=1.

    Args:
        counted: bool, shaped like x. Values where it is False may be anything.
    """
    if not values_are_checked():
        return
    bad = ~(x <= POSITIVE_LOGPROB) if name.endswith("logprobs") else x.isnan()
    places = (bad if counted is None else bad & counted).nonzero().tolist()
    if places:
        value = x[tuple(places[0])].item()
        wants = "numbers" if math.isnan(value) else "logprobs, ≤ 0"
        raise ValueError(f"{name} must be {wants}, got {value:g} at {places[0]}")


def values_are_free(x: Tensor) -> bool:
    """Return whether reading values neither waits for a GPU nor breaks a graph of torch.compile."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and x.numel() > 0


def check_tokens(tokens: Tensor, vocabulary: int, weights: Tensor | None = None) -> None:
    """Check that tokens of non-zero weight are in [0, vocabulary). It reads the tensor's values."""
    if tokens.numel() == 0:
        return
    least, most = (int(end) for end in tokens.aminmax())
    if least >= 0 and most < vocabulary:
        return
    if weights is not None:
        check_tokens(tokens[weights != 0], vocabulary)
        return
    raise ValueError(f"tokens must be in [0, {vocabulary}), got values from {least} to {most}")


def check_cu_seqlens(cu_seqlens: Tensor, count: int, *, like: Tensor) -> None:
    """Check the starts [B + 1] of the sequences in `count` packed tokens."""
    tensor("cu_seqlens", cu_seqlens, like=like, dtypes=(torch.int32, torch.int64))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must be [B + 1], got {list(cu_seqlens.shape)}")
    if values_are_free(cu_seqlens):
        begins_at_0 = int(cu_seqlens[0]) == 0
        ends_at_total = int(cu_seqlens[-1]) == count
        if not (begins_at_0 and ends_at_total and bool((cu_seqlens.diff() >= 0).all())):
            raise ValueError(
                f"cu_seqlens must rise from 0 to {count}, the number of packed tokens, "
                f"got {cu_seqlens.tolist()}"
            )


def choose_backend(backend: str, x: Tensor) -> str:
    """Return the backend for `x`: "triton", "cpu" or "torch".

    The Triton kernels compile for AMD GPUs, but have not been run there: "auto" chooses "torch" on
    such a GPU, and "triton" must be requested.

    Raises:
        ValueError: "triton" was requested for fp64, or for CPU tensors without the interpreter, or
            "cpu" for tensors on another device.
    """
    choice("backend", backend, BACKENDS)
    if backend == "auto":
        # Tensors on an AMD GPU are "cuda" too.
        is_nvidia = x.is_cuda and torch.version.hip is None
        runs = is_nvidia and x.dtype != torch.float64
        if runs and HAS_TRITON:
            return "triton"
        return "cpu" if x.device.type == "cpu" else "torch"
    if backend == "cpu" and x.device.type != "cpu":
        raise ValueError(f"backend='cpu' needs tensors on the CPU, got {x.device}; use 'auto'")
    if backend == "triton":
        if x.dtype == torch.float64:
            raise ValueError(
                "backend='triton' computes in fp32, got float64; use 'auto' or 'torch'"
            )
        if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"backend='triton' needs CUDA tensors, got {x.device}; for Triton's (slow) "
                "interpreter set TRITON_INTERPRET=1 before the first import of triton"
            )
    return backend


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the module: `float32`."""
    return str(dtype).removeprefix("torch.")
