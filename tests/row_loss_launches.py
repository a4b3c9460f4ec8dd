"""The launches of `fastppo_kernels.row_loss` that are compiled for each GPU generation.

Every tile of its table (short and long rows, 2- and 4-byte logits; whole, and halved for a
reference or a soft-cap) is compiled for each of the row kernels, with the other optional operands
present, which is when the most registers are live. Each way of leaving operands out that changes a
loop, and rows that do not lie on 16 bytes, are compiled in the tile that holds the most.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fastppo_kernels import row_loss
from torch import Tensor

SHORT, LONG, ODD = 1024, 151936, 50257
N = 2


def _logits(vocab: int, dtype: torch.dtype, shape: tuple[int, ...] = (N,)) -> Tensor:
    return torch.empty((*shape, vocab), dtype=dtype)


def _per_token() -> tuple[Tensor, ...]:
    tokens = torch.zeros(N, dtype=torch.int64)
    return tokens, torch.zeros(N), torch.zeros(N), torch.ones(N)


def _loss(logits: Tensor, **options: Any) -> None:
    row_loss.ppo_loss(logits, *_per_token(), **options)


def _stats(logits: Tensor, backward: bool, **options: Any) -> None:
    tokens, *_ = _per_token()
    if not backward:
        row_loss.token_stats(logits, tokens, **options)
        return
    three = torch.zeros(N), torch.zeros(N), torch.zeros(N)
    stats = row_loss.TokenStats(*three, torch.zeros(N, 2), torch.zeros(N, 2))
    row_loss.token_stats_backward(
        three[0],
        three[1],
        three[2] if options.get("ref_logits") is not None else None,
        logits,
        tokens,
        stats,
        **options,
    )


def launches() -> list[tuple[str, Callable[[], None]]]:
    found: list[tuple[str, Callable[[], None]]] = []
    zeros, ones = torch.zeros(N), torch.ones(N)
    capped = {"softcap": 30.0, "temperature": ones}
    scaled = {"temperature": ones}
    sampled = {"kl_estimator": "k3", "ref_logprobs": zeros, "importance_weights": ones}
    for vocab, dtype in (
        (SHORT, torch.bfloat16),
        (SHORT, torch.float32),
        (LONG, torch.bfloat16),
        (LONG, torch.float32),
    ):
        x = _logits(vocab, dtype)
        ref = {"ref_logits": _logits(vocab, dtype)}
        full = {"kl_estimator": "full", "importance_weights": ones, **ref}
        named = [
            ("loss, k3", partial(_loss, x, **scaled, **sampled)),
            ("loss, k3, soft-cap", partial(_loss, x, **capped, **sampled)),
            ("loss, full KL", partial(_loss, x, **scaled, **full)),
            ("loss, full KL, soft-cap", partial(_loss, x, **capped, **full)),
            ("statistics", partial(_stats, x, False, **scaled)),
            ("statistics, soft-cap", partial(_stats, x, False, **capped)),
            ("statistics, full KL, soft-cap", partial(_stats, x, False, **capped, **ref)),
            ("backward", partial(_stats, x, True, **scaled)),
            ("backward, soft-cap", partial(_stats, x, True, **capped)),
            ("backward, full KL, soft-cap", partial(_stats, x, True, **capped, **ref)),
        ]
        dtype_name = str(dtype).removeprefix("torch.")
        found += [(f"{name}, V={vocab} {dtype_name}", call) for name, call in named]
    x, odd = _logits(LONG, torch.bfloat16), _logits(ODD, torch.bfloat16)
    found += [
        ("loss, bare", partial(_loss, x)),
        ("loss, in place", partial(_loss, x, inplace=True)),
        ("loss, no gradient", partial(_loss, x, need_grad=False)),
        ("loss, no gradient, fp16", partial(_loss, x.half(), need_grad=False)),
        ("loss, logits[:, :-1]", partial(_loss, _logits(LONG, x.dtype, (N // 2, 3))[:, :-1])),
        ("loss, k3, off 16 bytes", partial(_loss, odd, **scaled, **sampled)),
        ("loss, k3, soft-cap, off 16 bytes", partial(_loss, odd, **capped, **sampled)),
        ("statistics, off 16 bytes", partial(_stats, odd, False)),
        ("backward, off 16 bytes", partial(_stats, odd, True)),
        ("statistics, fp16", partial(_stats, x.half(), False)),
        ("backward, fp16", partial(_stats, x.half(), True)),
        ("scale", partial(row_loss.scale_, x, torch.ones(()))),
        ("scale, fp32", partial(row_loss.scale_, x.float(), torch.ones(()))),
    ]
    return found
