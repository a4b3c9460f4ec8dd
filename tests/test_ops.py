"""The custom operators: registered as torch wants them, and transparent to torch.compile.

Compiled code runs the same operators on the same inputs, so its results are the same bits but for
the few elementwise steps around them: 1e-12 in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import naive
import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import fastppo
from fastppo import ops

N, V, H = 6, 11, 5
SOFTMAX = {"temperature": 0.7, "logit_scale": 1.5, "softcap": 20.0, "backend": "torch"}
LOSS = {
    **SOFTMAX,
    "clip_low": 0.2,
    "clip_high": 0.3,
    "dual_clip": 2.0,
    "kl_coef": 0.1,
    "kl_estimator": "full",
    "entropy_coef": 0.1,
}
GEMM: dict[str, Any] = {"chunk_size": 4, "compute_dtype": torch.float32}
COMPACT = {"compact": True}


def operands() -> dict[str, Any]:
    data = naive.batch((N,), V, torch.float32)
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0]) / 4
    per_token = (*data[1:], weights, torch.rand(N), torch.randn(N), torch.rand(N) + 0.5)
    stats = ops.token_stats_op(data.logits, data.tokens, data.logits * 0.9, None, **SOFTMAX)
    head = (torch.randn(N, H), torch.randn(V, H), torch.randn(V))
    linear = ops.linear_token_stats_op(*head, data.tokens, None, **GEMM, **SOFTMAX)
    return {
        "logits": data.logits,
        "ref": data.logits * 0.9,
        "tokens": data.tokens,
        "per_token": per_token,
        "stats": stats,
        "head": head,
        "linear": linear,
        "grad": torch.randn(N),
    }


def calls() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Each operator with arguments that fill every slot, and with the optional ones absent."""
    o = operands()
    bare = (*o["per_token"][:4], None, None, None)
    rows = torch.randn(2, 5)
    flat = torch.randn(7)
    starts = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0]]).bool()
    gae = {"gamma": 0.9, "lam": 0.95, "backend": "torch"}
    shaped = gae | {"kl_coef": 0.1, "kl_estimator": "k1", "score_clip": 1.0}
    plain = LOSS | {"kl_estimator": "k3"}
    view = torch.randn(2, 4, V)[:, :-1]
    transposed = (torch.randn(H, N).T, torch.randn(H, V).T, torch.randn(V))
    return {
        "token_stats": (
            ops.token_stats_op,
            (o["logits"], o["tokens"], o["ref"], o["per_token"][-1]),
            SOFTMAX,
        ),
        "token_stats of a view": (ops.token_stats_op, (view, o["tokens"], None, None), SOFTMAX),
        "token_stats_backward": (
            ops.token_stats_backward_op,
            (o["grad"], o["grad"], o["grad"], o["logits"], o["tokens"], o["stats"], o["ref"], None),
            SOFTMAX,
        ),
        "ppo_loss": (
            ops.ppo_loss_op,
            (o["logits"], *o["per_token"], o["ref"], True),
            LOSS,
        ),
        "ppo_loss of a view": (ops.ppo_loss_op, (view, *bare, None, True), plain),
        "ppo_loss, no gradient": (ops.ppo_loss_op, (o["logits"], *bare, None, False), plain),
        "ppo_loss_inplace": (
            ops.ppo_loss_inplace_op,
            (o["logits"].clone(), *o["per_token"], o["ref"], True),
            LOSS,
        ),
        "linear_ppo_loss": (
            ops.linear_ppo_loss_op,
            (*o["head"], *o["per_token"], *o["head"], [True, True, True]),
            COMPACT | GEMM | LOSS,
        ),
        "linear_ppo_loss, frozen": (
            ops.linear_ppo_loss_op,
            (*o["head"][:2], None, *bare, None, None, None, [True, False, False]),
            COMPACT | GEMM | plain,
        ),
        "linear_ppo_loss, transposed": (
            ops.linear_ppo_loss_op,
            (*transposed, *bare, None, None, None, [True, True, True]),
            COMPACT | GEMM | plain,
        ),
        "linear_token_stats_backward, transposed": (
            ops.linear_token_stats_backward_op,
            (*transposed, o["tokens"], None, o["grad"], o["grad"], o["linear"], [True] * 3),
            GEMM | SOFTMAX,
        ),
        "linear_token_stats": (
            ops.linear_token_stats_op,
            (*o["head"], o["tokens"], None),
            GEMM | SOFTMAX,
        ),
        "linear_token_stats_backward": (
            ops.linear_token_stats_backward_op,
            (*o["head"], o["tokens"], None, o["grad"], o["grad"], o["linear"], [True, False, True]),
            GEMM | SOFTMAX,
        ),
        "gae": (ops.gae_op, (rows, rows, mask, None, None, None, torch.randn(2)), gae),
        "gae, packed": (ops.gae_op, (flat, flat, None, starts, torch.rand(3), None, None), gae),
        "shaped_advantages": (
            ops.shaped_advantages_op,
            (torch.randn(2), rows, rows, rows, mask, None, None, None, None, rows),
            shaped,
        ),
        "whiten": (ops.whiten_op, (rows, mask, None), {"shift_mean": True, "backend": "torch"}),
    }


