"""The launches whose instructions are counted: the tables of `kernels/NOTES.md`, the ceilings of
`tests/kernels/triton/test_compiled.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from fastppo_kernels.records import Discounts, Shaping, Trajectory
from fastppo_kernels.triton import advantages as triton_advantages
from triton_rows_launches import CAPPED, LONG, ODD, SCALED, _backward, _full, _logits, _sampled
from triton_rows_launches import _stats as _statistics

TOKENS = (16, 4096)
"""Of the tensor that is whitened, and of the rewards: whole programs, one for each row."""


def _whiten() -> None:
    x, mask = torch.zeros(TOKENS), torch.zeros(TOKENS, dtype=torch.bool)
    triton_advantages.whiten(x, mask, moments=torch.zeros(3, dtype=torch.float64))


def _gae(shaped: bool, packed: bool = False) -> None:
    x, mask = torch.zeros(TOKENS), torch.zeros(TOKENS, dtype=torch.bool)
    starts = None
    if packed:
        # No longer than a chunk: one kernel.
        x, mask, starts = x[:2].flatten(), mask[:2].flatten(), torch.zeros(3, dtype=torch.int32)
    if not shaped:
        triton_advantages.gae(Trajectory(x, x, mask, starts), Discounts())
        return
    shaping = Shaping(torch.zeros(2 if packed else TOKENS[0]), x, x, 0.1)
    triton_advantages.shaped_advantages(Trajectory(x, None, mask, starts), shaping, Discounts())


def launches() -> list[tuple[str, Callable[[], None]]]:
    x, odd = _logits(LONG, torch.bfloat16), _logits(ODD, torch.bfloat16)
    return [
        ("loss", partial(_sampled, x, SCALED)),
        ("statistics", partial(_statistics, x, SCALED)),
        ("statistics' backward", partial(_backward, x, SCALED)),
        ("full KL", partial(_full, x, SCALED, x)),
        ("soft-cap", partial(_sampled, x, CAPPED)),
        ("loss, V = 50257", partial(_sampled, odd, SCALED)),
        ("statistics, V = 50257", partial(_statistics, odd, SCALED)),
        ("loss, fp32", partial(_sampled, x.float(), SCALED)),
        ("whiten", _whiten),
        ("gae", partial(_gae, False)),
        ("shaping, GAE", partial(_gae, True)),
        ("gae, packed", partial(_gae, False, True)),
        ("shaping, GAE, packed", partial(_gae, True, True)),
    ]
