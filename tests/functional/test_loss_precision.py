"""Defects that public PPO code has had, and the digits that the row maths must keep.

Logprobs and entropy are claimed to 1e-5 nats absolute: an fp32 logsumexp of up to 152064 terms
carries some 1e-6, at any offset of the row, because the row's maximum is subtracted before anything
is rounded. The oracle is fp64 on the same rounded logits.
"""

from __future__ import annotations

import math
from typing import Any

import draws
import pytest
import torch
from torch import Tensor

import fastppo

NATS = 1e-5
LOW = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", LOW, ids=("fp32", "bf16", "fp16"))


def assert_row_maths(logits: Tensor, tokens: Tensor, **softmax: Any) -> None:
    """token_stats, ppo_loss and its gradient, against fp64 on the same numbers."""
    x = logits.detach().double().requires_grad_()
    n = len(tokens)
    log_p = draws.log_softmax(x, **softmax)
    old = (log_p.gather(-1, tokens[:, None])[:, 0] + 0.1).float().detach()
    advantages = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0)
    w = torch.full((n,), 1 / n)
    expected = draws.exact(x, tokens, old, advantages, w, entropy_coef=0.5, **softmax)
    (expected_grad,) = torch.autograd.grad(expected.loss, x)
    leaf = logits.detach().clone().requires_grad_()
    out = fastppo.ppo_loss(
        leaf, tokens, old, advantages, entropy_coef=0.5, **softmax, denominator=float(n)
    )
    stats = fastppo.token_stats(leaf.detach(), tokens, **softmax)
    for actual in (out, stats):
        for name in ("logprobs", "entropy"):
            error = (getattr(actual, name).double() - getattr(expected, name)).abs().max()
            assert error <= NATS, f"{name} is off by {error:.2e} nats"
    # A ratio is e^logprob: 1e-5 nats are 1e-5 of it.
    assert (out.loss.double() - expected.loss).abs() <= 2e-5 * (1 + expected.loss.abs())
    (grad,) = torch.autograd.grad(out.loss, leaf)
    rounding = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-10}[logits.dtype]
    # fp16 has nothing between 0 and 6e-8
    floor = 6e-8 if logits.dtype == torch.float16 else 1e-30
    error = (grad.double() - expected_grad).abs()
    assert (
        error <= (2e-5 + rounding) * expected_grad.abs() + 2e-5 * expected_grad.abs().max() + floor
    ).all()


@dtypes
@pytest.mark.parametrize("offset", [0, 1000, 10_000, -10_000])
@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_no_offset_of_the_row_costs_digits(
    dtype: torch.dtype, offset: float, temperature: float
) -> None:
    """`Σ e^(z−m)·z` would be off by 3e-4 nats at 1000, `z_y − logsumexp` by 5e-4 at 10000."""
    logits = (3 * torch.randn(6, 1009) + offset).to(dtype)
    assert_row_maths(logits, torch.randint(1009, (6,)), temperature=temperature)


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(152064, torch.bfloat16), (50257, torch.float16), (3, torch.float32)],
    ids=str,
)
def test_padded_vocabulary_columns_do_not_enter_the_logsumexp(
    vocab: int, dtype: torch.dtype
) -> None:
    """Vocabularies that are no multiple of a block, and one that is. No logprob exceeds 0."""
    logits = (2 * torch.randn(3, vocab) - 5).to(dtype)
    tokens = torch.tensor([0, vocab - 1, vocab // 2])
    assert_row_maths(logits, tokens, temperature=0.9)
    assert (fastppo.token_logprobs(logits, tokens) < 0).all()


@pytest.mark.parametrize("kind", ["flat", "one peak over a flat row", "spread"])
def test_sums_over_a_large_vocabulary_keep_their_digits(kind: str) -> None:
    """152064 equal addends: where a running sum rounds the same way each time."""
    vocab = 152064
    row = {
        "flat": torch.full((vocab,), 0.1),
        "one peak over a flat row": torch.zeros(vocab).index_fill_(0, torch.tensor(7), 12.3),
        "spread": 5 * torch.randn(vocab),
    }[kind]
    assert_row_maths(row.expand(2, -1).contiguous(), torch.tensor([7, 11]))
    if kind == "flat":
        entropy = fastppo.token_stats(row[None], torch.tensor([0])).entropy
        assert entropy.item() == pytest.approx(math.log(vocab), abs=NATS)


@dtypes
@pytest.mark.parametrize("left", [2, 100])
def test_a_bias_of_minus_infinity_masks_the_vocabulary_of_a_fused_head(
    dtype: torch.dtype, left: int
) -> None:
    """No NaN, the same loss and gradient as without the columns, and none in them."""
    data = draws.batch((4,), 101, dtype)
    kept = torch.randperm(101)[:left].sort().values
    bias = torch.full((101,), -torch.inf).index_fill_(0, kept, 0.0).to(dtype)
    picks = torch.randint(left, (4,))
    hidden = data.logits.detach().requires_grad_()
    small = data.logits[:, kept].detach().requires_grad_()
    old = fastppo.token_logprobs(small, picks).detach() + 0.1
    masked = fastppo.linear_ppo_loss(
        hidden,
        torch.eye(101, dtype=dtype),
        kept[picks],
        old,
        data.advantages,
        bias=bias,
        entropy_coef=0.1,
    )
    smaller = fastppo.ppo_loss(small, picks, old, data.advantages, entropy_coef=0.1)
    torch.testing.assert_close(masked[:3], smaller[:3], rtol=0, atol=NATS)
    (grad,) = torch.autograd.grad(masked.loss, hidden)
    (small_grad,) = torch.autograd.grad(smaller.loss, small)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    wanted = torch.zeros_like(grad).index_copy_(1, kept, small_grad)
    torch.testing.assert_close(grad, wanted, rtol=rounding, atol=rounding * 0.1)
    assert (grad.index_fill(1, kept, 0.0) == 0).all()


# ----------------------------------------------------------------------- the lm-head's own gradient


def test_a_soft_caps_gradient_keeps_its_digits_near_the_cap() -> None:
    """tanh(3.8): the slope 1 − tanh² would be off by 1.6e-5."""
    rows = torch.linspace(90, 114, 50).repeat(4, 1)
    tokens, old, advantages = torch.arange(4), torch.full((4,), -4.0), torch.ones(4)
    gradients = []
    for dtype in (torch.float64, torch.float32):
        logits = rows.to(dtype).requires_grad_()
        fastppo.ppo_loss(
            logits, tokens, old.to(dtype), advantages.to(dtype), softcap=30.0, clip_ratio=None
        ).loss.backward()
        assert logits.grad is not None
        gradients.append(logits.grad.double())
    exact, actual = gradients
    assert ((actual - exact).abs().amax(-1) / exact.abs().amax(-1)).max() < 1e-5
