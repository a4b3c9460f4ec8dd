"""The definition in chunks is the definition: fp64 on both sides, 1e-11 of the largest entry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fastppo_kernels import definition, torch_rows
from fastppo_kernels.records import StatsGradients
from rows import draw, in_fp64, operands
from torch import Tensor

N, V = 13, 37


def assert_near(found: Tensor, wanted: Tensor) -> None:
    tolerance = 1e-11 * max(1e-300, wanted.abs().max().item())
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


def arguments(*, full_kl: bool) -> dict[str, Any]:
    """In fp64; a third of the rows count for nothing and hold NaN."""
    given = draw(N, V) | {"entropy_coef": 0.1, "kl_coef": 0.2}
    given["temperature"] = torch.linspace(0.4, 2.0, N)
    given["ref_logprobs"] = given["old_logprobs"] - 0.3
    if full_kl:
        given |= {"kl_estimator": "full", "ref_logits": draw(N, V, seed=1)["logits"]}
    given["weights"][::3] = 0.0
    given["logits"][::3] = torch.nan
    return in_fp64(given)


@pytest.fixture(params=[1, 5, 1000], ids=lambda rows: f"{rows} rows a chunk", autouse=True)
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_rows, "CHUNK_ELEMENTS", request.param * V)


@pytest.mark.parametrize("full_kl", [False, True])
def test_the_loss_and_its_gradient(full_kl: bool) -> None:
    given, rest = operands(arguments(full_kl=full_kl))
    wanted = definition.ppo_loss(*given, **rest)
    with torch._C._AutoDispatchBelowAutograd():  # as inside an operator, where autograd is off
        found = torch_rows.ppo_loss(*given, **rest)
    without = torch_rows.ppo_loss(*given, **rest, need_grad=False)
    assert without.grad is None
    for again in (found, without):
        for name in ("sums", "logprobs", "entropy", "kl"):
            assert_near(getattr(again, name), getattr(wanted, name))
    assert found.grad is not None
    assert wanted.grad is not None
    assert_near(found.grad, wanted.grad)
    over = given._replace(logits=given.logits.clone())
    chunk, live = torch_rows.chunk_ppo_loss(*over, **rest)
    assert live is None
    assert chunk.grad is over.logits
    assert torch.equal(over.logits, found.grad)


@pytest.mark.parametrize("full_kl", [False, True])
def test_the_statistics_and_their_gradient(full_kl: bool) -> None:
    """The rows that hold NaN have no derivative."""
    given, rest = operands(arguments(full_kl=full_kl))
    tokens, ref = given.per_token.tokens, rest.get("ref_logits")
    counts = given.per_token.weights != 0
    found = torch_rows.token_stats(given.logits, tokens, given.softmax, ref_logits=ref)
    x = given.logits[counts].requires_grad_()
    wanted = definition.token_stats(
        x,
        tokens[counts],
        given.softmax.at(counts),
        ref_logits=None if ref is None else ref[counts],
    )
    for one, other in zip(found.at(counts), wanted, strict=True):
        assert_near(one, other.detach())
    g = torch.randn(3, N, dtype=torch.float64) * counts
    grads = StatsGradients(g[0], g[1], g[2] if full_kl else None)
    total = sum(
        (x * y).sum() for x, y in zip(wanted, grads.at(counts), strict=False) if y is not None
    )
    (wanted_grad,) = torch.autograd.grad(total, x)
    found_grad = torch_rows.token_stats_backward(
        grads, given.logits, tokens, found, given.softmax, ref_logits=ref
    )
    assert_near(found_grad[counts], wanted_grad)
    assert (found_grad[~counts] == 0).all()


def test_rows_of_a_view_are_taken_where_they_lie() -> None:
    given, _ = operands(in_fp64(draw(6, V)))
    padded = torch.full((3, 3, V), torch.nan, dtype=torch.float64)
    padded[:, :-1] = given.logits.view(3, 2, V)
    wanted = torch_rows.ppo_loss(*given)
    found = torch_rows.ppo_loss(*given._replace(logits=padded[:, :-1]))
    assert torch.equal(found.sums, wanted.sums)
    assert found.grad is not None
    assert wanted.grad is not None
    assert torch.equal(found.grad.flatten(0, 1), wanted.grad)
