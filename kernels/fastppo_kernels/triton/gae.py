"""Generalized advantage estimation and reward shaping as Triton kernels.

`gae_block` has the maths of a block: tokens are affine maps of U, what the future contributes to an
advantage, and a block is scanned in parallel. Here the blocks of a sequence follow each other from
the last to the first. The last token is followed by U = γ·bootstrap + score, whichever token is the
last valid one, and A_t = r_t − V_t + (the composite of the later tokens)(U).

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

Launches: `gae` 1, or 2 for sequences longer than a chunk. `shaped_advantages` 2 (the kernel and the
moments), or 4. There are no waits for other programs, float atomics or host synchronizations. The
order of every sum is fixed, so the same inputs give the same bits.

Precision. Inputs are bf16, fp16 or fp32, results fp32. Blocks are scanned in fp32 trees. U and the
composites between blocks and the sums are fp64, a few scalars per block, so the error of a long sum
does not grow with the number of blocks. γλ is rounded to fp32 once, which shifts a horizon 1/(1−γλ)
by up to 3e-8 of its square in tokens.

Arguments are checked in `fastppo.functional`. cu_seqlens is not read on the host; bounds taken from
it are clamped, so a wrong one gives wrong numbers but no stray access.
"""

# Kernels' parameters have no other annotations than those that Triton reads (constexpr, the width
# of a scalar).

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastppo_kernels.records import (
    KL_ESTIMATORS,
    Discounts,
    Gae,
    ShapedAdvantages,
    Shaping,
    Trajectory,
)
from fastppo_kernels.triton import programs
from fastppo_kernels.triton.gae_block import (
    VECTOR,
    compose,
    join,
    load_block,
    positions,
    scan_block,
    sum_vectors,
    whole_block,
)
from fastppo_kernels.triton.launch import check_dtype, current, dense_record, launch_options
from fastppo_kernels.triton.whitening import FP_FUSION, SUMS, empty_sums, total_moments

# ---------------------------------------------------------------------------- where a chunk lies


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
    """Return (γ in fp64, γλ, γ(1−λ)) of a sequence. The products are rounded to fp32 once."""
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
            position = chunk * CHUNK + positions(blocks - 1 - done, BLOCK)
            valid, value, reward, _kl = load_block(
                start, position, position < tokens, trajectory, shaping, LAST=False
            )
            _a, _b, vector_a, vector_b = scan_block(valid, value, reward, decay, weight)
            a_block, b_block = whole_block(vector_a, vector_b, lane)
            a, b = compose(a, b, a_block, b_block)
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
        position = chunk * CHUNK + positions(blocks - 1 - done, BLOCK)
        inside = position < tokens
        valid, value, reward, kl = load_block(
            start, position, inside, trajectory, shaping, LAST=True
        )
        a, b, vector_a, vector_b = scan_block(valid, value, reward, decay, weight)
        # U after a vector's tokens is U before the tokens of the previous vector, which are later.
        u_before = tl.fma(vector_a, tl.zeros_like(vector_b) + u.to(tl.float32), vector_b)
        u3 = tl.where(lane == 0, u.to(tl.float32), tl.gather(u_before, previous_lane, 0))
        u2 = tl.fma(a[2], u3, b[2])
        u1 = tl.fma(a[1], u2, b[1])
        u0 = tl.fma(a[0], u1, b[0])
        advantage = (reward - value) + join(u0, u1, u2, u3)
        advantage = tl.where(valid, advantage, 0.0)
        tl.store(advantages_ptr + start + position, advantage, mask=inside)
        # Whitening comes next, and reads only the advantages.
        returns = advantage + value
        tl.store(returns_ptr + start + position, returns, inside, eviction_policy="evict_first")
        if sums_ptr is not None:
            wide = advantage.to(tl.float64)
            kl_sum += sum_vectors(kl.to(tl.float64))
            count += sum_vectors(valid.to(tl.int32))
            total_sum += sum_vectors(wide)
            square_sum += sum_vectors(wide * wide)
        a_block, b_block = whole_block(vector_a, vector_b, lane)
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
    """Sum over the chunks of a sequence, in one program. Lanes count from its first chunk."""
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


# ---------------------------------------------------------------------------------------- launchers

_NO_SHAPING = Shaping(scores=None, logprobs=None)  # type: ignore[arg-type]


def _scan(
    trajectory: Trajectory, shaping: Shaping, discounts: Discounts
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (advantages, returns, sums per sequence).

    The sums are [B, SUMS] fp64, or None if there are no scores.
    """
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
        return advantages, returns, empty_sums(values, 0) if want_sums else None

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
    chunk_sums = empty_sums(values, slots) if want_sums else None
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
        sums = empty_sums(values, batch)
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


def gae(trajectory: Trajectory, discounts: Discounts) -> Gae:
    """Compute `definition.gae`.

    Args:
        trajectory: bf16, fp16 or fp32. Strided tensors are copied.

    Returns:
        (advantages, returns), fp32, shaped like the values, 0 where masked.

    Raises:
        ValueError: the values are fp64, which need the torch backend.
    """
    advantages, returns, _ = _scan(trajectory, _NO_SHAPING, discounts)
    return Gae(advantages, returns)


def shaped_advantages(
    trajectory: Trajectory, shaping: Shaping, discounts: Discounts
) -> ShapedAdvantages:
    """Compute `definition.shaped_advantages`.

    It takes two launches, four for rows longer than a chunk and for packed rows, and three for
    packed rows that fit together in one chunk.

    Raises:
        ValueError: the values are fp64, or the KL estimator is unknown.
    """
    if shaping.kl_estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator must be k1, k2 or k3, got {shaping.kl_estimator!r}")
    advantages, returns, sums = _scan(trajectory, shaping, discounts)
    assert sums is not None
    kl = torch.empty(shaping.scores.shape, dtype=torch.float32, device=advantages.device)
    return ShapedAdvantages(advantages, returns, kl, total_moments(sums, kl))
