"""The tokens' statistics equal the definition, in value and gradient, from logits and hidden
states.

fp64 has some hundred roundings of 1e-16 on both sides, hence 1e-11; fp32 has 6e-8, hence 1e-5.
test_losses.py and kernels/test_logits.py test the maths of a row further.
"""

from __future__ import annotations

from typing import Any

import draws
import pytest
import torch
from fastppo_kernels import definition
from trajectories import assert_close

import fastppo

N, V, H = 6, 11, 5


SOFTMAX_KEYWORDS: list[dict[str, Any]] = [
    {},
    {"temperature": torch.tensor([0.5, 1.0, 2.0, 0.3], dtype=torch.float64)},
    {"temperature": torch.tensor(0.7)},
    {"temperature": 0.6, "logit_scale": 1.5, "softcap": 3.0},
]
softmaxes = pytest.mark.parametrize("softmax", SOFTMAX_KEYWORDS, ids=lambda k: "-".join(k) or "T=1")


@softmaxes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=("fp64", "fp32"))
@pytest.mark.parametrize("path", ["logits", "linear"])
def test_statistics_and_gradients_equal_the_definition(
    path: str, dtype: torch.dtype, softmax: dict[str, Any]
) -> None:
    data = draws.batch((4,), V, dtype)
    ref = data.logits + draws.like(data.logits, 3).to(dtype)
    x = data.logits.double().requires_grad_()
    expected = definition.token_stats(
        x, data.tokens, draws.as_softmax(**softmax), ref_logits=ref.double()
    )
    exact = (expected.logprobs, expected.entropy, expected.kl)
    upstream = torch.randn(3, 4, dtype=torch.float64)
    (expected_grad,) = torch.autograd.grad(exact, x, list(upstream))
    leaf = data.leaf().logits
    if path == "logits":
        actual = fastppo.token_stats(leaf, data.tokens, ref_logits=ref, **softmax)
    else:
        identity = torch.eye(V, dtype=dtype)
        actual = fastppo.linear_token_stats(
            leaf, identity, data.tokens, ref_hidden=ref, ref_weight=identity, chunk_size=3,
            **softmax,
        )  # fmt: skip
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    for one, other in zip(actual, exact, strict=True):
        assert_close(one, other, tolerance)
    (grad,) = torch.autograd.grad(tuple(actual), leaf, list(upstream.to(dtype)))
    assert_close(grad, expected_grad, tolerance)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_row_without_an_upstream_gradient_may_hold_anything(backend: str) -> None:
    """Its gradient is 0, although 0·NaN is NaN."""
    logits, ref_logits = torch.randn(2, N, V)
    logits[2] = torch.nan
    ref_logits[2] = torch.nan
    logits.requires_grad_()
    tokens = torch.randint(V, (N,))
    stats = fastppo.token_stats(logits, tokens, ref_logits=ref_logits, backend=backend)
    assert stats.kl is not None
    counted = torch.arange(N) != 2
    total = sum(each[counted].sum() for each in (stats.logprobs, stats.entropy, stats.kl))
    (grad,) = torch.autograd.grad(total, logits)
    assert (grad[2] == 0).all()
    assert (grad[counted] != 0).all()


def test_without_a_reference_there_is_no_kl() -> None:
    hidden, weight, bias = draws.head((N,), V, H)
    tokens = torch.randint(V, (N,))
    stats = fastppo.linear_token_stats(hidden, weight, tokens, bias=bias)
    assert stats.kl is None
    assert fastppo.token_stats(hidden @ weight.T + bias, tokens).kl is None
    logprobs, entropy = fastppo.linear_token_logprobs(
        hidden, weight, tokens, bias=bias, return_entropy=True
    )
    assert torch.equal(logprobs, stats.logprobs)
    assert torch.equal(entropy, stats.entropy)
    alone = fastppo.linear_token_logprobs(hidden, weight, tokens, bias=bias)
    assert torch.equal(alone, stats.logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kl_of_a_head_to_itself_is_zero_and_so_is_its_gradient(dtype: torch.dtype) -> None:
    """To the bit: policy and reference are summed in one order."""
    hidden, weight, bias = draws.head((N,), 1009, H, dtype)
    stats = fastppo.linear_token_stats(
        hidden, weight, torch.randint(1009, (N,)), bias=bias, chunk_size=4,
        ref_hidden=hidden.detach(), ref_weight=weight.detach(), ref_bias=bias.detach(),
    )  # fmt: skip
    assert stats.kl is not None
    assert (stats.kl == 0).all()
    for grad in torch.autograd.grad(stats.kl.sum(), (hidden, weight, bias)):
        assert (grad == 0).all()
