"""The launches of `fastppo_kernels.triton.rows` that are compiled for each GPU generation.

Every tile of its table (short, middle and long rows; whole, and halved for a reference or a
soft-cap) is compiled for each of the row kernels, with the other optional operands present, which
is when the most registers are live. The rows in the middle do not lie on 16 bytes. Each way of
leaving operands out that changes a loop, and rows that lie differently in two tensors, are compiled
in the tile that holds the most.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fastppo_kernels.records import Objective, PerToken, Softmax, StatsGradients, StatsRows
from fastppo_kernels.triton import rows as triton_rows
from torch import Tensor

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
    triton_rows.ppo_loss(logits, _per_token(), CLIPPED, softmax, **how)


def _sampled(logits: Tensor, softmax: Softmax) -> None:
    per_token = _per_token(ref_logprobs=ZEROS, importance_weights=ONES)
    triton_rows.ppo_loss(logits, per_token, EVERYTHING, softmax)


def _full(logits: Tensor, softmax: Softmax, ref_logits: Tensor) -> None:
    objective = EVERYTHING._replace(kl_estimator="full", kl_ratio_weighted=False)
    per_token = _per_token(importance_weights=ONES)
    triton_rows.ppo_loss(logits, per_token, objective, softmax, ref_logits=ref_logits)


def _stats(logits: Tensor, softmax: Softmax, ref_logits: Tensor | None = None) -> None:
    tokens = _per_token().tokens
    triton_rows.token_stats(logits, tokens, softmax, ref_logits=ref_logits)


def _backward(logits: Tensor, softmax: Softmax, ref_logits: Tensor | None = None) -> None:
    grads = StatsGradients(ZEROS, ZEROS, None if ref_logits is None else ZEROS)
    pairs = torch.zeros(N, 2)
    stats = StatsRows(*[ZEROS] * 6, pairs, pairs)
    tokens = _per_token().tokens
    triton_rows.token_stats_backward(grads, logits, tokens, stats, softmax, ref_logits=ref_logits)


def launches() -> list[tuple[str, Callable[[], None]]]:
    found: list[tuple[str, Callable[[], None]]] = []
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
        ("scale", partial(triton_rows.scale_, x, torch.ones(()))),
        ("scale, fp32", partial(triton_rows.scale_, x.float(), torch.ones(()))),
    ]
    return found
