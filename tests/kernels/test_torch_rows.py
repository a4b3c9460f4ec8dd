"""The torch backend of the row operations against the definition, and what its chunks promise.

test_losses.py goes through every keyword of the public functions, which run this backend on a CPU;
here are its own functions, and what no keyword reaches. fp64 on both sides: 1e-11 of the largest
entry.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fastppo_kernels import definition, torch_rows
from fastppo_kernels.records import Objective, StatsGradients
from rows import PLAIN, assert_gradient, draw, in_fp64, logprobs_of, operands
from torch import Tensor

N, V = 13, 37


def assert_near(found: Tensor, wanted: Tensor, tolerance: float = 1e-11) -> None:
    scale = max(1e-300, wanted.abs().max().item())
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=tolerance * scale)


@pytest.fixture(params=[1, 5, 1000], ids=lambda rows: f"{rows} rows a chunk")
def row_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setitem(torch_rows.ROW_CHUNK_ELEMENTS, "cpu", request.param * V)
    return request.param


TERMS: dict[str, dict[str, Any]] = {
    "policy": {},
    "entropy": {"entropy_coef": 0.1},
    "k3": {"kl_coef": 0.2},
    "ratio·k1": {"kl_coef": 0.2, "kl_estimator": "k1", "kl_ratio_weighted": True},
    "ratio·k3": {"kl_coef": 0.2, "kl_ratio_weighted": True},
    "full KL": {"kl_coef": 0.2, "kl_estimator": "full"},
    "everything": {
        "kl_coef": 0.2,
        "kl_estimator": "full",
        "entropy_coef": -0.3,
        "dual_clip": 1.5,
        "temperature": torch.linspace(0.4, 2.0, N),
        "logit_scale": 1.5,
        "softcap": 8.0,
    },
}


def arguments(
    term: str, masked: bool = False, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """Flat ones: logits in `dtype`, the rest in fp64 for fp64 and else in fp32."""
    given = draw(N, V) | TERMS[term]
    given["ref_logprobs"] = given["old_logprobs"] - 0.3
    given["importance_weights"] = torch.rand(N) + 0.5
    given["ref_logits"] = draw(N, V, seed=1)["logits"] if "full" in str(TERMS[term]) else None
    if masked:
        given["weights"][::3] = 0.0
    if dtype == torch.float64:
        return in_fp64(given)
    return given | {"logits": given["logits"].to(dtype)}


@pytest.mark.usefixtures("row_chunk")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("term", TERMS)
def test_the_loss_and_its_gradient_are_the_definition_s(term: str, masked: bool) -> None:
    given, rest = operands(arguments(term, masked))
    wanted = definition.ppo_loss(*given, **rest)
    found = torch_rows.ppo_loss(*given, **rest)
    again = torch_rows.ppo_loss(*given, **rest, need_grad=False)
    assert again.grad is None
    for name in ("sums", "logprobs", "entropy", "kl"):
        assert_near(getattr(found, name), getattr(wanted, name))
        assert torch.equal(getattr(again, name), getattr(found, name))
    assert found.grad is not None
    assert wanted.grad is not None
    assert_near(found.grad, wanted.grad)
    over = given._replace(logits=given.logits.clone())
    inplace = torch_rows.ppo_loss(*over, **rest, inplace=True)
    assert inplace.grad is over.logits
    assert torch.equal(over.logits, found.grad)


@pytest.mark.usefixtures("row_chunk")
@pytest.mark.parametrize("upstream", ["all", "some rows", "logprob alone"])
@pytest.mark.parametrize("term", ["policy", "full KL", "everything"])
def test_statistics_and_their_gradients_are_the_definition_s(term: str, upstream: str) -> None:
    given, rest = operands(arguments(term))
    ref, tokens = rest["ref_logits"], given.per_token.tokens
    x = given.logits.clone().requires_grad_()
    wanted = definition.token_stats(x, tokens, given.softmax, ref_logits=ref)
    found = torch_rows.token_stats(given.logits, tokens, given.softmax, ref_logits=ref)
    for one, other in zip(found, wanted, strict=True):
        assert_near(one, other.detach())
    g = torch.randn(3, N, dtype=torch.float64)
    if upstream == "some rows":
        g[:, ::2] = 0
    grads = StatsGradients(g[0], g[1], g[2] if ref is not None else None)
    if upstream == "logprob alone":
        grads = StatsGradients(g[0])
    total = sum((x * y).sum() for x, y in zip(wanted, grads, strict=False) if y is not None)
    (wanted_grad,) = torch.autograd.grad(total, x)
    found_grad = torch_rows.token_stats_backward(
        grads, given.logits, tokens, found, given.softmax, ref_logits=ref
    )
    assert_near(found_grad, wanted_grad)


@pytest.mark.usefixtures("row_chunk")
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_chunk_holds_the_gradients_of_the_rows_that_have_one(
    term: str, dtype: torch.dtype
) -> None:
    """One behind the other in their order, filled up to a multiple of GEMM_ROWS with rows of 0."""
    given, rest = operands(arguments(term, dtype=dtype))
    given.per_token.advantages[::2] = 0.0
    wanted = torch_rows.ppo_loss(*given, **rest)
    assert wanted.grad is not None
    over = given._replace(logits=given.logits.clone())
    found, live = torch_rows.chunk_ppo_loss(*over, **rest)
    for name in ("sums", "logprobs", "entropy", "kl"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))
    assert found.grad is not None
    assert found.grad.data_ptr() == over.logits.data_ptr()
    moving = (wanted.grad != 0).any(1)
    assert (live is None) == bool(moving.all())
    live = torch.arange(N) if live is None else live
    assert len(live) == min(N, -(-int(moving.sum()) // torch_rows.GEMM_ROWS) * torch_rows.GEMM_ROWS)
    assert set(moving.nonzero().flatten().tolist()) <= set(live.tolist())
    assert torch.equal(found.grad, wanted.grad[live])


def test_a_chunk_without_any_gradient_says_so() -> None:
    given, rest = operands(arguments("policy"))
    still = given.per_token._replace(advantages=torch.zeros(N, dtype=torch.float64))
    found, live = torch_rows.chunk_ppo_loss(*given._replace(per_token=still), **rest)
    assert found.grad is None
    assert live is None
    without, _ = torch_rows.chunk_ppo_loss(*given, **rest, need_grad=False)
    assert without.grad is None


@pytest.mark.parametrize("need_grad", [True, False])
def test_a_column_at_the_lowest_number_is_ruled_out_as_one_at_minus_infinity_is(
    need_grad: bool,
) -> None:
    """0 times it is 0 and no NaN, so nothing but its size shows it; a token stands in it too."""
    given, rest = operands(draw(N, V) | {"entropy_coef": 4.0})
    x = given.logits.float()
    x[:, 1] = torch.finfo(torch.float32).min
    given.per_token.tokens[0] = 1
    given = given._replace(logits=x)
    found = torch_rows.ppo_loss(*given, **rest, need_grad=need_grad)
    ruled_out = x.masked_fill(x < -1e38, -torch.inf)
    wanted = torch_rows.ppo_loss(*given._replace(logits=ruled_out), **rest, need_grad=need_grad)
    for name in ("sums", "logprobs", "entropy", "kl"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    if need_grad:
        assert found.grad is not None
        assert found.grad.isfinite().all()
        assert torch.equal(found.grad, wanted.grad)


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


@pytest.mark.parametrize("below", [3.0, 12.0, 19.0, 30.0])
def test_the_gradient_of_ratio_k3_keeps_its_digits_below_the_reference(below: float) -> None:
    """e^{−d} cancels between the estimate and its slope: at 19 nats all of fp32 would be gone."""
    given = draw(N, V) | {"kl_coef": 0.2, "kl_ratio_weighted": True}
    given["advantages"][:] = 0.0
    given["ref_logprobs"] = logprobs_of(given["logits"], given["tokens"]).float() + below
    exact, _ = operands(in_fp64(given))
    wanted = definition.ppo_loss(*exact).grad
    found = torch_rows.ppo_loss(*operands(given)[0]).grad
    assert wanted is not None
    assert found is not None
    assert_gradient(found, wanted)


def test_an_unknown_estimator_is_refused() -> None:
    given, _ = operands(arguments("k3"))
    objective = Objective(0.8, 1.2, kl_coef=0.1, kl_estimator="k4")
    with pytest.raises(ValueError, match="kl_estimator must be k1, k2, k3 or full, got 'k4'"):
        torch_rows.ppo_loss(given.logits, given.per_token, objective, PLAIN)
