"""The custom operators are registered correctly and transparent to torch.compile.

Compiled code runs the same operators on the same inputs, so only the elementwise steps around them
may differ: 1e-12 in fp64.
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
Case = tuple[Operator[Any], dict[str, Any]]


def cases() -> dict[str, Case]:
    """Operands with every optional one present, and "bare" without any."""
    data = draws.batch((N,), V, torch.float32)
    softmax = Softmax(1.0, torch.rand(N) + 0.5, 1.5, 20.0)
    logits = {"logits": data.logits, "ref_logits": data.logits * 0.9, "softmax": softmax}
    bare_logits = {
        "logits": torch.randn(2, 4, V)[:, :-1],
        "ref_logits": None,
        "softmax": Softmax(),
    }
    projection = Projection(torch.randn(N, H), torch.randn(V, H), torch.randn(V))
    head = {
        "projection": projection,
        "ref_projection": projection,
        "softmax": softmax,
        "gemm": Gemm(4, torch.float32),
    }
    bare_head = {
        "projection": Projection(torch.randn(H, N).T, torch.randn(H, V).T),
        "ref_projection": None,
        "softmax": Softmax(),
        "gemm": Gemm(),
    }
    bare_tokens = PerToken(*data[1:], weights=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0]) / 4)
    per_token = bare_tokens._replace(importance_weights=torch.rand(N), ref_logprobs=torch.randn(N))
    loss = {"per_token": per_token, "objective": Objective(0.8, 1.3, 2.0, 0.1, "full", 0.1)}
    bare_loss = {"per_token": bare_tokens, "objective": Objective(0.8, 1.2)}
    tokens = {"tokens": data.tokens}
    backward = {
        "grads": StatsGradients(*torch.randn(3, N)),
        "stats": ops.token_stats_op(**logits, **tokens, backend="torch"),  # compiles nothing
    }
    bare_backward = backward | {"grads": StatsGradients(*torch.randn(2, N), None)}
    wanted = GradientsWanted()
    no_bias = GradientsWanted(hidden=True, weight=True, bias=False)
    only_hidden = GradientsWanted(hidden=True, weight=False, bias=False)
    return {
        "ppo_loss": (ops.ppo_loss_op, {**logits, **loss, "need_grad": True}),
        "ppo_loss, bare": (ops.ppo_loss_op, {**bare_logits, **bare_loss, "need_grad": True}),
        "ppo_loss, no gradient": (
            ops.ppo_loss_op,
            {**bare_logits, **bare_loss, "need_grad": False},
        ),
        "ppo_loss_inplace": (ops.ppo_loss_inplace_op, {**logits, **loss}),
        "linear_ppo_loss": (
            ops.linear_ppo_loss_op,
            {**head, **loss, "wanted": wanted, "compact": True},
        ),
        "linear_ppo_loss, bare": (
            ops.linear_ppo_loss_op,
            {**bare_head, **bare_loss, "wanted": only_hidden, "compact": False},
        ),
        "token_stats": (ops.token_stats_op, {**logits, **tokens}),
        "token_stats, bare": (ops.token_stats_op, {**bare_logits, **tokens}),
        "token_stats_backward": (
            ops.token_stats_backward_op,
            {**logits, **tokens, **backward},
        ),
        "token_stats_backward, bare": (
            ops.token_stats_backward_op,
            {**bare_logits, **tokens, **bare_backward},
        ),
        "linear_token_stats": (ops.linear_token_stats_op, {**head, **tokens}),
        "linear_token_stats, bare": (ops.linear_token_stats_op, {**bare_head, **tokens}),
        "linear_token_stats_backward": (
            ops.linear_token_stats_backward_op,
            {**head, **tokens, **backward, "wanted": wanted},
        ),
        "linear_token_stats_backward, bare": (
            ops.linear_token_stats_backward_op,
            {**bare_head, **tokens, **bare_backward, "wanted": no_bias},
        ),
        **advantages_cases(),
    }


def advantages_cases() -> dict[str, Case]:
    rows, flat = torch.randn(2, 5), torch.randn(7)
    starts = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0]]).bool()
    padded = Trajectory(rows, rows, mask, None, torch.randn(2))
    packed = Trajectory(flat, flat, None, starts, None)
    shaping = Shaping(torch.randn(2), rows, rows, 0.1, "k1", 1.0)
    discounts = Discounts(0.9, 0.95)
    bare = {"trajectory": Trajectory(rows, None, mask), "shaping": Shaping(torch.randn(2), rows)}
    return {
        "gae": (ops.gae_op, {"trajectory": padded, "discounts": discounts}),
        "gae, packed": (
            ops.gae_op,
            {"trajectory": packed, "discounts": discounts._replace(gammas=torch.rand(3))},
        ),
        "shaped_advantages": (
            ops.shaped_advantages_op,
            {"trajectory": padded, "shaping": shaping, "discounts": discounts},
        ),
        "shaped_advantages, bare": (ops.shaped_advantages_op, {**bare, "discounts": discounts}),
        "whiten": (ops.whiten_op, {"x": rows, "mask": mask, "moments": None, "shift_mean": True}),
    }


def check(name: str, backend: str, checks: tuple[str, ...]) -> None:
    operator, operands = cases()[name]
    flat = operator.flatten(**operands, backend=backend)
    outcome = opcheck(operator.flat_operator, flat, test_utils=checks)
    assert set(outcome.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", cases())
def test_operators_mutate_nothing_undeclared_and_their_fakes_are_right(name: str) -> None:
    """torch's own checks: schema, aliasing, and shapes, dtypes and strides under fake tensors."""
    check(name, "cpu", ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("name", [name for name in cases() if "," not in name])
def test_the_kernels_pass_the_same_checks(name: str) -> None:
    """With the Triton backend, on a GPU or in the interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    check(name, "triton", ("test_schema",))


# -------------------------------------------------------------------------------- torch.compile


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_losses_compile_without_a_graph_break() -> None:
    """One graph of policy, value and linear loss with its backward pass, for every input."""
    data = draws.batch((2, 3), V)
    keywords = draws.options(data, "everything")
    linear = draws.as_linear(keywords)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    hidden, weight = torch.randn(2, 3, H).double(), torch.randn(V, H).double()

    def losses(logits: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        fused = fastppo.ppo_loss(logits, *data[1:], mask, **keywords)
        in_place = fastppo.ppo_loss(logits * 1, *data[1:], entropy_coef=0.1, inplace=True)
        head = fastppo.linear_ppo_loss(hidden, weight, *data[1:], mask, chunk_size=2, **linear)
        sequences = fastppo.linear_ppo_loss(hidden, weight, *data[1:], mask, objective="gspo")
        stats = fastppo.token_stats(logits, data.tokens)
        logprobs = fastppo.linear_token_logprobs(hidden, weight, data.tokens)
        head_stats = fastppo.linear_token_stats(
            hidden, weight, data.tokens, ref_hidden=2 * hidden, ref_weight=weight, chunk_size=4
        )
        assert head_stats.kl is not None
        values = hidden.sum(-1)
        total = fastppo.total_loss(
            stats.logprobs, *data[2:], values, data.advantages, logits, mask
        )["total_loss"]
        loss = fused.loss + in_place.loss + head.loss + sequences.loss + total
        loss = loss + stats.entropy.mean() + logprobs.mean() + head_stats.kl.mean()
        return loss, fused.logprobs, head.metrics["clip_fraction"]

    leaves = [x.requires_grad_() for x in (data.logits, hidden, weight)]
    expected = losses(*leaves)
    actual = compiled(losses)(*leaves)
    actual_grads = torch.autograd.grad(actual[0], leaves)
    expected_grads = torch.autograd.grad(expected[0], leaves)
    for one, other in zip((*actual, *actual_grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def user_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, entropy: Tensor
) -> Tensor:
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(0.8, 1.2) * advantages
    return -torch.minimum(ratio * advantages, clipped) - 0.1 * entropy


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_users_objective_and_the_in_place_loss_compile_with_symbolic_shapes(
    dynamic: bool | None,
) -> None:
    def losses(logits: Tensor, *data: Tensor) -> tuple[Tensor, ...]:
        own = fastppo.ppo_loss(logits, *data, objective=user_clip)
        in_place = fastppo.ppo_loss(logits * 1, *data, inplace=True)
        weight = torch.eye(logits.shape[-1], dtype=logits.dtype)
        head = fastppo.linear_ppo_loss(logits, weight, *data, objective=user_clip)
        return own.loss + in_place.loss + head.loss, own.metrics["clip_fraction"]

    torch._dynamo.reset()
    traced = torch.compile(losses, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for shape in ((2, 3), (3, 5), (4, 4)):
        data = draws.batch(shape, V)
        leaf = data.logits.requires_grad_()
        for actual, expected in zip(traced(leaf, *data[1:]), losses(leaf, *data[1:]), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        grads = [
            torch.autograd.grad(call(leaf, *data[1:])[0], leaf)[0] for call in (traced, losses)
        ]
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_advantages_compile_without_a_graph_break() -> None:
    scores, (values, logprobs, ref) = torch.randn(4), torch.randn(3, 4, 6)
    mask = torch.rand(4, 6) < 0.7

    def advantages(*inputs: Tensor) -> tuple[Tensor, ...]:
        out = fastppo.compute_advantages(*inputs, mask, kl_coef=0.1)
        return (*out, *fastppo.gae(inputs[1], inputs[2], mask), fastppo.whiten(inputs[1], mask))

    inputs = (scores, values, logprobs, ref)
    for one, other in zip(compiled(advantages)(*inputs), advantages(*inputs), strict=True):
        assert torch.equal(one, other)


def test_the_in_place_loss_raises_an_error_if_its_logits_are_read_again() -> None:
    """In compiled and eager mode: another term would read gradients as logits."""
    data = draws.batch((N,), V, torch.float32).leaf()

    def loss(leaf: Tensor) -> Tensor:
        logits = leaf * 1
        other = logits.logsumexp(-1).square().mean()
        return fastppo.ppo_loss(logits, *data[1:], inplace=True).loss + other

    torch._dynamo.reset()
    for function in (loss, torch.compile(loss, backend="aot_eager")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            function(data.logits).backward()
