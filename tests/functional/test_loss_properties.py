"""Properties of every loss: independence of splits, the first update, the same bits.

Tolerance of the splits: fp64 sums of the same terms in another order, 1e-12.
"""

from __future__ import annotations

import itertools
from typing import Any

import draws
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastppo

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum")


# ---------------------------------------------------------- property 1: independence of the split


class Trunk:
    """Policy head and value head on shared hidden states [B, T, H], with a rollout."""

    def __init__(self, lengths: list[int], length: int, seed: int) -> None:
        batch, vocab, width = len(lengths), 7, 3
        self.data = draws.batch((batch, length), vocab, seed=seed)
        self.mask = torch.arange(length) < torch.tensor(lengths).unsqueeze(1)
        g = torch.Generator().manual_seed(seed)
        draw = {"generator": g, "dtype": torch.float64}
        self.hidden = torch.randn(batch, length, width, **draw)
        self.weight = torch.randn(vocab, width, **draw).requires_grad_()
        self.value = torch.randn(width, **draw).requires_grad_()
        self.returns = torch.randn(batch, length, **draw)
        self.ref_logprobs = torch.randn(batch, length, **draw)

    def denominator(self, aggregation: str) -> float:
        """The global denominator, which the trainer passes for every microbatch."""
        if aggregation.startswith("seq-"):
            return max(1, int(self.mask.any(1).sum()))
        return max(1, int(self.mask.sum())) if aggregation == "token-mean" else 1.0

    def loss(self, part: Any, linear: bool, **options: Any) -> Tensor:
        """Policy and value loss of the tokens selected by `part` from [B, T]."""
        hidden, mask = self.hidden[part], self.mask[part]
        _, tokens, old, advantages = (x[part] for x in self.data)
        keywords: dict[str, Any] = {
            "entropy_coef": 0.1,
            "kl_coef": 0.2,
            "ref_logprobs": self.ref_logprobs[part],
            **options,
        }
        if linear:
            out = fastppo.linear_ppo_loss(
                hidden, self.weight, tokens, old, advantages, mask, chunk_size=3, **keywords
            )
        else:
            logits = hidden @ self.weight.T
            out = fastppo.ppo_loss(logits, tokens, old, advantages, mask, **keywords)
        values = hidden @ self.value
        return out.loss + 0.5 * fastppo.value_loss(values, self.returns[part], mask, **options)

    def gradients(
        self, parts: list[Any], linear: bool, weights: Tensor | None = None, **options: Any
    ) -> list[Tensor]:
        """[loss, dW of the policy head, dW of the value head], accumulated over microbatches."""
        self.weight.grad = None
        self.value.grad = None
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            if weights is not None:
                options["weights"] = weights[part]
            loss = self.loss(part, linear, **options)
            loss.backward()
            total += loss.detach()
        assert self.weight.grad is not None
        assert self.value.grad is not None
        return [total, self.weight.grad.clone(), self.value.grad.clone()]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


trunks = st.builds(
    Trunk,
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    length=st.just(5),
    seed=st.integers(0, 1000),
)
property_based = settings(max_examples=30)


@property_based
@given(trunks, st.data(), st.sampled_from(AGGREGATIONS), st.booleans(), st.booleans())
def test_any_split_into_microbatches_gives_the_same_loss_and_gradients(
    trunk: Trunk, data: st.DataObject, aggregation: str, linear: bool, is_tensor: bool
) -> None:
    batch = len(trunk.mask)
    order = data.draw(st.permutations(range(batch)))
    cuts = sorted(data.draw(st.sets(st.integers(1, batch - 1)))) if batch > 1 else []
    parts = [order[a:b] for a, b in itertools.pairwise([0, *cuts, batch])]
    denominator: Any = trunk.denominator(aggregation)
    if is_tensor:
        denominator = torch.tensor(denominator)
    actual = trunk.gradients(parts, linear, aggregation=aggregation, denominator=denominator)
    assert_same(actual, trunk.gradients([slice(None)], linear, aggregation=aggregation))


