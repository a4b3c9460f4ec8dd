"""Sampling as a Triton kernel: one launch per decoded token, in place of some twenty.

`fastppo.rollout.draw.draw` is the definition. A program samples the token of a row in two sweeps,
the second of which finds the row in the L2 cache:

    m = max s      S_b = Σ e^{s − m} over tile b      total = Σ S_b
    tile = first b with S_0 + … + S_b > u·total      token = the same inside the tile
    logprob = s_y − m − log total

Sums of tiles, and those inside the chosen tile, are fp64.
"""

# Kernels' parameters have no other annotations than those that Triton reads (constexpr, the width
# of a scalar).

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastppo_kernels.triton import programs
from fastppo_kernels.triton.launch import current, launch_options


@triton.jit
def _first_beyond(mass, place, target):
    """Return the first place where the running sum exceeds the target; 0 if the target is NaN.

    The target may round up to the total, and a scan adds in another order than a sum. So it is at
    most the last place with mass.
    """
    before = tl.sum((tl.cumsum(mass, axis=0) <= target).to(tl.int32), axis=0)
    return tl.minimum(before, tl.max(tl.where(mass > 0, place, 0), axis=0))


@triton.jit(do_not_specialize=["vocabulary", "row_stride", "uniform_stride"])
def _draw_kernel(
    scores_ptr,  # [B, V] fp32, dense rows
    uniforms_ptr,  # [B] fp64, or None for the likeliest token
    tokens_ptr,  # [B] int64
    logprobs_ptr,  # [B] fp32
    vocabulary,
    row_stride,
    uniform_stride,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Sample the token of one row. TILES: a power of 2, at least the number of tiles."""
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * row_stride
    lane = tl.arange(0, BLOCK)
    tile = tl.arange(0, TILES)
    lowest = -float("inf")
    highest = tl.full((), lowest, tl.float32)
    for first in range(0, vocabulary, BLOCK):
        scores = tl.load(scores_ptr + first + lane, mask=first + lane < vocabulary, other=lowest)
        highest = tl.maximum(highest, tl.max(scores, axis=0))
    # A row without a finite maximum has no distribution. It is summed as 0, and its total is NaN.
    is_finite = (highest > lowest) & (highest < -lowest)
    shift = tl.where(is_finite, highest, 0.0)
    sums = tl.zeros((TILES,), tl.float64)
    likeliest = tl.full((), 2**31 - 1, tl.int32)
    for first in range(0, vocabulary, BLOCK):
        scores = tl.load(scores_ptr + first + lane, mask=first + lane < vocabulary, other=lowest)
        exponentials = tl.where(is_finite, tl.exp(scores - shift), 0.0)
        sums += tl.where(tile == first // BLOCK, tl.sum(exponentials, axis=0).to(tl.float64), 0.0)
        if uniforms_ptr is None:
            here = tl.where(scores == highest, first + lane, 2**31 - 1)
            likeliest = tl.minimum(likeliest, tl.min(here, axis=0))
    total = tl.where(is_finite, tl.sum(sums, axis=0), float("nan"))
    if uniforms_ptr is None:
        token = tl.where(total == total, likeliest, 0)
    else:
        uniform = tl.load(uniforms_ptr + row * uniform_stride)
        target = uniform * total
        chosen = _first_beyond(sums, tile, target)
        own = tl.sum(tl.where(tile == chosen, sums, 0.0), axis=0)
        before = tl.sum(tl.where(tile < chosen, sums, 0.0), axis=0)
        first = chosen * BLOCK
        scores = tl.load(scores_ptr + first + lane, mask=first + lane < vocabulary, other=lowest)
        exponentials = tl.where(is_finite, tl.exp(scores - shift), 0.0).to(tl.float64)
        rest = tl.maximum((target - before) / tl.where(own > 0, own, 1.0), 0.0)
        target = rest * tl.sum(exponentials, axis=0)
        token = tl.where(total == total, first + _first_beyond(exponentials, lane, target), 0)
    above = tl.load(scores_ptr + token) - shift
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, above - tl.log(total.to(tl.float32)))


def draw(scores: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sample one token per row; return (tokens [B] int64, their logprobs [B] fp32).

    Args:
        scores: [B, V] fp32 with dense rows. A row with NaN or +inf, or with only −inf, gets token 0
            and logprob NaN.
        uniforms: [B] fp64 in [0, 1); None takes the likeliest token.
    """
    rows, vocabulary = scores.shape
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    tokens = torch.empty(rows, dtype=torch.int64, device=scores.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=scores.device)
    program = programs.TABLE["draw"]
    if rows:
        with current(scores.device):
            _draw_kernel[(rows,)](
                scores,
                uniforms,
                tokens,
                logprobs,
                vocabulary,
                scores.stride(0),
                0 if uniforms is None else uniforms.stride(0),
                BLOCK=program.block,
                TILES=triton.next_power_of_2(triton.cdiv(vocabulary, program.block)),
                **launch_options(program, fp_fusion=False),
            )
    return tokens, logprobs
