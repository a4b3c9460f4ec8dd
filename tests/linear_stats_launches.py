"""The launches of `fastppo_kernels.linear_stats` that are compiled for each GPU generation.

Each tile, with every optional operand and with none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fastppo_kernels import linear_stats

V, H, ODD_V, ODD_H = 1024, 128, 1003, 131
N = 2


def _launch(dtype: torch.dtype, vocab: int, width: int, **options: Any) -> None:
    hidden = torch.empty((N, width), dtype=dtype)
    weight = torch.empty((vocab, width), dtype=dtype)
    linear_stats.linear_token_stats(hidden, weight, torch.zeros(N, dtype=torch.int64), **options)


def launches() -> list[tuple[str, Callable[[], None]]]:
    found: list[tuple[str, Callable[[], None]]] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        bias = torch.empty(1, dtype=dtype)
        everything = {"bias": bias, "softcap": 30.0, "temperature": torch.ones(N)}
        name = str(dtype).removeprefix("torch.")
        found += [
            (f"linear statistics, {name}", partial(_launch, dtype, V, H)),
            (
                f"linear statistics, bias, soft-cap, {name}",
                partial(_launch, dtype, V, H, **everything),
            ),
            (f"linear statistics, odd, {name}", partial(_launch, dtype, ODD_V, ODD_H)),
            (
                f"linear statistics, odd, bias, soft-cap, {name}",
                partial(_launch, dtype, ODD_V, ODD_H, **everything),
            ),
        ]
    return found
