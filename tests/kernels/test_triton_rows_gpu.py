"""What of the row kernel only a GPU can show: full sizes, reproducibility, capture, memory.

Everything here is skipped without CUDA. The accuracy of each path is in test_triton_rows.py, which
runs compiled where there is a GPU. The definition in fp64 is computed a few rows at a time, so that
the largest case needs little more than its logits: 2.5 GB of bf16 and as much for the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fastppo_kernels import definition, torch_rows
from fastppo_kernels.records import SUMS, PPORows
from rows import PLAIN, VOCABULARIES, assert_gradient, assert_statistic, in_fp64, operands
from torch import Tensor
from waits import refused_by_torch

import fastppo
from fastppo.functional.arguments import choose_backend

triton_rows = pytest.importorskip("fastppo_kernels.triton_rows", reason="Triton is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Triton warns about a default that its next release changes; the launches here set it.
    pytest.mark.filterwarnings("ignore::UserWarning:triton"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),  # Inductor's advice
]

N = 8192
V = 151936
MEMORY_MARGIN = 2 * 2**30
"""Bytes kept free beside a case's own tensors: the context, the definition, the allocator."""


def _needs(bytes_: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < bytes_ + MEMORY_MARGIN:
        pytest.skip(f"needs {bytes_ / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} are free")


@pytest.fixture(autouse=True)
def _memory_comes_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def _draw(n: int, vocab: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Arguments of ppo_loss near its clips, drawn on the device."""
    g = torch.Generator("cuda").manual_seed(0)
    logits = torch.empty(n, vocab, dtype=dtype, device="cuda")
    logits.normal_(0.0, 3.0, generator=g)
    tokens = torch.randint(vocab, (n,), device="cuda", generator=g)
    logprobs = triton_rows.token_stats(logits, tokens, PLAIN).logprobs
    return {
        "logits": logits,
        "tokens": tokens,
        "old_logprobs": logprobs + 0.3 * torch.randn(n, device="cuda", generator=g),
        "advantages": torch.randn(n, device="cuda", generator=g),
        "weights": torch.rand(n, device="cuda", generator=g) + 0.1,
    }


def _loss(arguments: dict[str, Any], **options: Any) -> PPORows:
    given, rest = operands(arguments | options)
    return triton_rows.ppo_loss(*given, **rest)


def _assert_rows(arguments: dict[str, Any], got: PPORows, rows: Tensor) -> None:
    """The given rows of a result against the definition in fp64."""
    for part in rows.split(64):
        given, _ = operands(in_fp64({k: v[part] for k, v in arguments.items()}))
        want = definition.ppo_loss(*given)
        for name in ("logprobs", "entropy"):
            assert_statistic(getattr(got, name)[part], getattr(want, name), name)
        assert got.grad is not None
        assert want.grad is not None
        assert_gradient(got.grad[part], want.grad, one_signed=True)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_vocabularies_at_full_height(vocab: int) -> None:
    _needs(3 * 2 * N * vocab)
    arguments = _draw(N, vocab)
    got = _loss(arguments)
    # The first and the last row of every program, and rows in between.
    rows = torch.cat([torch.arange(0, N, 257), torch.arange(N - 32, N)]).cuda()
    _assert_rows(arguments, got, rows)
    in_place = _loss(arguments, inplace=True)
    assert torch.equal(in_place.sums, got.sums)
    assert torch.equal(in_place.grad, got.grad)


def test_sums_at_full_size() -> None:
    _needs(2 * 2 * N * V)
    arguments = _draw(N, V)
    got = _loss(arguments, need_grad=False)
    given, _ = operands(in_fp64(arguments | {"logits": arguments["logits"][:0]}))
    logprobs, of_tokens = got.logprobs.double(), (given.per_token, given.objective)
    terms, _ = torch_rows.token_loss(logprobs, None, *of_tokens)
    want = torch_rows.loss_sums(logprobs, got.entropy.double(), terms, *of_tokens)
    # A token or two may lie on the edge of the clip range, in fp32 on the other side of it.
    counts = torch.tensor(["_positive" in name or "_negative" in name for name in SUMS])
    difference = (got.sums.double() - want).abs().cpu()
    assert (difference[counts] <= 2).all()
    assert (difference <= 1e-5 * want.abs().cpu() + 1e-3)[~counts].all()


def test_the_same_bits_in_a_hundred_runs() -> None:
    _needs(3 * 2 * N * V)
    arguments = _draw(N, V)
    first = _loss(arguments, entropy_coef=0.01)
    for _ in range(100):
        again = _loss(arguments, entropy_coef=0.01)
        assert torch.equal(again.sums, first.sums)
        assert torch.equal(again.logprobs, first.logprobs)
        assert torch.equal(again.grad, first.grad)


@pytest.mark.parametrize("inplace", [False, True])
def test_more_than_two_to_the_31_logits(inplace: bool) -> None:
    """int32 offsets overflowed at N·V > 2³¹ (fla 1082)."""
    n = 2**31 // V + 200
    assert n * V > 2**31 + 2**24
    _needs((1 if inplace else 2) * 2 * n * V)
    arguments = _draw(n, V)
    rows = torch.arange(n - 64, n, device="cuda")
    kept = {k: v[rows].clone() for k, v in arguments.items()}
    got = _loss(arguments, inplace=inplace)
    assert got.grad is not None
    found = (got.logprobs, got.entropy, got.kl, got.grad)
    last = PPORows(got.sums, *(part[rows] for part in found))
    _assert_rows(kept, last, torch.arange(64, device="cuda"))
    if not inplace:
        stats = triton_rows.token_stats(arguments["logits"], arguments["tokens"], PLAIN)
        # Its programs are others than the loss's, and so is the order of their sums.
        torch.testing.assert_close(stats.logprobs, got.logprobs, rtol=1e-6, atol=1e-5)


def test_more_rows_than_a_grid_dimension() -> None:
    """A grid dimension of 65535 was exceeded (Liger 1294)."""
    n = 200_000
    arguments = _draw(n, 1000)
    _assert_rows(arguments, _loss(arguments), torch.arange(n - 64, n, device="cuda"))


def _public_arguments(n: int, vocab: int) -> tuple[Tensor, ...]:
    drawn = _draw(n, vocab)
    return tuple(drawn[k] for k in ("logits", "tokens", "old_logprobs", "advantages"))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_cuda_graph_of_forward_and_backward(inplace: bool, factor: float) -> None:
    """A capture fails on any synchronisation, and replays with other numbers in the same memory."""
    logits, *rest = _public_arguments(256, 32000)
    grad = torch.empty_like(logits)

    def step() -> tuple[Tensor, Tensor]:
        # On a copy: in place, the gradient overwrites what it was formed from.
        leaf = logits.clone().requires_grad_()
        out = fastppo.ppo_loss(
            leaf * 1, *rest, inplace=inplace, entropy_coef=0.01, backend="triton"
        )
        grad.copy_(torch.autograd.grad(out.loss * factor, leaf)[0])
        return out.loss.detach(), out.metrics["clip_fraction"]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # Triton compiles here
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    logits.copy_(logits.flip(0))
    graph.replay()
    replayed = [x.clone() for x in (*captured, grad)]
    eager = [x.clone() for x in (*step(), grad)]
    for got, want in zip(replayed, eager, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["ppo_loss", "token_logprobs"])
def test_nothing_waits_for_the_gpu(name: str) -> None:
    logits, *rest = _public_arguments(64, 32000)
    leaf = logits.clone().requires_grad_()

    def step() -> None:
        if name == "ppo_loss":
            fastppo.ppo_loss(leaf, *rest).loss.backward()
        else:
            fastppo.token_logprobs(leaf, rest[0]).sum().backward()

    step()
    with refused_by_torch():
        step()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_extra_memory_in_place() -> None:
    """Under 1 % of the logits, forward and backward."""
    _needs(2 * 2 * N * V)
    logits, *rest = _public_arguments(N, V)
    # Not a leaf, as behind a model's head; its own gradient goes to a function that drops it.
    shift = torch.zeros((), dtype=logits.dtype, device="cuda", requires_grad=True)
    x = _Attach.apply(logits, shift)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fastppo.ppo_loss(x, *rest, inplace=True).loss.backward()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < 0.01 * logits.nbytes, f"{extra / logits.nbytes:.2%} of the logits"


class _Attach(torch.autograd.Function):
    """The logits' own memory, with a graph behind it and no gradient of its size in front."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shift: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.new_zeros(())


def test_auto_takes_the_kernel_on_a_gpu() -> None:
    x = torch.randn(2, 8, device="cuda")
    assert choose_backend("auto", x) == "triton"
    assert choose_backend("auto", x.double()) == "torch"


def test_compiles_to_a_full_graph_with_inductor() -> None:
    logits, *rest = _public_arguments(64, 1000)
    leaf = logits.float().requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return fastppo.ppo_loss(x, *rest, entropy_coef=0.1).loss / 3

    got = torch.compile(loss, fullgraph=True)(leaf)
    want = loss(leaf)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(value, leaf)[0] for value in (got, want)]
    torch.testing.assert_close(*grads)


def test_the_gradient_is_that_of_the_definition_on_the_gpu() -> None:
    """Both backends of one public call, in bf16, at a size that training has."""
    logits, *rest = _public_arguments(512, 32000)
    leaf = logits.requires_grad_()
    want, got = (
        torch.autograd.grad(
            fastppo.ppo_loss(x, *rest, entropy_coef=0.01, backend=backend).loss, leaf
        )[0]
        for x, backend in ((leaf.double(), "torch"), (leaf, "triton"))
    )
    assert got.dtype == torch.bfloat16
    scale = want.double().abs().amax(-1, keepdim=True)
    assert ((got.double() - want.double()).abs() <= 2.0**-7 * want.abs() + 1e-5 * scale).all()
