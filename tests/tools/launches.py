"""Define the launches that `compile_check.py` compiles for GPUs that are not present.

`every` covers each tile of the rows' table (short, middle and long rows; whole tiles, and tiles
halved for a reference or a soft-cap) for each row kernel, with all other optional operands, where
the most registers are live. The middle rows are not 16-byte aligned. Each omission of operands that
changes a loop, and each difference in alignment between two tensors, is compiled in the largest
tile. Sequences come in one chunk, a chunk and a vector, a chunk and a token, and packed; names end
in the layout, so that packed and padded launches can be compared.

`counted` are the launches whose instructions `cost.py` counts, for the tables of `kernels/NOTES.md`
and the ceilings of `tests/kernels/triton/test_compiled.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fastppo_kernels import triton_backend
from fastppo_kernels.records import (
    Discounts,
    Objective,
    PerToken,
    Shaping,
    Softmax,
    StatsGradients,
    StatsRows,
    Trajectory,
)
from fastppo_kernels.triton import programs
from fastppo_kernels.triton.gae_block import VECTOR
from torch import Tensor

Launches = list[tuple[str, Callable[[], None]]]
"""Names with functions that call a launcher."""

SHORT, LONG, ODD = 1024, 151936, 50257
N = 2
ZEROS, ONES = torch.zeros(N), torch.ones(N)
CLIPPED = Objective(0.8, 1.2, entropy_coef=0.1)
EVERYTHING = CLIPPED._replace(dual_clip=3.0, kl_coef=0.1, kl_ratio_weighted=True)
BARE, SCALED = Softmax(), Softmax(temperatures=ONES)
CAPPED = SCALED._replace(softcap=30.0)


def _logits(vocab: int, dtype: torch.dtype, shape: tuple[int, ...] = (N,)) -> Tensor:
    return torch.empty((*shape, vocab), dtype=dtype)


def _per_token(**operands: Tensor) -> PerToken:
    return PerToken(torch.zeros(N, dtype=torch.int64), ZEROS, ZEROS, ONES, **operands)


def _loss(logits: Tensor, softmax: Softmax = BARE, **how: Any) -> None:
    triton_backend.ppo_loss(logits, _per_token(), CLIPPED, softmax, **how)


def _sampled(logits: Tensor, softmax: Softmax) -> None:
    per_token = _per_token(ref_logprobs=ZEROS, importance_weights=ONES)
    triton_backend.ppo_loss(logits, per_token, EVERYTHING, softmax)


def _full(logits: Tensor, softmax: Softmax, ref_logits: Tensor) -> None:
    objective = EVERYTHING._replace(kl_estimator="full", kl_ratio_weighted=False)
    per_token = _per_token(importance_weights=ONES)
    triton_backend.ppo_loss(logits, per_token, objective, softmax, ref_logits=ref_logits)


def _stats(logits: Tensor, softmax: Softmax, ref_logits: Tensor | None = None) -> None:
    tokens = _per_token().tokens
    triton_backend.token_stats(logits, tokens, softmax, ref_logits=ref_logits)


def _backward(logits: Tensor, softmax: Softmax, ref_logits: Tensor | None = None) -> None:
    grads = StatsGradients(ZEROS, ZEROS, None if ref_logits is None else ZEROS)
    pairs = torch.zeros(N, 2)
    stats = StatsRows(*[ZEROS] * 6, pairs, pairs)
    tokens = _per_token().tokens
    triton_backend.token_stats_backward(
        grads, logits, tokens, stats, softmax, ref_logits=ref_logits
    )


def _rows() -> Launches:
    found: Launches = []
    for vocab, dtype in (
        (SHORT, torch.bfloat16),
        (ODD, torch.bfloat16),
        (LONG, torch.bfloat16),
        (LONG, torch.float32),
    ):
        x, ref = _logits(vocab, dtype), _logits(vocab, dtype)
        named = [
            ("loss, k3", partial(_sampled, x, SCALED)),
            ("loss, k3, soft-cap", partial(_sampled, x, CAPPED)),
            ("loss, full KL", partial(_full, x, SCALED, ref)),
            ("loss, full KL, soft-cap", partial(_full, x, CAPPED, ref)),
            ("statistics", partial(_stats, x, SCALED)),
            ("statistics, soft-cap", partial(_stats, x, CAPPED)),
            ("statistics, full KL, soft-cap", partial(_stats, x, CAPPED, ref)),
            ("backward", partial(_backward, x, SCALED)),
            ("backward, soft-cap", partial(_backward, x, CAPPED)),
            ("backward, full KL, soft-cap", partial(_backward, x, CAPPED, ref)),
        ]
        dtype_name = str(dtype).removeprefix("torch.")
        found += [(f"{name}, V={vocab} {dtype_name}", call) for name, call in named]
    x, odd = _logits(LONG, torch.bfloat16), _logits(ODD, torch.bfloat16)
    off = _logits(LONG + 1, torch.bfloat16)[:, 1:]
    cut, ref = _logits(ODD, x.dtype, (N, 3))[:, :-1], _logits(ODD, x.dtype, (N, 2))
    found += [
        ("loss, bare", partial(_loss, x)),
        ("loss, in place", partial(_loss, x, inplace=True)),
        ("loss, no gradient", partial(_loss, x, need_grad=False)),
        ("loss, no gradient, fp16", partial(_loss, x.half(), need_grad=False)),
        ("loss, logits[:, :-1]", partial(_loss, _logits(LONG, x.dtype, (N // 2, 3))[:, :-1])),
        ("loss, k3, logits[:, 1:]", partial(_sampled, off, SCALED)),
        ("loss, float32, off 16 bytes", partial(_sampled, odd.float(), SCALED)),
        ("loss, rows of two kinds", partial(_sampled, cut, SCALED)),
        ("loss, full KL, soft-cap, rows of two kinds", partial(_full, cut, CAPPED, ref)),
        ("statistics, full KL, rows of two kinds", partial(_stats, cut, SCALED, ref)),
        ("backward, rows of two kinds", partial(_backward, cut, BARE)),
        ("statistics, fp16", partial(_stats, x.half(), BARE)),
        ("backward, fp16", partial(_backward, x.half(), BARE)),
        ("scale", partial(triton_backend.scale_, x, torch.ones(()))),
        ("scale, fp32", partial(triton_backend.scale_, x.float(), torch.ones(()))),
    ]
    return found


LAYOUTS = {"one chunk": 0, "split": VECTOR.value, "odd": 1, "packed": 1}
"""How many tokens longer than a chunk the sequences are."""


def _advantages() -> Launches:
    found: Launches = []
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
            gae = triton_backend.gae
            found.append((f"gae, {name}, {layout}", partial(gae, whole, discounts)))
            if dtype == torch.float32:
                found.append((f"gae, bare, {name}, {layout}", partial(gae, bare, discounts)))
                found.append((f"gae, discounts, {name}, {layout}", partial(gae, whole, each)))
            for estimator in ("k1", "k2", "k3"):
                shaping = Shaping(per_sequence, x, x, 0.1, estimator)
                trajectory = whole._replace(bootstrap=None)
                call = partial(triton_backend.shaped_advantages, trajectory, shaping, discounts)
                found.append((f"shaped, {estimator}, {name}, {layout}", call))
        for shift_mean in (True, False):
            call = partial(triton_backend.whiten, x, mask, shift_mean=shift_mean)
            found.append((f"whiten, shift_mean={shift_mean}, {name}", call))
    return found


def every() -> Launches:
    """Return every launch that differs in the compiled code."""
    return _rows() + _advantages()


TOKENS = (16, 4096)
"""Shape of the whitened tensor and of the rewards: whole programs, one per row."""


def _whiten() -> None:
    x, mask = torch.zeros(TOKENS), torch.zeros(TOKENS, dtype=torch.bool)
    triton_backend.whiten(x, mask, moments=torch.zeros(3, dtype=torch.float64))


def _gae(shaped: bool, packed: bool = False) -> None:
    x, mask = torch.zeros(TOKENS), torch.zeros(TOKENS, dtype=torch.bool)
    starts = None
    if packed:
        # At most a chunk per sequence: one kernel.
        x, mask, starts = x[:2].flatten(), mask[:2].flatten(), torch.zeros(3, dtype=torch.int32)
    if not shaped:
        triton_backend.gae(Trajectory(x, x, mask, starts), Discounts())
        return
    shaping = Shaping(torch.zeros(2 if packed else TOKENS[0]), x, x, 0.1)
    triton_backend.shaped_advantages(Trajectory(x, None, mask, starts), shaping, Discounts())


def counted() -> Launches:
    """Return the launches whose instructions are counted."""
    x, odd = _logits(LONG, torch.bfloat16), _logits(ODD, torch.bfloat16)
    return [
        ("loss", partial(_sampled, x, SCALED)),
        ("statistics", partial(_stats, x, SCALED)),
        ("statistics' backward", partial(_backward, x, SCALED)),
        ("full KL", partial(_full, x, SCALED, x)),
        ("soft-cap", partial(_sampled, x, CAPPED)),
        ("loss, V = 50257", partial(_sampled, odd, SCALED)),
        ("statistics, V = 50257", partial(_stats, odd, SCALED)),
        ("loss, fp32", partial(_sampled, x.float(), SCALED)),
        ("whiten", _whiten),
        ("gae", partial(_gae, False)),
        ("shaping, GAE", partial(_gae, True)),
        ("gae, packed", partial(_gae, False, True)),
        ("shaping, GAE, packed", partial(_gae, True, True)),
    ]
