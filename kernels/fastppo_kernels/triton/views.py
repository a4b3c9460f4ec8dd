"""Rows of logits in the kernels: their addresses and tiles, and the decisions of a launch.

A program takes whole rows, a tile at a time. If Triton can prove that rows start on 16 bytes, loads
are vectorized. If every row has the same offset from a 16-byte boundary as its row of the gradient
and of the reference, places count from the boundary (`phased`), and the ends of the row are masked.
Otherwise a thread loads one element at a time.

A tile is as large as the loads that a thread issues before it needs the first; they must cover the
memory's latency. The number of resident programs follows from their registers and, for rows that
are read twice, from the cache that holds them in between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastppo_kernels.records import Softmax
from fastppo_kernels.triton import programs
from fastppo_kernels.triton.jit import capped
from fastppo_kernels.triton.launch import device_limits, launch_options, target
from fastppo_kernels.triton.programs import Program


class RowsView(NamedTuple):
    """[N, V] or [B, T, V] with rows numbered along B·T.

    Row i starts at (i // inner)·outer_stride + (i % inner)·stride. [N, V] is one outer entry.
    """

    tensor: Any
    inner: Any
    outer_stride: Any
    stride: Any


class Cut(NamedTuple):
    """The tiling of a row, in compile-time constants of a kernel.

    block: places of a tile. lanes: threads of a program. vector: elements of a load.
    phased: places count from the boundary before the row.
    """

    block: Any
    lanes: Any
    vector: Any
    phased: Any


class Row(NamedTuple):
    """One row in a kernel: a pointer to place 0, the first place, the place after the last."""

    entries: Any
    first: Any
    end: Any


# ------------------------------------------------------------------------------------------- rows


@triton.jit
def row_start(view, index):
    """Return the pointer to a row, computed in 64 bits."""
    outer = (index // view.inner).to(tl.int64)
    inner = (index % view.inner).to(tl.int64)
    return view.tensor + (outer * view.outer_stride + inner * view.stride)


@triton.jit
def row_at(view, index, vocab, cut):
    start = row_start(view, index)
    first = _elements_past_boundary(start, cut.vector) if cut.phased else 0
    return Row(_from_boundary(start, first, cut), first, first + vocab)


@triton.jit
def same_row(row, view, index, cut):
    """Return the row of another tensor with the same alignment as `row`."""
    return Row(_from_boundary(row_start(view, index), row.first, cut), row.first, row.end)


@triton.jit
def _elements_past_boundary(start, VECTOR: tl.constexpr):
    width: tl.constexpr = start.dtype.element_ty.primitive_bitwidth // 8
    return ((start.to(tl.int64) // width) % VECTOR).to(tl.int32)


@triton.jit
def _from_boundary(start, first, cut):
    return tl.multiple_of(start - first, 16) if cut.phased else start


@triton.jit
def logit_at(view, index, token, vocab):
    """Load the token's logit; NaN for a token outside the vocabulary.

    It is read before the first sweep, whose reductions synchronize all threads: no thread can have
    written an in-place gradient yet.
    """
    known = (token >= 0) & (token < vocab)
    return tl.load(row_start(view, index) + token, known, other=float("nan")).to(tl.float32)


@triton.jit
def place_of(token, row, vocab):
    """Return the token's place in its row, in 32 bits; outside the row for an invalid token."""
    return row.first + tl.minimum(tl.maximum(token, -1), vocab).to(tl.int32)


# ------------------------------------------------------------------------------------------ tiles

# A row consists of whole tiles of `cut.block` places and a remainder: its end, and the start of a
# phased row. The remainder is processed in masked parts, and so is all of a row with −inf or NaN.


@triton.constexpr_function
def part_of(block, vectors):
    """Return the places of a part: a quarter of a tile of four or more vectors per thread."""
    return block // 4 if block // 4 >= vectors else block


@triton.jit
def places_in_whole_tiles(end, PART: tl.constexpr, cut):
    """Return the places in whole tiles, without a phased row's first part."""
    return tl.maximum(end - (PART if cut.phased else 0), 0) // cut.block * cut.block


@triton.jit
def part_start(part, covered, PART: tl.constexpr, cut):
    """Return the start of a part: 0 for a phased row's first, otherwise after the tiles."""
    return part * PART + (tl.minimum(part, 1) if cut.phased else 1) * covered


@triton.jit
def load_whole(entries, start, softmax, cut, HINT: tl.constexpr):
    """Return (scores, slopes of the cap) of a whole tile."""
    if entries.dtype.element_ty == tl.bfloat16 and cut.vector > 1:
        # Two at a time: a bf16 is the upper half of its fp32.
        words = tl.load(
            entries.to(tl.pointer_type(tl.int32)) + start // 2 + tl.arange(0, cut.block // 2),
            eviction_policy=HINT,
        )
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
        x = tl.reshape(tl.join(low, high), (cut.block,))
    else:
        x = tl.load(entries + start + tl.arange(0, cut.block), eviction_policy=HINT).to(tl.float32)
    return capped(x, softmax)


@triton.jit
def load_part(row, start, left_out, softmax, BLOCK: tl.constexpr, cut, HINT: tl.constexpr):
    """Return (scores, slopes) of a partial tile, −inf outside the row and at place `left_out`."""
    columns = tl.arange(0, BLOCK)
    # A phased row shares its first and last 16 bytes with its neighbors; they are read, not used.
    read = (columns // cut.vector * cut.vector if cut.phased else columns) < row.end - start
    x = tl.load(row.entries + start + columns, read, other=-float("inf"), eviction_policy=HINT)
    values, slope = capped(x.to(tl.float32), softmax)
    # A soft-cap turns the padding's −inf into −cap, an ordinary value.
    if cut.phased or softmax.softcap is not None:
        inside = (columns >= row.first - start) & (columns < row.end - start)
        if left_out is not None:
            inside = inside & (columns != left_out - start)
        values = tl.where(inside, values, -float("inf"))
    elif left_out is not None:
        values = tl.where(columns == left_out - start, -float("inf"), values)
    return values, slope


@triton.jit
def write_zeros(row, vocab, cut):
    BLOCK: tl.constexpr = part_of(cut.block, cut.lanes * cut.vector)
    entries = row.entries + row.first
    columns = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], entries.dtype.element_ty)
    for start in range(0, vocab, BLOCK):
        tl.store(entries + start + columns, zeros, start + columns < vocab)


