"""The launches of `fastppo_kernels.triton_live_rows` that are compiled for each GPU generation.

Rows as the loop around the lm-head holds them: a multiple of 128 bytes apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from fastppo_kernels import triton_live_rows

N, V, ODD_V = 2, 151936, 50257


def _move(vocab: int, dtype: torch.dtype) -> None:
    step = 128 // dtype.itemsize
    grad = torch.zeros((N, -(-vocab // step) * step), dtype=dtype)[:, :vocab]
    order, count = torch.tensor([1, 0]), torch.tensor([1], dtype=torch.int32)
    alive = torch.tensor([False, True])
    triton_live_rows.bring_forward(grad, triton_live_rows.LiveRows(alive, order, count))


def launches() -> list[tuple[str, Callable[[], None]]]:
    return [
        (f"rows brought forward, V = {vocab}, {dtype}", partial(_move, vocab, dtype))
        for vocab in (V, ODD_V)
        for dtype in (torch.bfloat16, torch.float32)
    ]
