"""Logprob and entropy from hidden states and the lm-head in one kernel: no logits in memory.

The operation is `definition.linear_token_stats`, under the same name. A program takes a tile of
rows and one stretch of the vocabulary. It forms a tile of logits by a matrix product, accumulated
in fp32, and folds it into a running maximum m and, with t_j = (z_j − m)·c and c = 1/T, into

    mass   = Σ e^{t_j}                 moment = Σ e^{t_j}·t_j

one of each per row; when the maximum moves, every t_j moves by shift = (m_old − m_new)·c ≤ 0:

    mass ← mass·e^shift                moment ← (moment + shift·mass)·e^shift

No sum ever holds z itself, so an offset of the row costs no digits. The token's column is left
out of the sums and its logit is written down, by the one program that meets it. A second kernel
joins a row's stretches in a fixed order, adds the token after them, and writes

    logprob = t_y − log S              entropy = log S − moment/S

so the same bits come out every run; there are no atomics. The stretches are what fills a GPU when
there are few rows. Logits are rounded to the GEMMs' dtype before they are used, as they are when
they pass through memory: the policy's logprobs then have no other rounding here than in the loss,
and the ratio of a first update stays at 1.

Floor: 2·N·H·V FLOP; bytes are the operands' alone. The chunked path (`linear`) adds one write
and one read of the logits to a GEMM that is cuBLAS's. Which of the two is faster has not been
measured; `linear.in_one_kernel` decides it on paper.

No gradient, no reference distribution, no fp64.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastppo_kernels import records
from fastppo_kernels.jit import (
    FIRST_MAX,
    INTERPRETED,
    LN_2,
    LOG2_E,
    capped,
    log1p_below_one,
    row_scale,
    score_unit,
    shifted,
)
from fastppo_kernels.launch import check_dtype, current, dense, dense_record, device_limits
from fastppo_kernels.records import Projection, Softmax, TokenStats

ELSEWHERE = tl.constexpr(records.ELSEWHERE)


@triton.jit
def _rounded(z, dtype: tl.constexpr):
    """z rounded to `dtype`, in fp32.

    By itself a bf16 is rounded on the exponential unit, a sixteenth of a warp instruction a clock;
    two at a time on the integers' pipe, at four times the rate and half the instructions.
    """
    if dtype == tl.bfloat16 and not INTERPRETED:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xffff0000;
            }
            """,
            "=f,=f,f,f",
            [z],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return z.to(dtype).to(tl.float32)


@triton.jit
def _logits_tile(
    projection, rows, n, columns, vocab, width, hidden_stride, weight_stride,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_V] logits in fp32, rounded through the operands' dtype."""
    inner = tl.arange(0, BLOCK_H)
    # Rows and columns beyond the end read the last one: their results are dropped, and the loads
    # of the loop need no mask but that of its last step.
    row = tl.minimum(rows, n - 1).to(tl.int64)[:, None]
    x = projection.hidden + row * hidden_stride + inner[None, :]
    w = projection.weight + tl.minimum(columns, vocab - 1).to(tl.int64)[None, :] * weight_stride
    w += inner[:, None]
    z = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for start in range(0, width, BLOCK_H):
        within = start + inner < width
        a = tl.load(x + start, within[None, :], other=0.0)
        b = tl.load(w + start, within[:, None], other=0.0)
        if INTERPRETED:  # where a product of bf16 would be one of their bit patterns
            a, b = a.to(tl.float32), b.to(tl.float32)
        z = tl.dot(a, b, z, input_precision="ieee")
    if projection.bias is not None:
        b = tl.load(projection.bias + tl.minimum(columns, vocab - 1))
        z += b.to(tl.float32)[None, :]
    return _rounded(z, projection.hidden.dtype.element_ty)


