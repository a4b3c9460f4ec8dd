"""The launches of `fastppo_kernels.triton_linear_stats` that are compiled for each GPU generation.

Each tile, with every optional operand and with none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from fastppo_kernels import triton_linear_stats
from fastppo_kernels.records import Projection, Softmax

V, H, ODD_V, ODD_H = 1024, 128, 1003, 131
N = 2


def _launch(dtype: torch.dtype, vocab: int, width: int, softmax: Softmax, bias: bool) -> None:
    hidden = torch.empty((N, width), dtype=dtype)
    weight = torch.empty((vocab, width), dtype=dtype)
    projection = Projection(hidden, weight, torch.empty(1, dtype=dtype) if bias else None)
    tokens = torch.zeros(N, dtype=torch.int64)
    triton_linear_stats.linear_token_stats(projection, tokens, softmax)


def launches() -> list[tuple[str, Callable[[], None]]]:
    found: list[tuple[str, Callable[[], None]]] = []
    capped = Softmax(temperatures=torch.ones(N), softcap=30.0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for odd, vocab, width in (("", V, H), (" odd,", ODD_V, ODD_H)):
            found += [
                (
                    f"linear statistics,{odd} {name}",
                    partial(_launch, dtype, vocab, width, Softmax(), False),
                ),
                (
                    f"linear statistics,{odd} bias, soft-cap, {name}",
                    partial(_launch, dtype, vocab, width, capped, True),
                ),
            ]
    return found