# ------------------------------------------------------------------------------- sizes of programs


VECTOR_BYTES = 16
"""Bytes of a thread's widest load."""

SINGLES_PER_VECTOR = 2
"""Single-element loads that replace a 16-byte load if logits, reference and gradient differ in
alignment. With as many as a vector has elements, their addresses alone would fill the registers."""

REGISTERS = 65536
"""Registers of a multiprocessor. Divided by a program's, they give the resident programs."""

CACHE_SHARE = 0.7
"""Share of the L2 cache for rows between their two sweeps."""

UNCUT = 2**31 - 1
"""The inner axis of [N, V]: more rows than possible. It is an odd value, so that both layouts run
the same kernel; as a constant it makes ptxas spill in the longest tile on sm_80."""


def tile(program: Program, itemsize: int, *, singles: bool, halvings: int = 0) -> int:
    """Return the columns of a tile, read by vectors or in `singles`.

    With a reference, tiles of two rows and their shifted scores are live: two halvings make them
    fit the registers. A soft-cap's temporaries need one more.
    """
    width = SINGLES_PER_VECTOR if singles else VECTOR_BYTES // itemsize
    return 32 * program.num_warps * max(1, program.loads >> halvings) * width


def _program_count(device: torch.device, rows: int, held_bytes: int, program: Program) -> int:
    """Return the resident programs for which `held_bytes` each fit in the cache."""
    multiprocessors, cache = device_limits(device)
    assert program.registers is not None
    resident = REGISTERS // (32 * program.num_warps * program.registers)
    if held_bytes:
        resident = min(resident, int(CACHE_SHARE * cache) // (multiprocessors * held_bytes))
    return min(rows, multiprocessors * max(1, resident))


# --------------------------------------------------------------------------------------- launches


def view_of(x: Tensor | None) -> RowsView | None:
    if x is None:
        return None
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"logits must have a dense last axis, got strides {x.stride()}")
    if x.dim() == 2:
        return RowsView(x, UNCUT, 0, x.stride(0))
    if x.dim() == 3:
        return RowsView(x, max(1, x.shape[1]), x.stride(0), x.stride(1))
    raise ValueError(f"logits must be [N, V] or [B, T, V], got {list(x.shape)}")


