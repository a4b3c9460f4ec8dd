"""What of the fused lm-head only a GPU can show: cuBLAS's dtypes, memory, capture, large sizes.

Everything here is skipped without CUDA. test_linear.py proves the loop's maths under
Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import draws
import pytest
import torch
from fastppo_kernels import linear
from fastppo_kernels.records import (
    Gemm,
    LinearPPORows,
    Objective,
    PerToken,
    Projection,
    Softmax,
    TokenStats,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from waits import refused_by_torch

import fastppo

triton_rows = pytest.importorskip("fastppo_kernels.triton_rows", reason="Triton is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Triton warns about a default that its next release changes; the launches here set it.
    pytest.mark.filterwarnings("ignore::UserWarning:triton"),
]

V = 151936
PLAIN = Softmax()
CLIPPED = Objective(0.8, 1.2)
ENTROPY = CLIPPED._replace(entropy_coef=0.01)
MARGIN = 2 * 2**30
"""Bytes kept free beside a case's own tensors: the context, cuBLAS's workspace, the allocator."""


def _needs(bytes_: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < bytes_ + MARGIN:
        pytest.skip(f"needs {bytes_ / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} are free")


@pytest.fixture(autouse=True)
def _memory_comes_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def _stats(hidden: Tensor, weight: Tensor, tokens: Tensor) -> TokenStats:
    return linear.token_stats(Projection(hidden, weight), tokens, PLAIN, rows=triton_rows)


def _loss(
    hidden: Tensor,
    weight: Tensor,
    data: tuple[Tensor, ...],
    objective: Objective,
    gemm: Gemm,
) -> LinearPPORows:
    """The loop's own loss, each token weighing 1/N."""
    per_token = PerToken(*data, torch.full((len(hidden),), 1 / len(hidden), device="cuda"))
    return linear.ppo_loss(
        Projection(hidden, weight), per_token, objective, PLAIN, rows=triton_rows, gemm=gemm
    )


def _draw(
    n: int, vocab: int, width: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """(hidden, weight, (tokens, old logprobs, advantages)), logits of standard deviation 3."""
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype, generator=g)

    hidden, weight = normal(n, width), normal(vocab, width).mul_(3 / width**0.5)
    tokens = torch.randint(vocab, (n,), device="cuda", generator=g)
    old = _stats(hidden, weight, tokens).logprobs
    old += 0.3 * torch.randn(n, device="cuda", generator=g)
    return hidden, weight, (tokens, old, torch.randn(n, device="cuda", generator=g))


def _in_fp64(
    hidden: Tensor, weight: Tensor, data: tuple[Tensor, ...], **options: Any
) -> tuple[Tensor, list[Tensor]]:
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    w = torch.full(data[0].shape, 1 / len(data[0]), device="cuda", dtype=torch.float64)
    loss = draws.exact(leaves[0] @ leaves[1].T, *data, w, **options).loss
    return loss.detach(), list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("vocab", [32000, 50257])
@pytest.mark.parametrize("chunk_size", [100, 512, None])
@pytest.mark.parametrize("options", [{}, {"entropy_coef": 0.01}, {"softcap": 30.0}], ids=str)
def test_bf16_is_off_by_at_most_twice_what_plain_bf16_is(
    vocab: int, chunk_size: int | None, options: dict[str, Any]
) -> None:
    """Also where V is odd and the rows of the buffer are padded."""
    hidden, weight, data = _draw(512, vocab, 256)
    _, wanted = _in_fp64(hidden, weight, data, **options)
    plain = [x.clone().requires_grad_() for x in (hidden, weight)]
    w = torch.full((512,), 1 / 512, device="cuda")
    eager = draws.exact(plain[0] @ plain[1].T, *data, w, **options).loss
    eager_grads = torch.autograd.grad(eager, plain)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    found = fastppo.linear_ppo_loss(*leaves, *data, chunk_size=chunk_size, **options)
    grads = torch.autograd.grad(found.loss, leaves)
    for ours, theirs, true in zip(grads, eager_grads, wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - true).norm() <= 2 * (theirs.double() - true).norm()