@triton.jit(do_not_specialize=["n"])
def _linear_stats_kernel(
    projection, tokens, softmax, partial, token_logits,
    n, vocab, width, hidden_stride, weight_stride, stretch, row_tiles,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """(maximum, mass, moment) of a tile of rows over one stretch, to partial [3, stretches, N].

    Programs that run side by side share tiles: GROUP tiles of rows against the same columns.
    """
    program = tl.program_id(0)
    stretches = tl.cdiv(vocab, stretch)
    group = program // (GROUP * stretches)
    in_group = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = program % (GROUP * stretches)
    row_tile = group * GROUP + within % in_group
    split = within // in_group

    rows = row_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.load(tokens + rows, rows < n, other=-1)
    token = tl.minimum(tl.maximum(token, -1), vocab).to(tl.int32)
    scale, _slope = row_scale(tl.minimum(rows, n - 1), softmax)
    scale2 = tl.zeros([BLOCK_N], tl.float32) + scale * LOG2_E
    row_max = tl.full([BLOCK_N], FIRST_MAX, tl.float32)
    mass = tl.zeros([BLOCK_N], tl.float32)
    moment = tl.zeros([BLOCK_N], tl.float32)
    at_token = tl.zeros([BLOCK_N], tl.float32)
    first = split * stretch
    last = tl.minimum(first + stretch, vocab)
    for start in range(first, last, BLOCK_V):
        columns = start + tl.arange(0, BLOCK_V)
        z = _logits_tile(
            projection, rows, n, columns, vocab, width, hidden_stride, weight_stride,
            BLOCK_N, BLOCK_V, BLOCK_H,
        )  # fmt: skip
        z, _cap_slope = capped(z, softmax)
        is_token = columns[None, :] == token[:, None]
        at_token += tl.sum(tl.where(is_token, z, 0.0), 1)
        z = tl.where(is_token | (columns >= last)[None, :], -float("inf"), z)
        new_max = tl.maximum(row_max, tl.max(z, 1))
        shift = shifted(row_max, new_max, scale2)
        decay = tl.exp2(shift)
        t = shifted(z, new_max[:, None], scale2[:, None])
        e = tl.exp2(t)
        moment = (moment + shift * mass) * decay + tl.sum(e * t, 1)
        mass = mass * decay + tl.sum(e, 1)
        row_max = new_max
    stored = rows < n
    entries = partial + split.to(tl.int64) * n + rows
    plane = stretches.to(tl.int64) * n
    tl.store(entries, row_max, stored)
    tl.store(entries + plane, mass, stored)
    tl.store(entries + 2 * plane, moment, stored)
    tl.store(token_logits + rows, at_token, stored & (token >= first) & (token < last))


@triton.jit(do_not_specialize=["n", "stretches"])
def _join_stats_kernel(
    partial, token_logits, tokens, softmax, stats, n, stretches, BLOCK_N: tl.constexpr
):
    """A row's stretches become one, in their order; then the token joins the others."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    stored = rows < n
    scale, _slope = row_scale(tl.minimum(rows, n - 1), softmax)
    scale = tl.zeros([BLOCK_N], tl.float32) + scale
    scale2 = scale * LOG2_E
    row_max = tl.full([BLOCK_N], FIRST_MAX, tl.float32)
    mass = tl.zeros([BLOCK_N], tl.float32)
    moment = tl.zeros([BLOCK_N], tl.float32)
    plane = tl.cast(stretches, tl.int64) * n
    for split in range(0, stretches):
        entries = partial + tl.cast(split, tl.int64) * n + rows
        part_max = tl.load(entries, stored, other=0.0)
        part_mass = tl.load(entries + plane, stored, other=0.0)
        part_moment = tl.load(entries + 2 * plane, stored, other=0.0)
        new_max = tl.maximum(row_max, part_max, propagate_nan=tl.PropagateNan.ALL)
        shift = shifted(row_max, new_max, scale2)
        part_shift = shifted(part_max, new_max, scale2)
        moment = (moment + shift * mass) * tl.exp2(shift)
        moment += (part_moment + part_shift * part_mass) * tl.exp2(part_shift)
        mass = mass * tl.exp2(shift) + part_mass * tl.exp2(part_shift)
        row_max = new_max

    token_logit = tl.load(token_logits + rows, stored, other=0.0)
    elsewhere = tl.load(tokens + rows, stored, other=0) == ELSEWHERE
    token_logit = tl.where(elsewhere, -float("inf"), token_logit)
    top = tl.maximum(row_max, token_logit, propagate_nan=tl.PropagateNan.ALL)
    shift = shifted(row_max, top, scale2)
    others = mass * tl.exp2(shift)
    moment = (moment + shift * mass) * tl.exp2(shift)
    token_shifted = shifted(token_logit, top, scale2)
    e_token = tl.exp2(token_shifted)
    total = others + e_token
    mean_shifted = (moment + e_token * token_shifted) * LN_2 / total
    # A row of −inf alone is no distribution.
    log_total = tl.where(total > 0, tl.log(total), float("nan"))
    token_shifted = shifted(token_logit, top, scale)
    # Above ½ from the others' share, which keeps digits that log S near 0 does not have.
    likely = e_token > others
    logprob = tl.where(
        likely,
        -log1p_below_one(others / tl.where(likely, e_token, 1.0)),
        token_shifted - log_total,
    )
    log_sum = tl.where(likely, token_shifted - logprob, log_total)
    tl.store(stats.logprobs + rows, logprob, stored)
    tl.store(stats.entropy + rows, log_sum - mean_shifted, stored)
    tl.store(stats.p_others + rows, others / total, stored)
    log_sum = tl.where(total == 0, -float("inf"), log_sum)
    tl.store(stats.normalizer + 2 * rows.to(tl.int64), top * score_unit(softmax), stored)
    tl.store(stats.normalizer + 2 * rows.to(tl.int64) + 1, log_sum, stored)


# -------------------------------------------------------------------------------------- launcher


class Tile(NamedTuple):
    """A program's tile of the product [N, H] × [H, V]: rows, columns, and the step over H."""

    block_n: int
    block_v: int
    block_h: int
    num_warps: int
    num_stages: int


# The logits' tile stays in registers while it is folded, beside its shifted scores and their
# exponentials: 128 columns of fp32 are what eight warps can hold three times, with one program on a
# multiprocessor (at 128 registers a thread, for two, it spills). Four stages of 16-bit operands are
# 128 KiB of shared memory. Operands that do not lie on 16 bytes are loaded by the element, whose
# addresses need the registers.
HALF_TILE = Tile(block_n=128, block_v=128, block_h=64, num_warps=8, num_stages=4)
# A soft-cap's temporaries beside it are too many: sm_100 spilled 32 bytes.
CAPPED_TILE = HALF_TILE._replace(block_v=64)
FLOAT_TILE = Tile(block_n=64, block_v=64, block_h=32, num_warps=4, num_stages=2)
# Here sm_80 spilled 16 bytes, under Triton 3.6.
CAPPED_FLOAT_TILE = FLOAT_TILE._replace(block_v=32)
UNALIGNED_TILE = Tile(block_n=64, block_v=64, block_h=16, num_warps=4, num_stages=2)


def tile(hidden: Tensor, weight: Tensor, softmax: Softmax) -> Tile:
    """The tile for [N, H] × [V, H]: Triton proves an alignment where 16 divides the argument."""
    for x in (hidden, weight):
        if x.data_ptr() % 16 or x.stride(0) % 16 or x.shape[1] % 16:
            return UNALIGNED_TILE
    if hidden.dtype == torch.float32:
        return FLOAT_TILE if softmax.softcap is None else CAPPED_FLOAT_TILE
    return HALF_TILE if softmax.softcap is None else CAPPED_TILE


GROUP_TILES = 8
"""Tiles of rows that run side by side against the same columns, so that both operands are read from
the second-level cache: 8·128 rows and as many columns as are left of the multiprocessors."""

JOIN_BLOCK = 128


@functools.lru_cache
def _stretch(row_tiles: int, column_tiles: int, block_v: int, multiprocessors: int) -> int:
    """Columns of a stretch: as many stretches as fill the GPU beside a group of tiles of rows."""
    wanted = max(1, multiprocessors // min(row_tiles, GROUP_TILES))
    return triton.cdiv(column_tiles, min(wanted, column_tiles)) * block_v


def linear_token_stats(
    projection: Projection,
    tokens: Tensor,
    softmax: Softmax,
    *,
    compute_dtype: torch.dtype | None = None,
) -> TokenStats:
    """`definition.linear_token_stats` without a reference, in one kernel and a small one.

    Args:
        projection: bf16, fp16 or fp32, dense last axes.
        tokens: [N] int64, or ELSEWHERE; any other outside the vocabulary gives NaN and no stray
            read.

    Returns:
        TokenStats, fp32; kl and ref_normalizer are 0.

    Raises:
        ValueError: fp64; an operand without a dense last axis.
    """
    dtype = compute_dtype or projection.hidden.dtype
    hidden, weight = projection.hidden.to(dtype), projection.weight.to(dtype)
    bias = None if projection.bias is None else dense(projection.bias.to(dtype))
    check_dtype("hidden", hidden)
    for name, x in (("hidden", hidden), ("weight", weight)):
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"{name} must have a dense last axis, got strides {x.stride()}")
    n, vocab = hidden.shape[0], weight.shape[0]
    logprobs, entropy, p_others = (hidden.new_empty(n, dtype=torch.float32) for _ in range(3))
    normalizer = hidden.new_empty((n, 2), dtype=torch.float32)
    kl, mean_gap, ref_normalizer = map(torch.zeros_like, (entropy, entropy, normalizer))
    stats = TokenStats(logprobs, entropy, kl, p_others, mean_gap, normalizer, ref_normalizer)
    if n == 0:
        return stats
    blocks = tile(hidden, weight, softmax)
    row_tiles = triton.cdiv(n, blocks.block_n)
    multiprocessors, _ = device_limits(hidden.device)
    stretch = _stretch(
        row_tiles, triton.cdiv(vocab, blocks.block_v), blocks.block_v, multiprocessors
    )
    stretches = triton.cdiv(vocab, stretch)
    partial = hidden.new_empty((3, stretches, n), dtype=torch.float32)
    token_logits = hidden.new_full((n,), math.nan, dtype=torch.float32)
    softmax = dense_record(softmax)
    with current(hidden.device):
        _linear_stats_kernel[(row_tiles * stretches,)](
            Projection(hidden, weight, bias),
            dense(tokens),
            softmax,
            partial,
            token_logits,
            n,
            vocab,
            hidden.shape[1],
            hidden.stride(0),
            weight.stride(0),
            stretch,
            row_tiles,
            BLOCK_N=blocks.block_n,
            BLOCK_V=blocks.block_v,
            BLOCK_H=blocks.block_h,
            GROUP=GROUP_TILES,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            enable_fp_fusion=True,
        )
        _join_stats_kernel[(triton.cdiv(n, JOIN_BLOCK),)](
            partial,
            token_logits,
            dense(tokens),
            softmax,
            stats,
            n,
            stretches,
            BLOCK_N=JOIN_BLOCK,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return stats