@property_based
@given(trunks, st.data(), st.sampled_from(AGGREGATIONS), st.booleans())
def test_any_packing_of_tokens_gives_the_same_loss_and_gradients(
    trunk: Trunk, data: st.DataObject, aggregation: str, linear: bool
) -> None:
    """Flat token lists, split anywhere, also within sequences: weights carry the normalizer."""
    batch, length = trunk.mask.shape
    weights = fastppo.aggregation_weights(trunk.mask, aggregation, dtype=torch.float64)
    order = data.draw(st.permutations(range(batch * length)))
    cut = data.draw(st.integers(1, batch * length - 1))
    parts = [
        (torch.tensor(x) // length, torch.tensor(x) % length) for x in (order[:cut], order[cut:])
    ]
    actual = trunk.gradients(parts, linear, weights=weights)
    assert_same(actual, trunk.gradients([slice(None)], linear, aggregation=aggregation))


# -------------------------------------------------------- property 2: the first update is on-policy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_policy_against_its_own_logprobs_has_ratio_1_and_no_kl(
    dtype: torch.dtype,
) -> None:
    """To the bit: rollout and learner compute a logprob by the same operations."""
    data = draws.batch((50,), 1009, dtype).leaf()
    old = fastppo.token_logprobs(data.logits, data.tokens, temperature=0.7).detach()
    for estimator in ("k1", "k2", "k3", "full"):
        out = fastppo.ppo_loss(
            data.logits,
            data.tokens,
            old,
            data.advantages,
            ref_logits=data.logits.detach(),
            kl_coef=0.1,
            kl_estimator=estimator,
            temperature=0.7,
        )
        assert torch.equal(out.logprobs, old)
        assert out.metrics["ratio_max"].item() == out.metrics["ratio_mean"].item() == 1.0
        assert out.metrics["approx_kl"].item() == out.metrics["clip_fraction"].item() == 0.0
        assert (out.kl == 0).all()
        torch.testing.assert_close(out.loss.detach(), -data.advantages.mean())


# --------------------------------------------------------------- property 3: the same bits each run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_same_inputs_give_the_same_bits_run_after_run(dtype: torch.dtype) -> None:
    """For loss, statistics and gradients, at any address of the logits.

    The head's operands keep their alignment, like all allocations of torch, because a BLAS may
    choose its kernel by it.
    """
    n, vocab, width = 37, 2003, 16
    data = draws.batch((n,), vocab, dtype)
    hidden = torch.randn(n, width).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width).div(4).to(dtype).requires_grad_()
    mask = torch.rand(n) < 0.7
    options: dict[str, Any] = {
        "entropy_coef": 0.1,
        "kl_coef": 0.1,
        "ref_logprobs": data.old_logprobs,
    }

    def outputs(offset: int) -> list[Tensor]:
        """Results for logits that start at an offset into their allocation, in elements."""
        room = torch.zeros(n * vocab + offset, dtype=dtype)
        logits = room[offset:].view(n, vocab).copy_(data.logits).detach().requires_grad_()
        stats = fastppo.token_stats(logits, data.tokens, ref_logits=data.logits * 0.9)
        assert stats.kl is not None
        fused = fastppo.ppo_loss(logits, *data[1:], mask, **options)
        linear = fastppo.linear_ppo_loss(hidden, weight, *data[1:], mask, chunk_size=8, **options)
        logprobs = fastppo.linear_token_logprobs(hidden, weight, data.tokens, chunk_size=8)
        total = fused.loss + linear.loss + (logprobs + stats.logprobs + stats.kl).mean()
        grads = torch.autograd.grad(total, (logits, hidden, weight))
        return [fused.loss, linear.loss, *fused[1:4], *linear[1:4], *stats, logprobs, *grads]

    first = outputs(0)
    for offset in (0, 1, 8):
        torch.testing.assert_close(outputs(offset), first, rtol=0, atol=0)
