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
@pytest.mark.parametrize("path", ["logits", "statistics", "linear"])
def test_a_masked_vocabulary_is_the_smaller_vocabulary(
    dtype: torch.dtype, left: int, path: str
) -> None:
    """−inf logits: no NaN, the same statistics and gradient as without the columns, 0 in them."""
    data = draws.batch((4,), 101, dtype)
    kept = torch.zeros(101, dtype=torch.bool)
    kept[torch.randperm(101)[:left]] = True
    small = data.logits[:, kept].detach().requires_grad_()
    picks = torch.randint(left, (4,))
    tokens = kept.nonzero().squeeze(-1)[picks]
    logits = torch.where(kept, data.logits, -torch.inf).requires_grad_()
    old = fastppo.token_logprobs(small, picks).detach() + 0.1
    ref = small.detach() * 0.8
    ref_full = torch.where(kept, data.logits * 0.8, -torch.inf)

    def loss(x: Tensor, y: Tensor, reference: Tensor) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"entropy_coef": 0.1, "kl_coef": 0.1}
        if path == "statistics":
            stats = fastppo.token_stats(x, y, ref_logits=reference)
            assert stats.kl is not None
            return (stats.logprobs + stats.entropy + stats.kl).mean(), *stats
        if path == "linear":  # a −inf bias masks the vocabulary of a fused head
            bias = torch.zeros(x.shape[-1], dtype=dtype)
            if x.shape[-1] == 101:
                bias[~kept] = -torch.inf
                x = torch.where(kept, x, 0.0)
            identity = torch.eye(x.shape[-1], dtype=dtype)
            return fastppo.linear_ppo_loss(
                x, identity, y, old, data.advantages, bias=bias, entropy_coef=0.1
            )[:3]
        out = fastppo.ppo_loss(
            x, y, old, data.advantages, ref_logits=reference, kl_estimator="full", **options
        )
        return out[:4]

    actual, expected = loss(logits, tokens, ref_full), loss(small, picks, ref)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=NATS)
    (grad,) = torch.autograd.grad(actual[0], logits)
    (small_grad,) = torch.autograd.grad(expected[0], small)
    assert (grad[:, ~kept] == 0).all()
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(grad[:, kept], small_grad, rtol=rounding, atol=rounding * 0.1)


# ----------------------------------------------------------------------- the lm-head's own gradient


def test_the_head_s_gradient_is_not_accumulated_in_bf16() -> None:
    """384 chunks that each add the same number: a bf16 sum stands still at 256 of them."""
    n, vocab, width = 384, 5, 4
    hidden = torch.ones(n, width).bfloat16()
    weight = torch.zeros(vocab, width).bfloat16().requires_grad_()
    tokens = torch.zeros(n, dtype=torch.int64)
    old, advantages = torch.full((n,), -math.log(vocab)), torch.ones(n)
    loss = fastppo.linear_ppo_loss(
        hidden, weight, tokens, old, advantages, chunk_size=1, aggregation="token-sum"
    ).loss
    (grad,) = torch.autograd.grad(loss, weight)
    # dW_j = Σ_t (p_j − [j = 0])·x_t with p = 1/5: the row's gradient and dW are rounded once each
    expected = torch.full((vocab, width), n / 5)
    expected[0] = -n * 4 / 5
    torch.testing.assert_close(grad.float(), expected, rtol=2**-7, atol=0)


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


def test_an_infinite_kl_that_is_only_reported_leaves_the_gradient_finite() -> None:
    logits = torch.randn(2, 6, requires_grad=True)
    reference = torch.randn(2, 6)
    reference[0, 3] = -torch.inf
    stats = fastppo.token_stats(logits, torch.tensor([1, 2]), ref_logits=reference)
    assert stats.kl is not None
    assert stats.kl[0] == torch.inf
    (stats.logprobs.sum() + stats.kl[1]).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
