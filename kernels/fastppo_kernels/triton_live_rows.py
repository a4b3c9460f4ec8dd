"""The lm-head's gradients over the rows that have one, whose number only the device knows.

A row of G = dL/dZ [N, V] is exactly zero where its token is clipped, masked or has no advantage,
with no entropy or KL term. Leaving such rows out of dX = G W and dW = Gᵀ X saves their share of
4·N·H·V FLOP, but the host must not wait to learn how many there are. So, with L of N rows alive:

    order       rows that are alive behind row L change places with the zeros before it, the first
                with the first: at a dead share f those are f·(1 − f)·N rows if any may be dead,
                min(f, 1 − f)·N at most, and no more move. `order` [N] is its own inverse.
    G' = G[order]           in place, for the first L rows: one program a row, no row that one
                            program writes is read by another
    X' = X[order]
    dX' = G'[:L] W, dW = G'[:L]ᵀ X'[:L]
                            by `torch.nn.functional.grouped_mm` with one group, which reads L where
                            it lies
    dX = dX'[order]         and 0 where nothing is alive

Bytes besides the GEMMs' operands: 2·b·V for a row that moves, b bytes per logit, and 8·N·H·b. No
value reaches the host, and L and `order` fix the order of every sum: the same bits every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastppo_kernels.launch import current, device_limits
from fastppo_kernels.triton_rows import VECTOR_BYTES

MOVE_BLOCK, MOVE_WARPS, MOVE_PROGRAMS = 8192, 8, 6
"""Columns a time, warps of a program, programs of a multiprocessor: four 16-byte loads a thread in
bf16, 96 kB in flight on a multiprocessor."""

COUNTS = ((9, 0), (10, 0))
"""Compute capabilities of the GPUs on which `grouped_mm` reads the number of rows where it lies."""


class LiveRows(NamedTuple):
    """Where the rows with a gradient stand: alive [N] bool; order [N] int64; number [1] int32, at
    least 1."""

    alive: Tensor
    order: Tensor
    number: Tensor


def live_rows(alive: Tensor) -> LiveRows:
    """The order that brings the rows of `alive` [N] bool to the front, and their number.

    Where no row is alive one counts all the same: CUTLASS's groups are not empty.
    """
    place = torch.arange(len(alive), device=alive.device)
    count = alive.sum()
    ahead = place < count
    dead, late = ahead & ~alive, alive & ~ahead  # as many of one as of the other
    order = torch.where(dead, _in_turn(dead, late), torch.where(late, _in_turn(late, dead), place))
    return LiveRows(alive, order, count.clamp(min=1).to(torch.int32).reshape(1))


def _in_turn(rows: Tensor, others: Tensor) -> Tensor:
    """For the k-th of `rows` [N] bool the index of the k-th of `others`; elsewhere any index."""
    indices = others.to(torch.uint8).argsort(descending=True, stable=True)
    return indices[(rows.cumsum(0) - 1).clamp(min=0)]


def serves(head: Tensor) -> bool:
    """Whether `grouped_mm` multiplies a gradient [N, V] and this head [V, H] unknown to the host.

    It takes bf16, and rows that begin on 16 bytes. Other GPUs fetch the number of rows.
    """
    width, address = head.shape[1] * head.element_size(), head.data_ptr()
    if head.dtype != torch.bfloat16 or not head.is_contiguous():
        return False
    if width % VECTOR_BYTES or address % VECTOR_BYTES:
        return False
    return not head.is_cuda or torch.cuda.get_device_capability(head.device) in COUNTS


def bring_forward(grad: Tensor, rows: LiveRows) -> None:
    """grad[i] = grad[order[i]] for the first rows of [N, V], in place; the others are left.

    Rows are copied by whole vectors: what lies between two of them may be written.
    """
    n, vocab = grad.shape
    multiprocessors, _ = device_limits(grad.device)
    with current(grad.device):
        _bring_forward_kernel[(min(n, MOVE_PROGRAMS * multiprocessors),)](
            grad,
            rows.order,
            rows.number,
            grad.stride(0),
            vocab,
            BLOCK_V=MOVE_BLOCK,
            VEC=VECTOR_BYTES // grad.element_size(),
            num_warps=MOVE_WARPS,
        )


def hidden_gradient(grad: Tensor, head: Tensor, rows: LiveRows) -> Tensor:
    """dX [N, H] of G', already brought forward, and the head [V, H]."""
    product = torch.nn.functional.grouped_mm(grad, head[None], offs=rows.number)[rows.order]
    # Rows of the product behind the last that is alive are not written: they hold anything.
    return product.masked_fill_(~rows.alive.unsqueeze(-1), 0.0)


def weight_gradient(grad: Tensor, x: Tensor, rows: LiveRows) -> Tensor:
    """dW [V, H] of G', already brought forward, and the hidden states X [N, H] as they are.

    Of X the rows without a gradient are not read; where none has one the first is, and is finite.
    """
    return torch.nn.functional.grouped_mm(grad.T, x[rows.order], offs=rows.number)[0]


@triton.jit
def _bring_forward_kernel(
    grad, order, count, stride, vocab,
    BLOCK_V: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Rows program_id, program_id + num_programs, … of those that are to be in front."""
    columns = tl.arange(0, BLOCK_V)
    for row in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        source = tl.load(order + row)
        if source != row:
            into = grad + row * stride.to(tl.int64)
            from_row = grad + source * stride
            for start in range(0, vocab, BLOCK_V):
                whole = (columns // VEC * VEC) < vocab - start
                tl.store(into + start + columns, tl.load(from_row + start + columns, whole), whole)