def _lie_alike(a: RowsView, b: RowsView, width: int) -> bool:
    """Whether row i of both has the same offset from a vector's boundary, for every i."""
    if (a.tensor.data_ptr() - b.tensor.data_ptr()) % VECTOR_BYTES:
        return False
    if a.tensor.element_size() != b.tensor.element_size():
        return False
    rows = a.tensor.shape[:-1].numel()

    def offsets(view: RowsView) -> tuple[int, int]:
        return view.stride % width, view.outer_stride % width if rows > view.inner else 0

    # [N, V] and a dense [B, T, V] have the same rows.
    def is_flat(view: RowsView) -> bool:
        return rows <= view.inner or view.outer_stride == view.inner * view.stride

    if is_flat(a) and is_flat(b):
        return (a.stride - b.stride) % width == 0
    return a.inner == b.inner and offsets(a) == offsets(b)


class Launch(NamedTuple):
    """The decisions of a launch over rows of logits: views, grid and options."""

    logits: RowsView | None
    ref_logits: RowsView | None
    grad: RowsView | None
    rows: int
    vocab: int
    grid: tuple[int]
    options: dict[str, Any]


def launch_over(
    logits: Tensor,
    softmax: Softmax,
    ref_logits: Tensor | None = None,
    grad: Tensor | None = None,
    *,
    sweeps: int,
) -> Launch:
    """Plan a launch that reads `logits` (and `ref_logits`) `sweeps` times and writes `grad`."""
    rows = logits.shape[:-1].numel()
    vocab = logits.shape[-1]
    itemsize = logits.element_size()
    views = {"logits": view_of(logits), "ref_logits": view_of(ref_logits), "grad": view_of(grad)}
    present = [view for view in views.values() if view is not None]
    is_off_16_bytes = vocab % 16 != 0 or any(
        view.tensor.data_ptr() % 16 or view.outer_stride % 16 or view.stride % 16
        for view in present
    )
    width = VECTOR_BYTES // itemsize
    lie_alike = all(_lie_alike(view, present[0], width) for view in present)
    singles = is_off_16_bytes and not lie_alike
    row_bytes = vocab * itemsize
    rows_of_program = 1
    halvings = 0
    if ref_logits is not None:
        rows_of_program += 1
        halvings += 2
    if softmax.softcap is not None:
        halvings += 1
    program = programs.for_rows(row_bytes, sweeps=sweeps)
    held_bytes = 0 if sweeps == 1 else row_bytes * rows_of_program
    cut = Cut(
        block=tl.constexpr(tile(program, itemsize, singles=singles, halvings=halvings)),
        lanes=tl.constexpr(32 * program.num_warps),
        vector=tl.constexpr(1 if singles else width),
        phased=tl.constexpr(is_off_16_bytes and lie_alike),
    )
    count = _program_count(logits.device, rows, held_bytes, program)
    # The same number of threads on GPUs with 64 threads per warp.
    program = program._replace(num_warps=32 * program.num_warps // target().warp_size)
    options = {"cut": cut, **launch_options(program, fp_fusion=True)}
    return Launch(**views, rows=rows, vocab=vocab, grid=(count,), options=options)
