"""Whitening as Triton kernels, and the moments that it needs.

    `_moment_sums_kernel`   sums (count, Σx, Σx²) over each part of a tensor
    `_moments_kernel`       sums them over all parts, or over the sequences of `gae`, in one program
    `_whiten_kernel`        (x − mean)/√(var + ε), elementwise

Launches: 1 with given moments, otherwise 3. Sums are fp64, and their order is fixed without float
atomics, so the same inputs give the same bits.
"""

# Kernels' parameters have no other annotations than those that Triton reads (constexpr, the width
# of a scalar).

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastppo_kernels import records
from fastppo_kernels.triton import programs
from fastppo_kernels.triton.launch import check_dtype, current, dense, launch_options

FP_FUSION = False
"""Contractions are written out in the kernels of GAE and whitening. The compiler could choose
differently for packed and padded rows."""

WHITEN_EPSILON = tl.constexpr(records.WHITEN_EPSILON)
SUMS = tl.constexpr(4)
"""Sums per chunk or sequence, fp64: KL, count, Σ A, Σ A²."""


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
    """Sum over STEPS blocks of a flat tensor, for `_moments_kernel`."""
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
    """Return (the mean as a sum of two fp32 numbers, 1/√(var + ε)).

    With both, x − mean keeps its digits in fp32 however far the mean is from 0. Every thread
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
    """Whiten entries with the results of `_whitening`."""
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
    """Whiten STEPS blocks of a flat tensor, with vectorized loads where all of them are inside."""
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


def empty_sums(x: Tensor, rows: int) -> Tensor:
    """Allocate [rows, SUMS] in fp64 on the device of x."""
    return torch.empty((rows, SUMS.value), dtype=torch.float64, device=x.device)


def total_moments(sums: Tensor, kl: Tensor | None) -> Tensor:
    """Return (count, Σ A, Σ A²), the totals of sums [rows, SUMS], in one launch.

    Args:
        kl: [rows] fp32, to which the KL of each row is written; None leaves it out.
    """
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


def whitening_moments(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return (count, Σx, Σx²) over the mask, fp64 [3]. Two launches."""
    program = programs.TABLE["moments of a tensor"]
    count = triton.cdiv(x.numel(), program.block * program.steps)
    sums = empty_sums(x, count)
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
    return total_moments(sums, None)


def whiten(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    shift_mean: bool = True,
    moments: Tensor | None = None,
) -> Tensor:
    """Compute `definition.whiten`.

    Args:
        moments: `whitening_moments` [3] of the whole global batch; None computes those of x.
    """
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
