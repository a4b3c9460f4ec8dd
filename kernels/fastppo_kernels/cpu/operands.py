"""The operands of the CPU's loops: tensors as NumPy arrays, and records of numbers.

numba compiles a loop for the types of its operands. None has a type of its own there, so the code
for a soft-cap, a reference or a kept buffer is only compiled where there is one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastppo_kernels.cpu.threads import CLEARANCE
from fastppo_kernels.records import PerToken, Softmax

BLOCK = 2048
"""Columns that a sweep processes at once, 8 KiB in fp32, which fit in the L1 cache."""

LOOP_DTYPES = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.uint16,
}
"""The supported dtypes, and the dtypes as which the loops view them. numba has neither bf16 nor
fp16, and the loops tell the two apart by the sign of the integer."""

EMPTY = np.empty(0)
"""Stands for a missing operand."""


class Rows(NamedTuple):
    """[N, V] or [B, T, V]: row i starts at (i // inner)·outer_stride + (i % inner)·stride."""

    memory: Any
    vocab: int
    inner: int
    outer_stride: int
    stride: int


class SoftmaxOperand(NamedTuple):
    """The numbers of a `Softmax`.

    temperatures: [N], or empty.
    shifted_scale: divided by T, the factor of the shifted scores: the logit scale, or 1 with a
        soft-cap, which contains it.
    unit: the unit of the maximum in a `StatsRows`: the soft-cap, or 1.
    """

    temperature: float
    temperatures: Any
    logit_scale: float
    softcap: float | None
    shifted_scale: float
    unit: float


class Buffers(NamedTuple):
    """The buffers of a thread.

    logits: [BLOCK], a copy in the logits' dtype, since the gradient may overwrite them.
    scores: [2, BLOCK] fp32, the capped scores of policy and reference.
    exponentials: [V] fp32, e^t of a row for its gradient, or None.
    """

    logits: Any
    scores: Any
    exponentials: Any


def view_rows(x: Tensor | None, like: Tensor) -> Rows:
    """View [N, V] or [B, T, V] with a dense last axis, without a copy.

    None or an empty tensor gives rows without columns, in the dtype of `like`.
    """
    if x is None or not x.numel():
        return Rows(torch.empty(0, dtype=LOOP_DTYPES[like.dtype]).numpy(), 0, 1, 0, 0)
    x = x.detach() if x.dtype in LOOP_DTYPES else x.detach().float()  # a reference in fp64
    x = x.view(LOOP_DTYPES[x.dtype])
    outer, inner, vocab = (1, *x.shape) if x.dim() == 2 else x.shape
    outer_stride, stride = (0, x.stride(0)) if x.dim() == 2 else x.stride()[:2]
    size = (outer - 1) * outer_stride + (inner - 1) * stride + vocab
    return Rows(x.as_strided((size,), (1,)).numpy(), vocab, inner, outer_stride, stride)


def view_reference(x: Tensor | None, like: Tensor) -> Rows | None:
    """View the reference's logits, if there are any."""
    return None if x is None else view_rows(x, like)


def fp64_array(x: Tensor | None) -> Any:
    """Convert a tensor to an fp64 array; None gives an empty one."""
    return EMPTY if x is None else x.detach().double().contiguous().numpy()


def token_operands(per_token: PerToken) -> PerToken:
    """Convert the operands per token to arrays, fp64 except the tokens."""
    tokens, *numbers = per_token
    indices: Any = tokens.contiguous().numpy()
    return PerToken(indices, *[fp64_array(x) for x in numbers])


def softmax_operand(softmax: Softmax) -> SoftmaxOperand:
    """Convert a `Softmax` to numbers."""
    softcap = softmax.softcap
    return SoftmaxOperand(
        temperature=float(softmax.temperature),
        temperatures=fp64_array(softmax.temperatures),
        logit_scale=float(softmax.logit_scale),
        softcap=None if softcap is None else float(softcap),
        shifted_scale=float(softmax.logit_scale) if softcap is None else 1.0,
        unit=1.0 if softcap is None else float(softcap),
    )


def allocate_buffers(logits: Tensor, *, keeps_exponentials: bool = False) -> Buffers:
    """Allocate the buffers of a thread for rows like `logits`."""
    block = torch.empty(BLOCK, dtype=LOOP_DTYPES[logits.dtype])
    exponentials = None
    if keeps_exponentials:
        exponentials = np.empty(CLEARANCE + logits.shape[-1], np.float32)[CLEARANCE:]
    return Buffers(block.numpy(), np.empty((2, BLOCK), np.float32), exponentials)
