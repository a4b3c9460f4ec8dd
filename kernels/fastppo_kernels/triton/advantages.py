"""Generalized advantage estimation, reward shaping and whitening as Triton kernels.

For the valid tokens of a sequence, with "next" the next *valid* token,

    A_t = r_t − V_t + U_next,   U_next = γ·V_next + γλ·A_next      (what the future contributes)

Substituting A_t in U_t = γ·V_t + γλ·A_t gives one first-order linear recurrence without δ and
V_next:

    U_t = γλ · U_next + γ·((1−λ)·V_t + λ·r_t)

A token is thus the affine map U ↦ a·U + b with a = γλ and b = γ((1−λ)V_t + λr_t). A masked token is
the identity (1, 0), so gaps need no search for the next valid token. The last token is followed by
U = γ·bootstrap + score, whichever token is the last valid one. Composition of maps is associative:
a block of tokens is scanned in parallel, its composite map carries U to the block before it, and
A_t = r_t − V_t + (the composite of the later tokens)(U).

Chunks. Every sequence is divided, from its first token, into chunks of 32 blocks of 256 tokens
(`programs.TABLE`), one program per chunk, in every layout. Packed rows and right-padded rows give
the same bits: division and order of every sum depend only on the position in the sequence, and
tokens after its end are the identity. A packed batch numbers its chunks without a scan over the
lengths: those of sequence i start at slot ⌊cu_seqlens[i] / CHUNK⌋ + i, which leaves at most one
unused slot per sequence.

    `_aggregate_kernel`      the composite map of every chunk except a sequence's first; launched
                             only if a sequence can be longer than a chunk
    `_apply_kernel`          U after the chunk from the composites of the later ones, then the
                             chunk's blocks from last to first; writes advantages, returns, sums
    `_sequence_sums_kernel`  sums over a sequence's chunks, if there are several
    `_moments_kernel`        KL per sequence, moments of the batch
    `_whiten_kernel`         elementwise

Launches: `gae` 1, or 2 for sequences longer than a chunk. `shaped_advantages` 2 (the kernel and a
one-program sum), or 4. `whiten` 1 with moments, otherwise 3. There are no waits for other programs,
float atomics or host synchronizations. The order of every sum is fixed, so the same inputs give the
same bits.

Precision. Inputs are bf16, fp16 or fp32, results fp32. Blocks are scanned in fp32 trees. U and the
composites between blocks, sums and moments are fp64, a few scalars per block, so the error of a
long sum does not grow with the number of blocks. γλ is rounded to fp32 once, which shifts a horizon
1/(1−γλ) by up to 3e-8 of its square in tokens.

Arguments are checked in `fastppo.functional`. cu_seqlens is not read on the host; bounds taken from
it are clamped, so a wrong one gives wrong numbers but no stray access.

Source: Schulman et al. 2016, eq. 11, 12, 16; Blelloch 1990 for scans of linear recurrences.
"""

# Kernels' parameters have no other annotations than those that Triton reads (constexpr, the width
# of a scalar).

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastppo_kernels import records
from fastppo_kernels.records import (
    KL_ESTIMATORS,
    Discounts,
    Gae,
    ShapedAdvantages,
    Shaping,
    Trajectory,
)
from fastppo_kernels.triton import programs
from fastppo_kernels.triton.jit import sampled_kl
from fastppo_kernels.triton.launch import check_dtype, current, dense, dense_record, launch_options

VECTOR = tl.constexpr(4)
"""Consecutive tokens of a thread: 16 bytes of fp32. They are composed in registers, so the scan by
shuffles covers a quarter of the tokens. Element-wise loads (packed rows, and lengths that are not
multiples of four) are rearranged through 512 bytes of shared memory."""

FP_FUSION = False
"""Contractions are written out in the kernels. The compiler could choose differently for packed and
padded rows."""

WHITEN_EPSILON = tl.constexpr(records.WHITEN_EPSILON)
SUMS = tl.constexpr(4)
"""Sums per chunk or sequence, fp64: KL, count, Σ A, Σ A²."""


# ------------------------------------------------------------------------------------ jit helpers


@triton.jit
def _compose(a_later, b_later, a_earlier, b_earlier):
    """Compose the maps: U ↦ a_earlier·(a_later·U + b_later) + b_earlier."""
    return a_earlier * a_later, tl.fma(a_earlier, b_later, b_earlier)