@pytest.mark.parametrize("name", calls())
def test_operators_mutate_nothing_undeclared_and_their_fakes_tell_the_truth(name: str) -> None:
    """torch's own checks: schema, aliasing, and shapes, dtypes and strides under fake tensors."""
    operator, arguments, keywords = calls()[name]
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    found = opcheck(operator, arguments, keywords, test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("name", [name for name in calls() if name.startswith("linear")])
def test_the_launcher_s_fused_head_keeps_its_promises_to_torch(name: str) -> None:
    """With the Triton backend, on a GPU or in the interpreter."""
    operator, arguments, keywords = calls()[name]
    found = opcheck(
        operator, arguments, keywords | {"backend": "triton"}, test_utils=("test_faketensor",)
    )
    assert set(found.values()) == {"SUCCESS"}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("term", ["policy", "everything"])
def test_losses_compile_without_a_graph_break(term: str) -> None:
    """One graph of policy, value and linear loss, with its backward; gradients by every input."""
    data = naive.batch((2, 3), V)
    keywords = naive.options(data, term)
    linear = dict(keywords)
    if "ref_logits" in linear:
        linear["ref_hidden"] = linear.pop("ref_logits")
        linear["ref_weight"] = torch.eye(V, dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    hidden, weight = torch.randn(2, 3, H).double(), torch.randn(V, H).double()

    def losses(logits: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        fused = fastppo.ppo_loss(logits, *data[1:], mask, **keywords)
        head = fastppo.linear_ppo_loss(hidden, weight, *data[1:], mask, chunk_size=2, **linear)
        stats = fastppo.token_stats(logits, data.tokens)
        logprobs = fastppo.linear_token_logprobs(hidden, weight, data.tokens)
        values = hidden.sum(-1)
        total = fastppo.total_loss(
            stats.logprobs, *data[2:], values, data.advantages, logits, mask
        )["total_loss"]
        loss = fused.loss + head.loss + stats.entropy.mean() + logprobs.mean() + total
        return loss, fused.logprobs, head.metrics["clip_fraction"]

    leaves = [x.requires_grad_() for x in (data.logits, hidden, weight)]
    wanted = losses(*leaves)
    found = compiled(losses)(*leaves)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(found[0], leaves),
        torch.autograd.grad(wanted[0], leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_advantages_compile_without_a_graph_break() -> None:
    scores, (values, logprobs, ref) = torch.randn(4), torch.randn(3, 4, 6)
    mask = torch.rand(4, 6) < 0.7

    def advantages(*inputs: Tensor) -> tuple[Tensor, ...]:
        out = fastppo.compute_advantages(*inputs, mask, kl_coef=0.1)
        return (*out, *fastppo.gae(inputs[1], inputs[2], mask), fastppo.whiten(inputs[1], mask))

    inputs = (scores, values, logprobs, ref)
    for one, other in zip(compiled(advantages)(*inputs), advantages(*inputs), strict=True):
        assert torch.equal(one, other)


def test_the_in_place_loss_compiles_and_gives_the_same_bits() -> None:
    data = naive.batch((N,), V).leaf()

    def loss(leaf: Tensor) -> tuple[Tensor, Tensor]:
        out = fastppo.ppo_loss(leaf * 1, *data[1:], entropy_coef=0.1, inplace=True)
        return out.loss, out.logprobs

    wanted, found = loss(data.logits), compiled(loss)(data.logits)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    grads = [torch.autograd.grad(out[0], data.logits)[0] for out in (found, wanted)]
    assert torch.equal(*grads)


def test_options_that_move_between_calls_still_compile() -> None:
    """An adaptive β is another float at every step; torch.compile then makes it a variable."""
    import fastppo

    def loss(logits: torch.Tensor, kl_coef: float, entropy_coef: float) -> torch.Tensor:
        return fastppo.ppo_loss(
            logits,
            torch.tensor([1, 2]),
            torch.full((2,), -2.0),
            torch.ones(2),
            ref_logprobs=torch.full((2,), -2.1),
            kl_coef=kl_coef,
            entropy_coef=entropy_coef,
        ).loss

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    logits = torch.randn(2, 7)
    for coefficients in ((0.1, 0.01), (0.2, 0.02), (0.35, 0.03)):
        torch.testing.assert_close(compiled(logits, *coefficients), loss(logits, *coefficients))
