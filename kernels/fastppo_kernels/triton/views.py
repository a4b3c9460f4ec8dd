"""Rows of logits as the kernels see them: where a row lies, its tiles, and what a launch decides.

A program takes whole rows, a tile of places at a time. Rows begin on 16 bytes, where Triton can
prove it; or each begins as many elements behind such a boundary as its row of the gradient and of
the reference does, and places count from the boundary (`phased`: the row's ends are then taken with
a mask); or, where the tensors lie differently, a thread loads one element at a time.

A tile is as large as the loads that a thread issues before it needs the first: they must cover the
memory's latency. How many programs run at once follows from their registers, and where a row is
read twice from the cache that holds it in between.
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
    """[N, V] or [B, T, V], rows counted through B·T: row i begins at
    (i // inner)·outer_stride + (i % inner)·stride. [N, V] is one outer entry."""

    tensor: Any
    inner: Any
    outer_stride: Any
    stride: Any


class Cut(NamedTuple):
    """How a row is cut, compile-time constants of a kernel: places of a tile, threads of a program,
    elements of a thread's load, and whether places count from the boundary before the row."""

    block: Any
    lanes: Any
    vector: Any
    phased: Any


class Row(NamedTuple):
    """One row in a kernel: a pointer to place 0, the place of the first entry, that behind the last
    one."""

    entries: Any
    first: Any
    end: Any


# ---------------------------------------------------------------------------- one row of a tensor


@triton.jit
def row_start(view, index):
    """Where a row begins, in 64 bits."""
    outer = (index // view.inner).to(tl.int64)
    inner = (index % view.inner).to(tl.int64)
    return view.tensor + (outer * view.outer_stride + inner * view.stride)


@triton.jit
def row_at(view, index, vocab, cut):
    start = row_start(view, index)
    first = _elements_past_boundary(start, cut.vector) if cut.phased else 0
    return Row(_from_boundary(start, first, cut), first, first + vocab)


@triton.jit
def row_beside(row, view, index, cut):
    """The row of another tensor that lies as `row` does."""
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
    """The token's entry, NaN for one outside the vocabulary; read before the row's first sweep: the
    sweep's reductions join all threads, so no thread can have written the gradient in place yet."""
    known = (token >= 0) & (token < vocab)
    return tl.load(row_start(view, index) + token, known, other=float("nan")).to(tl.float32)


@triton.jit
def place_of(token, row, vocab):
    """The token's place in its row, in 32 bits; outside the row for one that is not there."""
    return row.first + tl.minimum(tl.maximum(token, -1), vocab).to(tl.int32)


# -------------------------------------------------------------------------------- tiles of a row

# A row is cut into whole tiles of `cut.block` places and what they leave: its end, and the
# beginning of a phased row. Those are taken by the part, with a mask. Where a row has −inf or NaN
# in it, all of it is.


@triton.constexpr_function
def part_of(block, vectors):
    """Places of a part of a tile of four vectors a thread; smaller tiles are not cut."""
    return block // 4 if block // 4 >= vectors else block


@triton.jit
def places_in_whole_tiles(end, PART: tl.constexpr, cut):
    """A phased row's first part goes before them."""
    return tl.maximum(end - (PART if cut.phased else 0), 0) // cut.block * cut.block


@triton.jit
def part_start(part, covered, PART: tl.constexpr, cut):
    """The first part of a phased row is its beginning; all others follow the whole tiles."""
    return part * PART + (tl.minimum(part, 1) if cut.phased else 1) * covered


@triton.jit
def load_whole(entries, start, softmax, cut, HINT: tl.constexpr):
    """(scores, slopes of the cap) of a tile inside the row."""
    if entries.dtype.element_ty == tl.bfloat16 and cut.vector > 1:
        # Two at a time: a bf16 is the upper half of its fp32, a shift or a mask away.
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
    """(scores, slopes) of a tile that the row does not fill, −inf outside it and at the place
    `left_out` if there is one."""
    columns = tl.arange(0, BLOCK)
    # A phased row shares its first and last 16 bytes with its neighbours: read, and not used.
    read = (columns // cut.vector * cut.vector if cut.phased else columns) < row.end - start
    x = tl.load(row.entries + start + columns, read, other=-float("inf"), eviction_policy=HINT)
    values, slope = capped(x.to(tl.float32), softmax)
    # A soft-cap turns the padding's −inf into −cap, a value like any other.
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


# ------------------------------------------------------------------------------ tiles and programs


VECTOR_BYTES = 16
"""The widest load of a thread."""

SINGLES_PER_VECTOR = 2
"""Loads of one element that stand in for a 16-byte load where a row of the logits and one of the
reference's or the gradient's lie differently against 16 bytes: with as many as a vector has
elements, their addresses alone would fill the registers."""

REGISTERS = 65536
"""Registers of a multiprocessor: with those of a thread, which the launch names, they say how many
programs run on it."""

CACHE_SHARE = 0.7
"""Share of the second-level cache for rows that wait for their second sweep."""

UNCUT = 2**31 - 1
"""The inner axis of [N, V]: more rows than there can be. As a value, and an odd one, so that both
layouts run one kernel; a constant makes ptxas spill in the longest tile on sm_80."""


def tile(program: Program, itemsize: int, *, singles: bool, halvings: int = 0) -> int:
    """Columns of a tile, read by the vector or in `singles`.

    With a reference a tile each of two rows is held, scores and shifted ones: two halvings of the
    tile fit the registers. A soft-cap's temporaries are one more.
    """
    width = SINGLES_PER_VECTOR if singles else VECTOR_BYTES // itemsize
    return 32 * program.num_warps * max(1, program.loads >> halvings) * width


def _program_count(device: torch.device, rows: int, held_bytes: int, program: Program) -> int:
    """Programs that run at once, while the `held_bytes` of each stay in the cache."""
    multiprocessors, cache = device_limits(device)
    assert program.registers is not None
    resident = REGISTERS // (32 * program.num_warps * program.registers)
    if held_bytes:
        resident = min(resident, int(CACHE_SHARE * cache) // (multiprocessors * held_bytes))
    return min(rows, multiprocessors * max(1, resident))


# ------------------------------------------------------------------------------------- a launch


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
    """Whether row i of each begins as many elements behind a vector's boundary, for every i."""
    if (a.tensor.data_ptr() - b.tensor.data_ptr()) % VECTOR_BYTES:
        return False
    if a.tensor.element_size() != b.tensor.element_size():
        return False
    rows = a.tensor.shape[:-1].numel()

    def offsets(view: RowsView) -> tuple[int, int]:
        return view.stride % width, view.outer_stride % width if rows > view.inner else 0

    # [N, V] and a dense [B, T, V] are the same rows.
    def is_flat(view: RowsView) -> bool:
        return rows <= view.inner or view.outer_stride == view.inner * view.stride

    if is_flat(a) and is_flat(b):
        return (a.stride - b.stride) % width == 0
    return a.inner == b.inner and offsets(a) == offsets(b)


class Launch(NamedTuple):
    """What every launch over rows of logits decides: views, grid, and the options of the launch."""

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
    """For a kernel that reads `logits` (and `ref_logits`) `sweeps` times and writes `grad`."""
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
    program = programs.of_rows(row_bytes, sweeps=sweeps)
    held_bytes = 0 if sweeps == 1 else row_bytes * rows_of_program
    cut = Cut(
        block=tl.constexpr(tile(program, itemsize, singles=singles, halvings=halvings)),
        lanes=tl.constexpr(32 * program.num_warps),
        vector=tl.constexpr(1 if singles else width),
        phased=tl.constexpr(is_off_16_bytes and lie_alike),
    )
    count = _program_count(logits.device, rows, held_bytes, program)
    # As many threads where 64 of them execute as one.
    program = program._replace(num_warps=32 * program.num_warps // target().warp_size)
    options = {"cut": cut, **launch_options(program, fp_fusion=True)}
    return Launch(**views, rows=rows, vocab=vocab, grid=(count,), options=options)