def test_fp32_is_the_definition() -> None:
    hidden, weight, data = _draw(300, 4001, 96, torch.float32)
    loss, wanted = _in_fp64(hidden, weight, data, entropy_coef=0.01)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    found = fastppo.linear_ppo_loss(*leaves, *data, chunk_size=128, entropy_coef=0.01)
    torch.testing.assert_close(found.loss.double(), loss, rtol=1e-5, atol=1e-6)
    for grad, true in zip(torch.autograd.grad(found.loss, leaves), wanted, strict=True):
        assert (grad.double() - true).abs().max() <= 1e-5 * true.abs().max()


@pytest.mark.parametrize("chunk_size", [64, 512, 4096])
@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32], ids=("bf16", "fp32"))
def test_dw_is_accumulated_in_fp32(chunk_size: int, own: torch.dtype) -> None:
    """64 chunks lose nothing, and a bf16 dW is the fp32 one rounded once.

    Small integers, whose logits are exact in bf16: every chunk size then gives the same gradient of
    the logits, and its product with the hidden states in fp64 is the truth.
    """
    n, vocab, width = 4096, 1000, 64
    _, _, data = _draw(n, vocab, width)
    hidden, weight = (torch.randint(-1, 2, (k, width), device="cuda").to(own) for k in (n, vocab))
    rows = _loss(hidden, weight, data, ENTROPY, Gemm(chunk_size, torch.bfloat16))
    logits = hidden.bfloat16() @ weight.bfloat16().T
    assert torch.equal(logits.float(), hidden.float() @ weight.float().T)
    per_token = PerToken(*data, torch.full((n,), 1 / n, device="cuda"))
    grad = triton_rows.ppo_loss(logits, per_token, ENTROPY, PLAIN).grad
    assert grad is not None
    wanted = grad.double().T @ hidden.double()
    assert rows.grads.weight is not None
    assert rows.grads.weight.dtype == own
    error = (rows.grads.weight.double() - wanted).norm() / wanted.norm()
    assert error < (2.0**-8 if own == torch.bfloat16 else 1e-5)


class _Gemms(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[set[torch.dtype], torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.__name__.split(".")[0].rstrip("_") in ("mm", "addmm"):
            matrices = [x for x in args[:3] if isinstance(x, Tensor)][-2:]
            self.seen.append(({x.dtype for x in matrices}, out.dtype))
        return out


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32], ids=("bf16", "fp32"))
def test_every_gemm_multiplies_bf16_and_dw_comes_out_in_fp32(own: torch.dtype) -> None:
    hidden, weight, data = _draw(256, 1000, 64)
    with _Gemms() as gemms:
        _loss(hidden.to(own), weight.to(own), data, CLIPPED, Gemm(64, torch.bfloat16))
    assert len(gemms.seen) == 4 * 3
    assert all(operands == {torch.bfloat16} for operands, _ in gemms.seen)
    results = [out for _, out in gemms.seen]
    assert results == [torch.bfloat16, own, torch.float32] * 4


