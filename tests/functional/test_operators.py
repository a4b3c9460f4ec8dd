"""The custom operators: registered as torch wants them, and transparent to torch.compile.

Compiled code runs the same operators on the same inputs, so its results are the same bits but for
the few elementwise steps around them: 1e-12 in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import draws
import pytest
import torch
from fastppo_kernels.records import (
    Discounts,
    Gemm,
    GradientsWanted,
    Objective,
    PerToken,
    Projection,
    Shaping,
    Softmax,
    StatsGradients,
    Trajectory,
)
from torch import Tensor
from torch.library import opcheck

import fastppo
from fastppo.functional import operators as ops
from fastppo.functional.record_operator import Operator

N, V, H = 6, 11, 5
SOFTMAX = Softmax(0.7, None, 1.5, 20.0)
OBJECTIVE = Objective(0.8, 1.3, 2.0, 0.1, "full", 0.1)
PLAIN = OBJECTIVE._replace(kl_estimator="k3")
GEMM = Gemm(4, torch.float32)


def calls(backend: str = "torch") -> dict[str, tuple[Operator, tuple[Any, ...]]]:
    """Each operator with arguments that fill every slot, and with the optional ones absent."""
    data = draws.batch((N,), V, torch.float32)
    logits, ref = data.logits, data.logits * 0.9
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0]) / 4
    bare = PerToken(*data[1:], weights)
    full = bare._replace(importance_weights=torch.rand(N), ref_logprobs=torch.randn(N))
    each = SOFTMAX._replace(temperatures=torch.rand(N) + 0.5)
    head = Projection(torch.randn(N, H), torch.randn(V, H), torch.randn(V))
    no_bias = head._replace(bias=None)
    transposed = Projection(torch.randn(H, N).T, torch.randn(H, V).T, torch.randn(V))
    grads = StatsGradients(*torch.randn(3, N))
    two = grads._replace(kl=None)
    stats = ops.token_stats_op(logits, data.tokens, SOFTMAX, ref, "torch")
    linear = ops.linear_token_stats_op(head, data.tokens, SOFTMAX, head, GEMM, "torch")
    tokens, every = data.tokens, GradientsWanted()
    hidden_alone = GradientsWanted(hidden=True, weight=False, bias=False)
    rows, flat = torch.randn(2, 5), torch.randn(7)
    starts = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0]]).bool()
    padded = Trajectory(rows, rows, mask, None, torch.randn(2))
    packed = Trajectory(flat, flat, None, starts, None)
    shaping = Shaping(torch.randn(2), rows, rows, 0.1, "k1", 1.0)
    per_sequence = Discounts(0.9, 0.95, torch.rand(3), None)
    view = torch.randn(2, 4, V)[:, :-1]
    found: dict[str, tuple[Operator, tuple[Any, ...]]] = {
        "token_stats": (ops.token_stats_op, (logits, tokens, each, ref)),
        "token_stats of a view": (ops.token_stats_op, (view, tokens, SOFTMAX, None)),
        "token_stats_backward": (
            ops.token_stats_backward_op,
            (grads, logits, tokens, stats, each, ref),
        ),
        "token_stats_backward, no KL": (
            ops.token_stats_backward_op,
            (two, logits, tokens, stats, SOFTMAX, None),
        ),
        "ppo_loss": (ops.ppo_loss_op, (logits, full, OBJECTIVE, each, ref, True)),
        "ppo_loss of a view": (ops.ppo_loss_op, (view, bare, PLAIN, SOFTMAX, None, True)),
        "ppo_loss, no gradient": (ops.ppo_loss_op, (logits, bare, PLAIN, SOFTMAX, None, False)),
        "ppo_loss_inplace": (
            ops.ppo_loss_inplace_op,
            (logits.clone(), full, OBJECTIVE, each, ref),
        ),
        "linear_ppo_loss": (
            ops.linear_ppo_loss_op,
            (head, full, OBJECTIVE, each, head, GEMM, every, True),
        ),
        "linear_ppo_loss, frozen": (
            ops.linear_ppo_loss_op,
            (no_bias, bare, PLAIN, SOFTMAX, None, Gemm(), hidden_alone, True),
        ),
        "linear_ppo_loss, transposed": (
            ops.linear_ppo_loss_op,
            (transposed, bare, PLAIN, SOFTMAX, None, GEMM, every, True),
        ),
        "linear_token_stats": (
            ops.linear_token_stats_op,
            (head, tokens, each, no_bias, GEMM),
        ),
        "linear_token_stats, no reference": (
            ops.linear_token_stats_op,
            (no_bias, tokens, SOFTMAX, None, Gemm()),
        ),
        "linear_token_stats_backward": (
            ops.linear_token_stats_backward_op,
            (grads, head, tokens, linear, each, head, GEMM, GradientsWanted(True, False, True)),
        ),
        "linear_token_stats_backward, transposed": (
            ops.linear_token_stats_backward_op,
            (two, transposed, tokens, linear, SOFTMAX, None, GEMM, every),
        ),
        "gae": (ops.gae_op, (padded, Discounts(0.9, 0.95))),
        "gae, packed": (ops.gae_op, (packed, per_sequence)),
        "shaped_advantages": (ops.shaped_advantages_op, (padded, shaping, Discounts(0.9, 0.95))),
        "shaped_advantages, bare": (
            ops.shaped_advantages_op,
            (
                padded._replace(token_rewards=None, bootstrap=None),
                shaping._replace(ref_logprobs=None, score_clip=None),
                Discounts(),
            ),
        ),
        "whiten": (ops.whiten_op, (rows, mask, None, True)),
    }
    return {name: (operator, (*given, backend)) for name, (operator, given) in found.items()}


@pytest.mark.parametrize("name", calls())
def test_operators_mutate_nothing_undeclared_and_their_fakes_tell_the_truth(name: str) -> None:
    """torch's own checks: schema, aliasing, and shapes, dtypes and strides under fake tensors."""
    operator, arguments = calls()[name]
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    found = opcheck(operator.flat_operator, operator.flat(*arguments), test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("name", calls())
def test_the_kernels_keep_the_same_promises(name: str) -> None:
    """With the Triton backend, on a GPU or in the interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    operator, arguments = calls("triton")[name]
    checks = ("test_schema", "test_faketensor")
    found = opcheck(operator.flat_operator, operator.flat(*arguments), test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}


# -------------------------------------------------------------------------------- torch.compile


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("term", ["policy", "everything"])
def test_losses_compile_without_a_graph_break(term: str) -> None:
    """One graph of policy, value and linear loss, with its backward; gradients by every input."""
    data = draws.batch((2, 3), V)
    keywords = draws.options(data, term)
    linear = draws.as_linear(keywords)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    hidden, weight = torch.randn(2, 3, H).double(), torch.randn(V, H).double()

    def losses(logits: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        fused = fastppo.ppo_loss(logits, *data[1:], mask, **keywords)
        head = fastppo.linear_ppo_loss(hidden, weight, *data[1:], mask, chunk_size=2, **linear)
        stats = fastppo.token_stats(logits, data.tokens)
        logprobs = fastppo.linear_token_logprobs(hidden, weight, data.tokens)
        of_head = fastppo.linear_token_stats(
            hidden, weight, data.tokens, ref_hidden=2 * hidden, ref_weight=weight, chunk_size=4
        )
        assert of_head.kl is not None
        values = hidden.sum(-1)
        total = fastppo.total_loss(
            stats.logprobs, *data[2:], values, data.advantages, logits, mask
        )["total_loss"]
        loss = fused.loss + head.loss + stats.entropy.mean() + logprobs.mean() + total
        return loss + of_head.kl.mean(), fused.logprobs, head.metrics["clip_fraction"]

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
    data = draws.batch((N,), V).leaf()

    def loss(leaf: Tensor) -> tuple[Tensor, Tensor]:
        out = fastppo.ppo_loss(leaf * 1, *data[1:], entropy_coef=0.1, inplace=True)
        return out.loss, out.logprobs

    wanted, found = loss(data.logits), compiled(loss)(data.logits)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    grads = [torch.autograd.grad(out[0], data.logits)[0] for out in (found, wanted)]
    assert torch.equal(*grads)


def test_the_in_place_loss_is_refused_where_its_logits_are_read_again() -> None:
    """Compiled as in eager mode: the other term would read gradients for logits."""
    data = draws.batch((N,), V, torch.float32).leaf()

    def loss(leaf: Tensor) -> Tensor:
        logits = leaf * 1
        other = logits.logsumexp(-1).square().mean()
        return fastppo.ppo_loss(logits, *data[1:], inplace=True).loss + other

    torch._dynamo.reset()
    for function in (loss, torch.compile(loss, backend="aot_eager")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            function(data.logits).backward()


def test_options_that_move_between_calls_still_compile() -> None:
    """An adaptive β is another float at every step; torch.compile then makes it a variable."""

    def loss(logits: Tensor, kl_coef: float, entropy_coef: float) -> Tensor:
        return fastppo.ppo_loss(
            logits,
            torch.tensor([1, 2]),
            torch.full((2,), -2.0),
            torch.ones(2),
            ref_logprobs=torch.full((2,), -2.1),
            kl_coef=kl_coef,
            entropy_coef=entropy_coef,
        ).loss

    compiled_loss = compiled(loss)
    logits = torch.randn(2, 7)
    for coefficients in ((0.1, 0.01), (0.2, 0.02), (0.35, 0.03)):
        torch.testing.assert_close(
            compiled_loss(logits, *coefficients), loss(logits, *coefficients)
        )
