"""The launches of `fastppo_kernels.triton.advantages` that are compiled for each GPU generation.

Three sequences: of one chunk, of one chunk and a vector, of one chunk and a token, and packed.
Names end in the layout, so that what is launched for packed rows can be set beside what is launched
for padded ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from fastppo_kernels.records import Discounts, Shaping, Trajectory
from fastppo_kernels.triton import advantages as triton_advantages
from fastppo_kernels.triton import programs

LAYOUTS = {"one chunk": 0, "split": triton_advantages.VECTOR.value, "odd": 1, "packed": 1}
"""And how much longer than a chunk they are."""


def launches() -> list[tuple[str, Callable[[], None]]]:
    found: list[tuple[str, Callable[[], None]]] = []
    chunk = programs.TABLE["scan"].block * programs.TABLE["scan"].steps
    per_sequence, discounts = torch.zeros(3), Discounts()
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for layout, more in LAYOUTS.items():
            tokens = 3 * (chunk + more)
            shape = (tokens,) if layout == "packed" else (3, tokens // 3)
            x, mask = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
            starts = torch.zeros(4, dtype=torch.int32) if layout == "packed" else None
            whole = Trajectory(x, x, mask, starts, per_sequence)
            bare = Trajectory(x, x, None, starts)
            each = Discounts(gammas=per_sequence, lams=per_sequence)
            gae = triton_advantages.gae
            found.append((f"gae, {name}, {layout}", partial(gae, whole, discounts)))
            if dtype == torch.float32:
                found.append((f"gae, bare, {name}, {layout}", partial(gae, bare, discounts)))
                found.append((f"gae, discounts, {name}, {layout}", partial(gae, whole, each)))
            for estimator in ("k1", "k2", "k3"):
                shaping = Shaping(per_sequence, x, x, 0.1, estimator)
                trajectory = whole._replace(bootstrap=None)
                call = partial(triton_advantages.shaped_advantages, trajectory, shaping, discounts)
                found.append((f"shaped, {estimator}, {name}, {layout}", call))
        for shift_mean in (True, False):
            call = partial(triton_advantages.whiten, x, mask, shift_mean=shift_mean)
            found.append((f"whiten, shift_mean={shift_mean}, {name}", call))
    return found