@pytest.mark.parametrize("n", [8192, 32768])
@pytest.mark.parametrize("head", ["frozen", "fp32"])
def test_extra_memory_at_the_default_chunk(n: int, head: str) -> None:
    """At most 15 % of the logits beside the gradients, for a frozen head and one held in fp32.

    A trained bf16 head has its gradient accumulated in an fp32 tensor of its own besides, the size
    of 2·H rows of logits: kernels/NOTES.md.
    """
    width = 1024
    hidden, weight, data = _draw(n, V, width)
    _needs(8 * V * width + n * width * 16 + n * V // 2)
    if head == "fp32":
        weight = weight.float()
    leaves = [hidden.requires_grad_(), weight.requires_grad_(head == "fp32")]
    cast = V * width * 2 if head == "fp32" else 0  # autocast's copy, which any bf16 GEMM needs
    gradients = hidden.nbytes + (weight.nbytes if head == "fp32" else 0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        loss = fastppo.linear_ppo_loss(*leaves, *data).loss
    loss.backward()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - gradients - cast
    logits = 2 * n * V
    assert extra <= 0.15 * logits, f"{extra / logits:.1%} of the logits"


def test_extra_memory_without_a_gradient() -> None:
    n, width = 8192, 1024
    hidden, weight, data = _draw(n, V, width)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        fastppo.linear_token_logprobs(hidden, weight, data[0], return_entropy=True)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 0.15 * 2 * n * V


@pytest.mark.parametrize("masked", [False, True])
def test_forward_and_backward_in_a_cuda_graph(masked: bool) -> None:
    """A capture fails on any synchronisation. With a mask, rows are not counted while it runs."""
    hidden, weight, data = _draw(256, 32000, 128)
    mask = torch.arange(256, device="cuda") % 3 != 0 if masked else None
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    results = [torch.empty_like(x) for x in leaves]
    how: dict[str, Any] = {"chunk_size": 100, "entropy_coef": 0.01}

    def step() -> tuple[Tensor, Tensor]:
        out = fastppo.linear_ppo_loss(*leaves, *data, mask, **how)
        for result, grad in zip(results, torch.autograd.grad(out.loss, leaves), strict=True):
            result.copy_(grad)
        return out.loss.detach(), out.metrics["clip_fraction"]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # Triton compiles here, and cuBLAS takes its workspace
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        leaves[0].copy_(leaves[0].flip(0))
    graph.replay()
    replayed = [x.clone() for x in (*captured, *results)]
    eager = [x.clone() for x in (*step(), *results)]
    for found, wanted in zip(replayed, eager, strict=True):
        # A mask cuts rows out in eager mode alone, and cuBLAS may choose another algorithm: sums in
        # another order, and logits near a boundary of bf16 that round to its other side.
        scale = wanted.abs().max().item()
        torch.testing.assert_close(found, wanted, rtol=2.0**-7, atol=2.0**-7 * scale)


@pytest.mark.parametrize("chunk_size", [64, 256])
def test_nothing_waits_for_the_gpu_without_a_mask(chunk_size: int) -> None:
    how: dict[str, Any] = {"chunk_size": chunk_size}
    hidden, weight, data = _draw(256, 32000, 128)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    weights = torch.rand(256, device="cuda")

    def step() -> None:
        fastppo.linear_ppo_loss(*leaves, *data, weights=weights, **how).loss.backward()
        fastppo.linear_token_logprobs(*leaves, data[0], **how).sum().backward()

    step()
    with refused_by_torch():
        step()
    assert leaves[1].grad is not None
    assert leaves[1].grad.isfinite().all()


def test_the_same_bits_in_twenty_runs() -> None:
    hidden, weight, data = _draw(2048, 32000, 512)
    first = _loss(hidden, weight, data, ENTROPY, Gemm(512))
    for _ in range(20):
        again = _loss(hidden, weight, data, ENTROPY, Gemm(512))
        for name in ("sums", "logprobs", "entropy"):
            assert torch.equal(getattr(again, name), getattr(first, name))
        assert torch.equal(again.grads.hidden, first.grads.hidden)
        assert torch.equal(again.grads.weight, first.grads.weight)


def test_masked_rows_of_nan_reach_nothing() -> None:
    hidden, weight, data = _draw(256, 1000, 64)
    mask = torch.arange(256, device="cuda") % 3 != 0
    hidden = torch.where(mask[:, None], hidden, torch.nan)
    for selection in ({"mask": mask}, {"weights": mask / 100.0}):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        fastppo.linear_ppo_loss(*leaves, *data, chunk_size=100, **selection).loss.backward()
        for leaf in leaves:
            assert leaf.grad is not None
            assert leaf.grad.isfinite().all()


def test_more_than_two_to_the_31_logits_in_one_chunk() -> None:
    """int32 offsets overflowed at N·V > 2³¹ (fla 1082)."""
    n = 2**31 // V + 200
    _needs(2 * n * V)
    hidden, weight, data = _draw(n, V, 64)
    one = _loss(hidden, weight, data, CLIPPED, Gemm(n))
    many = _loss(hidden, weight, data, CLIPPED, Gemm(2048))
    torch.testing.assert_close(one.logprobs[-64:], many.logprobs[-64:], rtol=1e-3, atol=0.07)
    assert one.grads.hidden is not None
    assert many.grads.hidden is not None
    scale = many.grads.hidden.abs().max().item()
    torch.testing.assert_close(
        one.grads.hidden[-64:], many.grads.hidden[-64:], rtol=2**-6, atol=2**-6 * scale
    )
    assert linear.chunk_rows(n, V, torch.device("cuda"), width=64) < n
