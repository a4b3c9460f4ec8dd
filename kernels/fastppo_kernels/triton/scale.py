"""x ← x·factor in place, for free if the factor is 1.

The loss's gradient is computed in the forward pass. The backward pass multiplies it by the incoming
gradient, which is usually 1.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastppo_kernels.triton import programs
from fastppo_kernels.triton.launch import check_dtype, current, device_limits, launch_options
from fastppo_kernels.triton.views import row_start, view_of


@triton.jit(do_not_specialize=["rows"])
def _scale_kernel(x, factor, rows, columns, BLOCK_V: tl.constexpr):
    """Scale x in place. A factor of 1, checked on the device, costs one load per program."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        tiles = tl.cdiv(columns, BLOCK_V)
        tile_count = rows.to(tl.int64) * tiles
        for tile in range(tl.program_id(0), tile_count, tl.num_programs(0)):
            row = tile // tiles
            column = (tile - row * tiles) * BLOCK_V + tl.arange(0, BLOCK_V)
            entries = row_start(x, row) + column
            value = tl.load(entries, column < columns).to(tl.float32)
            tl.store(entries, (value * by).to(x.tensor.dtype.element_ty), column < columns)


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """Scale x in place by a 0-d fp32 factor on its device, and return x.

    A factor of 1 reads and writes nothing, without synchronization. The product is in fp32.

    Args:
        x: contiguous, or [N, V] or [B, T, V] with a dense last axis; bf16, fp16 or fp32.
    """
    check_dtype("x", x)
    if x.numel() == 0:
        return x
    flat = x.view(-1, x.shape[-1]) if x.dim() != 2 and x.is_contiguous() else x
    rows = flat.shape[:-1].numel()
    columns = flat.shape[-1]
    multiprocessors, _ = device_limits(x.device)
    program = programs.TABLE["scale"]
    assert program.resident is not None
    tiles = rows * triton.cdiv(columns, program.block)
    with current(x.device):
        _scale_kernel[(min(tiles, multiprocessors * program.resident),)](
            view_of(flat),
            factor,
            rows,
            columns,
            BLOCK_V=program.block,
            **launch_options(program, fp_fusion=True),
        )
    return x