@triton.jit
def _bound(cu_seqlens, index, total):
    """Load cu_seqlens[index], clamped into the batch."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + index).to(tl.int64), 0), total)


@triton.jit
def _first_slot(sequence, cu_seqlens, total, row_chunks, CHUNK: tl.constexpr):
    """Return the first slot of a sequence's chunks."""
    if cu_seqlens is None:
        slot = sequence * row_chunks
    else:
        slot = (_bound(cu_seqlens, sequence, total) // CHUNK).to(tl.int32) + sequence
    return slot


@triton.jit
def _whole_vectors(length, BY_VECTOR: tl.constexpr):
    """Return `length`, visibly a multiple of VECTOR for the compiler if it is one."""
    return length // VECTOR * VECTOR if BY_VECTOR else length


@triton.jit
def _span(sequence, cu_seqlens, total, length):
    """Return (first token, number of tokens) of a sequence."""
    if cu_seqlens is None:
        start = sequence.to(tl.int64) * length
        tokens = length
    else:
        start = _bound(cu_seqlens, sequence, total)
        tokens = (_bound(cu_seqlens, sequence + 1, total) - start).to(tl.int32)
    return start, tokens


@triton.jit
def _locate(slot, cu_seqlens, total, batch, length, row_chunks, search_steps, CHUNK: tl.constexpr):
    """Return (sequence, chunk, first token, number of tokens) of a slot.

    In a packed batch the sequence is the last one with a first slot ≤ `slot`.
    """
    if cu_seqlens is None:
        sequence = slot // row_chunks
    else:
        sequence = slot * 0
        above = sequence + batch
        for _ in range(search_steps):
            middle = (sequence + above) // 2
            reached = _first_slot(middle, cu_seqlens, total, row_chunks, CHUNK) <= slot
            sequence = tl.where(reached, middle, sequence)
            above = tl.where(reached, above, middle)
    start, tokens = _span(sequence, cu_seqlens, total, length)
    chunk = slot - _first_slot(sequence, cu_seqlens, total, row_chunks, CHUNK)
    return sequence, tl.maximum(chunk, 0), start, tokens


@triton.jit
def _discounts_of(sequence, discounts, gamma, lam):
    """Return (γ in fp64, γλ, γ(1−λ)) of a sequence; the products are rounded to fp32 once."""
    if discounts.gammas is not None:
        discount = tl.load(discounts.gammas + sequence).to(tl.float64)
    else:
        discount = tl.full((), gamma, tl.float64)
    if discounts.lams is not None:
        smoothing = tl.load(discounts.lams + sequence).to(tl.float64)
    else:
        smoothing = tl.full((), lam, tl.float64)
    decay = discount * smoothing
    return discount, decay.to(tl.float32), (discount * (1.0 - smoothing)).to(tl.float32)


@triton.jit
def _positions(block, BLOCK: tl.constexpr):
    """Return [lanes, VECTOR] positions in the sequence, the block's last vector first."""
    vector = tl.arange(0, BLOCK // VECTOR) + 1
    end = (block + 1) * BLOCK
    return (end - VECTOR * vector)[:, None] + tl.arange(0, VECTOR)[None, :]


@triton.jit
def _load(pointer, inside, LAST: tl.constexpr):
    """Load a float operand in fp32. The `LAST` read is evicted first."""
    hint: tl.constexpr = "evict_first" if LAST else ""
    return tl.load(pointer, mask=inside, other=0.0, eviction_policy=hint).to(tl.float32)


@triton.jit
def _load_block(start, position, inside, trajectory, shaping, LAST: tl.constexpr):
    """Return (valid, V, r, KL) of a block, with r = −β·KL + token reward; 0 where not valid.

    All loads are issued before the mask is used; masked tokens may hold anything.
    """
    token = start + position
    valid = inside
    if trajectory.mask is not None:
        valid = inside & (tl.load(trajectory.mask + token, mask=inside, other=0) != 0)
    value = _load(trajectory.token_values + token, inside, LAST)
    reward = tl.zeros_like(value)
    if trajectory.token_rewards is not None:
        reward = _load(trajectory.token_rewards + token, inside, LAST)
    kl = tl.zeros_like(value)
    if shaping.ref_logprobs is not None:
        logprob = _load(shaping.logprobs + token, inside, LAST)
        ref_logprob = _load(shaping.ref_logprobs + token, inside, LAST)
        estimate, _slope = sampled_kl(logprob - ref_logprob, shaping.kl_estimator)
        kl = tl.where(valid, estimate, 0.0)
        reward = tl.fma(kl, tl.zeros_like(kl) - shaping.kl_coef, reward)
    return valid, tl.where(valid, value, 0.0), tl.where(valid, reward, 0.0), kl


@triton.jit
def _split(x):
    """Split [lanes, VECTOR] into its columns."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _join(first, second, third, fourth):
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(pairs, (first.shape[0], VECTOR))


@triton.jit
def _sum(x):
    """Sum each row, in an order that is the same for all layouts."""
    first, second, third, fourth = _split(x)
    return (first + second) + (third + fourth)


@triton.jit
def _scan_block(valid, value, reward, decay, weight):
    """Return the maps (a, b) of each row's later tokens, and of the block from its end to each row.

    A token's map is (γλ, γλ·r + γ(1−λ)·V): `decay` is γλ and `weight` γ(1−λ).

    The order of the sums is written out, and does not depend on the layout of the loads: by vectors
    for rows that start on 16 bytes, by elements otherwise, as in a packed batch. Rows run backwards
    in time, because a scan with `reverse=True` reverses the lanes by shuffles before and after.
    """
    a = tl.where(valid, decay, 1.0)
    b = tl.fma(reward, tl.zeros_like(reward) + decay, weight * value)  # 0 if r and V are 0
    a0, a1, a2, a3 = _split(a)
    b0, b1, b2, b3 = _split(b)
    later_a, later_b = _compose(a3, b3, a2, b2)
    earlier_a, earlier_b = _compose(a1, b1, a0, b0)
    row_a, row_b = _compose(later_a, later_b, earlier_a, earlier_b)
    row_a, row_b = tl.associative_scan((row_a, row_b), 0, _compose)
    return (a1, a2, a3), (b1, b2, b3), row_a, row_b


@triton.jit
def _whole_block(a, b, lane):
    """Return the composite map of the block, the last lane's, in fp64 scalars."""
    first = lane == lane.shape[0] - 1
    a_block = tl.sum(tl.where(first, a, 0.0), axis=0).to(tl.float64)
    b_block = tl.sum(tl.where(first, b, 0.0), axis=0).to(tl.float64)
    return a_block, b_block


# ------------------------------------------------------------------------------------------ kernels

# Sizes vary from batch to batch and are not specialized: a kernel must not be compiled again
# because one is 1 or a multiple of 16, and padded and packed batches must run the same
# instructions.
_SIZES = ["total", "batch", "length", "row_chunks", "search_steps"]


@triton.jit(do_not_specialize=_SIZES)
def _aggregate_kernel(
    trajectory,
    shaping,
    discounts,
    maps_ptr,  # [slots, 2] fp64, the composite (a, b) of each chunk except a sequence's first
    gamma: tl.float64,
    lam: tl.float64,
    total,
    batch,
    length,
    row_chunks,
    search_steps,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BY_VECTOR: tl.constexpr,  # all rows of a padded batch start on a vector
):
    slot = tl.program_id(0)
    length = _whole_vectors(length, BY_VECTOR)
    sequence, chunk, start, tokens = _locate(
        slot, trajectory.cu_seqlens, total, batch, length, row_chunks, search_steps, CHUNK
    )
    if chunk > 0:
        # Negative in an unused slot: no blocks, and an unread identity.
        blocks = (tl.minimum(tokens - chunk * CHUNK, CHUNK) + BLOCK - 1) // BLOCK
        _discount, decay, weight = _discounts_of(sequence, discounts, gamma, lam)
        lane = tl.arange(0, BLOCK // VECTOR)
        a = tl.full((), 1.0, tl.float64)
        b = tl.full((), 0.0, tl.float64)
        for done in range(blocks):
            position = chunk * CHUNK + _positions(blocks - 1 - done, BLOCK)
            valid, value, reward, _kl = _load_block(
                start, position, position < tokens, trajectory, shaping, LAST=False
            )
            _a, _b, row_a, row_b = _scan_block(valid, value, reward, decay, weight)
            a_block, b_block = _whole_block(row_a, row_b, lane)
            a, b = _compose(a, b, a_block, b_block)
        tl.store(maps_ptr + slot.to(tl.int64) * 2, a)
        tl.store(maps_ptr + slot.to(tl.int64) * 2 + 1, b)


@triton.jit(do_not_specialize=_SIZES)
def _apply_kernel(
    trajectory,
    shaping,
    discounts,
    maps_ptr,  # [slots, 2] fp64, or None if every sequence fits in a chunk
    advantages_ptr,
    returns_ptr,
    sums_ptr,  # [slots, SUMS] fp64, or None
    gamma: tl.float64,
    lam: tl.float64,
    score_clip: tl.float64,
    total,
    batch,
    length,
    row_chunks,
    search_steps,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BY_VECTOR: tl.constexpr,  # all rows of a padded batch start on a vector
):
    slot = tl.program_id(0)
    length = _whole_vectors(length, BY_VECTOR)
    sequence, chunk, start, tokens = _locate(
        slot, trajectory.cu_seqlens, total, batch, length, row_chunks, search_steps, CHUNK
    )
    discount, decay, weight = _discounts_of(sequence, discounts, gamma, lam)

    # U after the sequence, then after this chunk.
    u = tl.full((), 0.0, tl.float64)
    if trajectory.bootstrap is not None:
        u = discount * tl.load(trajectory.bootstrap + sequence).to(tl.float64)
    if shaping.scores is not None:
        score = tl.load(shaping.scores + sequence).to(tl.float64)
        # Comparisons, because minimum and maximum would replace NaN by a number.
        score = tl.where(score > score_clip, score_clip, score)
        u += tl.where(score < -score_clip, -score_clip, score)
    if maps_ptr is not None:
        chunks = (tokens + CHUNK - 1) // CHUNK
        for later in range(chunks - 1 - chunk):
            place = maps_ptr + (slot + chunks - 1 - chunk - later).to(tl.int64) * 2
            u = tl.fma(tl.load(place), u, tl.load(place + 1))

    lane = tl.arange(0, BLOCK // VECTOR)
    previous_lane = tl.maximum(lane - 1, 0)
    if sums_ptr is not None:
        kl_sum = tl.zeros_like(lane).to(tl.float64)
        count = tl.zeros_like(lane)
        total_sum = tl.zeros_like(kl_sum)
        square_sum = tl.zeros_like(kl_sum)
    blocks = (tl.minimum(tokens - chunk * CHUNK, CHUNK) + BLOCK - 1) // BLOCK
    for done in range(blocks):
        position = chunk * CHUNK + _positions(blocks - 1 - done, BLOCK)
        inside = position < tokens
        valid, value, reward, kl = _load_block(
            start, position, inside, trajectory, shaping, LAST=True
        )
        a, b, row_a, row_b = _scan_block(valid, value, reward, decay, weight)
        # U after a row's tokens is U before the tokens of the previous row, which are later.
        u_before = tl.fma(row_a, tl.zeros_like(row_b) + u.to(tl.float32), row_b)
        u3 = tl.where(lane == 0, u.to(tl.float32), tl.gather(u_before, previous_lane, 0))
        u2 = tl.fma(a[2], u3, b[2])
        u1 = tl.fma(a[1], u2, b[1])
        u0 = tl.fma(a[0], u1, b[0])
        advantage = (reward - value) + _join(u0, u1, u2, u3)
        advantage = tl.where(valid, advantage, 0.0)
        tl.store(advantages_ptr + start + position, advantage, mask=inside)
        # Whitening comes next, and reads only the advantages.
        returns = advantage + value
        tl.store(returns_ptr + start + position, returns, inside, eviction_policy="evict_first")
        if sums_ptr is not None:
            wide = advantage.to(tl.float64)
            kl_sum += _sum(kl.to(tl.float64))
            count += _sum(valid.to(tl.int32))
            total_sum += _sum(wide)
            square_sum += _sum(wide * wide)
        a_block, b_block = _whole_block(row_a, row_b, lane)
        u = tl.fma(a_block, u, b_block)
    if sums_ptr is not None:
        place = sums_ptr + slot.to(tl.int64) * SUMS
        tl.store(place, tl.sum(kl_sum, axis=0))
        tl.store(place + 1, tl.sum(count, axis=0).to(tl.float64))
        tl.store(place + 2, tl.sum(total_sum, axis=0))
        tl.store(place + 3, tl.sum(square_sum, axis=0))


@triton.jit(do_not_specialize=_SIZES)
def _sequence_sums_kernel(
    cu_seqlens,
    chunk_sums_ptr,  # [slots, SUMS] fp64
    sums_ptr,  # [B, SUMS] fp64
    total,
    length,
    row_chunks,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per sequence. Lanes count from its first chunk, whatever the layout."""
    sequence = tl.program_id(0)
    _start, tokens = _span(sequence, cu_seqlens, total, length)
    chunks = tl.maximum((tokens + CHUNK - 1) // CHUNK, 0)
    place = chunk_sums_ptr + _first_slot(sequence, cu_seqlens, total, row_chunks, CHUNK) * SUMS
    lane = tl.arange(0, LANES)
    for column in tl.static_range(SUMS):
        partial = tl.zeros((LANES,), tl.float64)
        for first in range(0, chunks, LANES):
            chunk = first + lane
            partial += tl.load(place + chunk * SUMS + column, mask=chunk < chunks, other=0.0)
        tl.store(sums_ptr + sequence * SUMS + column, tl.sum(partial, axis=0))


@triton.jit(do_not_specialize=["rows"])
def _moments_kernel(
    sums_ptr,  # [rows, SUMS] fp64
    kl_ptr,  # [rows] fp32, or None
    moments_ptr,  # [3] fp64
    rows,
    LANES: tl.constexpr,
):
    """Sum (count, Σ A, Σ A²) over rows, and store the KL of each row, in one program."""
    lane = tl.arange(0, LANES)
    count = tl.zeros((LANES,), tl.float64)
    total_sum = tl.zeros((LANES,), tl.float64)
    square_sum = tl.zeros((LANES,), tl.float64)
    for first in range(0, rows, LANES):
        row = first + lane
        here = row < rows
        place = sums_ptr + row.to(tl.int64) * SUMS
        count += tl.load(place + 1, mask=here, other=0.0)
        total_sum += tl.load(place + 2, mask=here, other=0.0)
        square_sum += tl.load(place + 3, mask=here, other=0.0)
        if kl_ptr is not None:
            kl = tl.load(place, mask=here, other=0.0)
            tl.store(kl_ptr + row, kl.to(tl.float32), mask=here)
    tl.store(moments_ptr, tl.sum(count, axis=0))
    tl.store(moments_ptr + 1, tl.sum(total_sum, axis=0))
    tl.store(moments_ptr + 2, tl.sum(square_sum, axis=0))


@triton.jit(do_not_specialize=["elements"])
def _moment_sums_kernel(
    x_ptr,
    mask_ptr,
    sums_ptr,  # [programs, SUMS] fp64, without the KL's column
    elements,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Sums of STEPS blocks of a flat tensor, for `_moments_kernel`."""
    program = tl.program_id(0)
    start = program.to(tl.int64) * (BLOCK * STEPS)
    lane = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), tl.int32)
    total_sum = tl.zeros((BLOCK,), tl.float64)
    square_sum = tl.zeros((BLOCK,), tl.float64)
    for step in range(STEPS):
        first = start + step * BLOCK
        valid = first + lane < elements
        x = tl.load(x_ptr + first + lane, mask=valid, other=0.0).to(tl.float64)
        if mask_ptr is not None:
            valid = valid & (tl.load(mask_ptr + first + lane, mask=valid, other=0) != 0)
        x = tl.where(valid, x, 0.0)
        count += valid.to(tl.int32)
        total_sum += x
        square_sum = tl.fma(x, x, square_sum)
    place = sums_ptr + program.to(tl.int64) * SUMS
    tl.store(place + 1, tl.sum(count, axis=0).to(tl.float64))
    tl.store(place + 2, tl.sum(total_sum, axis=0))
    tl.store(place + 3, tl.sum(square_sum, axis=0))


@triton.jit
def _whitening(moments_ptr):
    """Return (mean in two parts, 1/√(var + ε)).

    In two parts, x − mean keeps its digits in fp32 however far the mean is from 0. Every thread
    computes them: two divisions in fp64 and a root in fp32.
    """
    count = tl.load(moments_ptr).to(tl.float64)
    total_sum = tl.load(moments_ptr + 1).to(tl.float64)
    square_sum = tl.load(moments_ptr + 2).to(tl.float64)
    mean = total_sum / tl.maximum(count, 1.0)
    variance = (square_sum - count * mean * mean) / tl.maximum(count - 1.0, 1.0)
    variance = tl.where(variance < 0.0, 0.0, variance)
    scale = 1.0 / tl.sqrt_rn((variance + WHITEN_EPSILON).to(tl.float32))
    mean_high = mean.to(tl.float32)
    return mean_high, (mean - mean_high.to(tl.float64)).to(tl.float32), scale


@triton.jit
def _white(x, mean_high, mean_low, scale, SHIFT_MEAN: tl.constexpr):
    white = ((x.to(tl.float32) - mean_high) - mean_low) * scale
    return white if SHIFT_MEAN else white + mean_high


@triton.jit(do_not_specialize=["elements"])
def _whiten_kernel(
    x_ptr,
    mask_ptr,
    moments_ptr,  # [3]
    white_ptr,
    elements,
    SHIFT_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Whiten STEPS blocks of a flat tensor, unmasked inside it, so that loads are vectorized."""
    mean_high, mean_low, scale = _whitening(moments_ptr)
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    lane = tl.arange(0, BLOCK)
    if start + BLOCK * STEPS <= elements:
        for step in tl.static_range(STEPS):
            first = start + step * BLOCK
            x = tl.load(x_ptr + first + lane, eviction_policy="evict_first")
            white = _white(x, mean_high, mean_low, scale, SHIFT_MEAN)
            if mask_ptr is not None:
                white = tl.where(tl.load(mask_ptr + first + lane) != 0, white, 0.0)
            tl.store(white_ptr + first + lane, white, eviction_policy="evict_first")
    else:
        for first in range(start, elements, BLOCK):
            inside = first + lane < elements
            x = tl.load(x_ptr + first + lane, mask=inside, other=0.0)
            white = _white(x, mean_high, mean_low, scale, SHIFT_MEAN)
            if mask_ptr is not None:
                valid = tl.load(mask_ptr + first + lane, mask=inside, other=0) != 0
                white = tl.where(valid, white, 0.0)
            tl.store(white_ptr + first + lane, white, mask=inside)


# ---------------------------------------------------------------------------------------- launchers

_NO_SHAPING = Shaping(scores=None, logprobs=None)  # type: ignore[arg-type]


def _scan(
    trajectory: Trajectory, shaping: Shaping, discounts: Discounts
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (advantages, returns, sums per sequence [B, SUMS] fp64 if there are scores)."""
    values = trajectory.token_values
    cu_seqlens = trajectory.cu_seqlens
    check_dtype("values", values)
    advantages = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    returns = torch.empty_like(advantages)
    program = programs.TABLE["scan"]
    chunk = program.block * program.steps
    total = values.numel()
    if cu_seqlens is None:
        batch, length = values.shape
        row_chunks = max(1, triton.cdiv(length, chunk))
        slots = batch * row_chunks
        one_chunk = row_chunks == 1
        one_slot = one_chunk
    else:
        batch = cu_seqlens.numel() - 1
        length = 0
        row_chunks = 0
        slots = total // chunk + batch if batch else 0
        one_chunk = total <= chunk
        one_slot = False
    want_sums = shaping.scores is not None
    if slots == 0:
        return advantages, returns, _empty_sums(values, 0) if want_sums else None

    trajectory = dense_record(trajectory)
    score_clip = float("inf") if shaping.score_clip is None else shaping.score_clip
    shaping = dense_record(shaping)._replace(
        # A name is a compile-time constant of a kernel.
        kl_estimator=tl.constexpr(shaping.kl_estimator),
        score_clip=None,
    )
    layout = {"total": total, "length": length, "row_chunks": row_chunks, "CHUNK": chunk}
    scan: dict[str, Any] = {
        "trajectory": trajectory,
        "shaping": shaping,
        "discounts": dense_record(discounts),
        # In fp64, unlike numbers inside a record.
        "gamma": discounts.gamma,
        "lam": discounts.lam,
        "batch": batch,
        "search_steps": batch.bit_length(),
        "BLOCK": program.block,
        "BY_VECTOR": cu_seqlens is None and length % VECTOR.value == 0,
        **launch_options(program, fp_fusion=FP_FUSION),
        **layout,
    }
    maps = None if one_chunk else torch.empty((slots, 2), dtype=torch.float64, device=values.device)
    chunk_sums = _empty_sums(values, slots) if want_sums else None
    with current(values.device):
        if maps is not None:
            _aggregate_kernel[(slots,)](**scan, maps_ptr=maps)
        _apply_kernel[(slots,)](
            **scan,
            score_clip=score_clip,
            maps_ptr=maps,
            advantages_ptr=advantages,
            returns_ptr=returns,
            sums_ptr=chunk_sums,
        )
        if chunk_sums is None or one_slot:
            return advantages, returns, chunk_sums
        sums = _empty_sums(values, batch)
        program = programs.TABLE["sums of a sequence"]
        _sequence_sums_kernel[(batch,)](
            **layout,
            cu_seqlens=trajectory.cu_seqlens,
            chunk_sums_ptr=chunk_sums,
            sums_ptr=sums,
            LANES=program.block,
            **launch_options(program, fp_fusion=FP_FUSION),
        )
    return advantages, returns, sums


def _empty_sums(x: Tensor, rows: int) -> Tensor:
    return torch.empty((rows, SUMS.value), dtype=torch.float64, device=x.device)


def _moments(sums: Tensor, kl: Tensor | None) -> Tensor:
    moments = torch.empty(3, dtype=torch.float64, device=sums.device)
    program = programs.TABLE["moments of a batch"]
    with current(sums.device):
        _moments_kernel[(1,)](
            sums,
            kl,
            moments,
            sums.shape[0],
            LANES=program.block,
            **launch_options(program, fp_fusion=FP_FUSION),
        )
    return moments


def gae(trajectory: Trajectory, discounts: Discounts) -> Gae:
    """`definition.gae`: one launch, or two for long rows.

    Args:
        trajectory: bf16, fp16 or fp32. Strided tensors are copied.

    Returns:
        fp32, the shape of the values, 0 where masked.

    Raises:
        ValueError: fp64 values, which need the torch backend.
    """
    advantages, returns, _ = _scan(trajectory, _NO_SHAPING, discounts)
    return Gae(advantages, returns)


def shaped_advantages(
    trajectory: Trajectory, shaping: Shaping, discounts: Discounts
) -> ShapedAdvantages:
    """`definition.shaped_advantages`: two launches.

    Four for rows longer than a chunk and for packed rows; three for packed rows that fit together
    in one chunk.
    """
    if shaping.kl_estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator must be k1, k2 or k3, got {shaping.kl_estimator!r}")
    advantages, returns, sums = _scan(trajectory, shaping, discounts)
    assert sums is not None
    kl = torch.empty(shaping.scores.shape, dtype=torch.float32, device=advantages.device)
    return ShapedAdvantages(advantages, returns, kl, _moments(sums, kl))


def whitening_moments(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return (count, Σx, Σx²) over the mask, fp64 [3]. Two launches."""
    program = programs.TABLE["moments of a tensor"]
    count = triton.cdiv(x.numel(), program.block * program.steps)
    sums = _empty_sums(x, count)
    if count:
        with current(x.device):
            _moment_sums_kernel[(count,)](
                dense(x),
                dense(mask),
                sums,
                x.numel(),
                BLOCK=program.block,
                STEPS=program.steps,
                **launch_options(program, fp_fusion=FP_FUSION),
            )
    return _moments(sums, None)


def whiten(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    shift_mean: bool = True,
    moments: Tensor | None = None,
) -> Tensor:
    """`definition.whiten`: one launch with the global batch's `moments` [3], three without."""
    if moments is None:
        moments = whitening_moments(x, mask)
    check_dtype("x", x)
    white = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel():
        program = programs.TABLE["whiten"]
        count = triton.cdiv(x.numel(), program.block * program.steps)
        with current(x.device):
            _whiten_kernel[(count,)](
                dense(x),
                dense(mask),
                dense(moments),
                white,
                x.numel(),
                SHIFT_MEAN=shift_mean,
                BLOCK=program.block,
                STEPS=program.steps,
                **launch_options(program, fp_fusion=FP_FUSION),
            )
    return white
