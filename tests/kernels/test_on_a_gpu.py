"""Properties of the kernels that only a GPU shows: full sizes, reproducibility, capture, waits,
memory.

Skipped without CUDA. test_logits.py, test_linear.py and triton/test_advantages.py test the
accuracy of each path; the first and the last run compiled on a GPU. The definition in fp64 is
computed a few rows at a time, so that the largest case needs little more than its logits: 2.5 GB of
bf16 and as much for the gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import draws
import pytest
import torch
from fastppo_kernels import definition, linear
from fastppo_kernels.records import (
    Gemm,
    LinearPPORows,
    Objective,
    PerToken,
    PPORows,
    Projection,
    Softmax,
)
from logit_rows import VOCABULARIES, assert_gradient, assert_statistic, in_fp64, operands
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trajectories import assert_close, bounds
from waits import refused_by_torch

import fastppo

triton_backend = pytest.importorskip(
    "fastppo_kernels.triton_backend", reason="Triton is not installed"
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Triton warns about a default that its next release changes; these launches set it.
    pytest.mark.filterwarnings("ignore::UserWarning:triton"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),  # Inductor's advice
]

N, V = 8192, 151936
PLAIN = Softmax()
CLIPPED = Objective(0.8, 1.2)
ENTROPY = CLIPPED._replace(entropy_coef=0.01)
MEMORY_MARGIN = 2 * 2**30
"""Bytes kept free besides a case's own tensors: context, definition, allocator."""


def needs(size: int) -> None:
    """Skip unless `size` bytes of GPU memory are free."""
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < size + MEMORY_MARGIN:
        pytest.skip(f"needs {size / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} are free")


@pytest.fixture(autouse=True)
def memory_comes_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def extra_memory(work: Callable[[], Any]) -> int:
    """Return the peak of `work` above the memory allocated before, bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# ------------------------------------------------------------------------------------------ inputs


def draw_rows(n: int, vocab: int) -> dict[str, Any]:
    """Draw arguments of the kernels' ppo_loss near its clips, bf16, on the device."""
    g = torch.Generator("cuda").manual_seed(0)
    logits = torch.empty(n, vocab, dtype=torch.bfloat16, device="cuda")
    logits.normal_(0.0, 3.0, generator=g)
    tokens = torch.randint(vocab, (n,), device="cuda", generator=g)
    logprobs = triton_backend.token_stats(logits, tokens, PLAIN).logprobs
    return {
        "logits": logits,
        "tokens": tokens,
        "old_logprobs": logprobs + 0.3 * torch.randn(n, device="cuda", generator=g),
        "advantages": torch.randn(n, device="cuda", generator=g),
        "weights": torch.rand(n, device="cuda", generator=g) + 0.1,
    }


def rows_loss(arguments: dict[str, Any], **options: Any) -> PPORows:
    records, rest = operands(arguments | options)
    return triton_backend.ppo_loss(*records, **rest)


def public_arguments(n: int, vocab: int) -> tuple[Tensor, ...]:
    drawn = draw_rows(n, vocab)
    return tuple(drawn[name] for name in ("logits", "tokens", "old_logprobs", "advantages"))


def draw_head(
    n: int, vocab: int, width: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Draw (hidden, weight, (tokens, old logprobs, advantages)) with logits of deviation 3."""
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype, generator=g)

    hidden, weight = normal(n, width), normal(vocab, width).mul_(3 / width**0.5)
    tokens = torch.randint(vocab, (n,), device="cuda", generator=g)
    old = linear.token_stats(
        Projection(hidden, weight), tokens, PLAIN, row_functions=triton_backend
    ).logprobs
    old += 0.3 * torch.randn(n, device="cuda", generator=g)
    return hidden, weight, (tokens, old, torch.randn(n, device="cuda", generator=g))


def head_loss(
    hidden: Tensor, weight: Tensor, data: tuple[Tensor, ...], objective: Objective, gemm: Gemm
) -> LinearPPORows:
    """Return the chunk loop's loss with weights of 1/N."""
    per_token = PerToken(*data, torch.full((len(hidden),), 1 / len(hidden), device="cuda"))
    return linear.ppo_loss(
        Projection(hidden, weight),
        per_token,
        objective,
        PLAIN,
        row_functions=triton_backend,
        gemm=gemm,
    )


def draw_sequences(shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw (scores, values, logprobs, mask)."""
    values, logprobs = torch.randn(2, *shape, device="cuda")
    mask = torch.rand(shape, device="cuda") < 0.8
    return torch.randn(shape[0], device="cuda"), values, logprobs, mask


def advantages_of(
    scores: Tensor, values: Tensor, logprobs: Tensor, mask: Tensor, backend: str = "triton"
) -> fastppo.Advantages:
    shaping: dict[str, Any] = {"kl_coef": 0.1, "kl_estimator": "k3", "gamma": 0.99, "lam": 0.95}
    return fastppo.compute_advantages(
        scores, values, logprobs, logprobs * 0.9, mask, backend=backend, **shaping
    )


# -------------------------------------------------------------------------------------- full sizes


def assert_rows(arguments: dict[str, Any], result: PPORows, rows: Tensor) -> None:
    """Compare rows of a result with the definition in fp64."""
    for part in rows.split(64):
        records, _ = operands(in_fp64({k: v[part] for k, v in arguments.items()}))
        wanted = definition.ppo_loss(*records)
        for name in ("logprobs", "entropy"):
            assert_statistic(getattr(result, name)[part], getattr(wanted, name), name)
        assert_gradient(result.grad[part], wanted.grad, one_signed=True)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_vocabularies_at_full_height(vocab: int) -> None:
    needs(3 * 2 * N * vocab)
    arguments = draw_rows(N, vocab)
    result = rows_loss(arguments)
    # The first and last row of every program, and rows in between.
    assert_rows(
        arguments, result, torch.cat([torch.arange(0, N, 257), torch.arange(N - 32, N)]).cuda()
    )
    in_place = rows_loss(arguments, inplace=True)
    assert torch.equal(in_place.sums, result.sums)
    assert torch.equal(in_place.grad, result.grad)


@pytest.mark.parametrize("inplace", [False, True])
def test_more_than_two_to_the_31_logits(inplace: bool) -> None:
    """int32 offsets overflowed at N·V > 2³¹ (fla 1082)."""
    n = 2**31 // V + 200
    needs((1 if inplace else 2) * 2 * n * V)
    arguments = draw_rows(n, V)
    last = torch.arange(n - 64, n, device="cuda")
    last_arguments = {k: v[last].clone() for k, v in arguments.items()}
    result = rows_loss(arguments, inplace=inplace)
    of_last = PPORows(
        result.sums, *(x[last] for x in (result.logprobs, result.entropy, result.kl, result.grad))
    )
    assert_rows(last_arguments, of_last, torch.arange(64, device="cuda"))


def test_more_than_two_to_the_31_logits_in_one_chunk() -> None:
    n = 2**31 // V + 200
    needs(2 * n * V)
    hidden, weight, data = draw_head(n, V, 64)
    one = head_loss(hidden, weight, data, CLIPPED, Gemm(n))
    many = head_loss(hidden, weight, data, CLIPPED, Gemm(2048))
    torch.testing.assert_close(one.logprobs[-64:], many.logprobs[-64:], rtol=1e-3, atol=0.07)
    scale = many.grads.hidden.abs().max().item()
    torch.testing.assert_close(
        one.grads.hidden[-64:], many.grads.hidden[-64:], rtol=2**-6, atol=2**-6 * scale
    )


def test_more_rows_than_a_grid_dimension() -> None:
    """A grid dimension of 65535 was exceeded (Liger 1294)."""
    n = 200_000
    arguments = draw_rows(n, 1000)
    assert_rows(arguments, rows_loss(arguments), torch.arange(n - 64, n, device="cuda"))


@pytest.mark.parametrize("shape", [(64, 131072), (1024, 8192), (8192, 1024)])
def test_large_batches_of_sequences(shape: tuple[int, int]) -> None:
    """8.4 M padded tokens against the CPU's loops, whose sums are fp64."""
    batch = draw_sequences(shape)
    on_the_cpu = advantages_of(*(x.cpu() for x in batch), "cpu")
    for result, wanted in zip(advantages_of(*batch), on_the_cpu, strict=True):
        assert_close(result, wanted, 1e-5)


def test_large_ragged_batches() -> None:
    """Alternating long and short lengths from 0 to 131072; the first also padded, to the bit."""
    total, lengths = 2**23, []
    for length in itertools.cycle([0, 1, 131072, 100, 8192, 8193, 777, 40000, 16384]):
        lengths.append(min(length, total - sum(lengths)))
        if sum(lengths) == total:
            break
    cu_seqlens = bounds(lengths, torch.int32, "cuda")
    _, rewards, values, mask = (x.flatten() for x in draw_sequences((1, total)))
    result = fastppo.gae(rewards, values, mask, cu_seqlens=cu_seqlens, backend="triton")
    on_the_cpu = [x.cpu() for x in (rewards, values, mask)]
    wanted = fastppo.gae(*on_the_cpu, cu_seqlens=cu_seqlens.cpu(), backend="cpu")
    for one, other in zip(result, wanted, strict=True):
        assert_close(one, other, 1e-5)
    row_lengths = torch.tensor(lengths[:9], device="cuda")
    in_row = torch.arange(131072 + 5, device="cuda") < row_lengths[:, None]
    tokens = int(row_lengths.sum())
    grid = []
    for x in (rewards, values, mask):
        grid.append(x.new_zeros(in_row.shape))
        grid[-1][in_row] = x[:tokens]
    for one, other in zip(fastppo.gae(*grid, backend="triton"), result, strict=True):
        assert torch.equal(one[in_row], other[:tokens])


# ----------------------------------------------------------------------------- accuracy of the head


def head_in_fp64(
    hidden: Tensor, weight: Tensor, data: tuple[Tensor, ...], **options: Any
) -> tuple[Tensor, list[Tensor]]:
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    w = torch.full(data[0].shape, 1 / len(data[0]), device="cuda", dtype=torch.float64)
    loss = draws.exact(leaves[0] @ leaves[1].T, *data, w, **options).loss
    return loss.detach(), list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("vocab", [32000, 50257])
@pytest.mark.parametrize("chunk_size", [100, None])
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "entropy_coef": 0.01}], ids=str)
def test_the_error_in_bf16_is_at_most_twice_that_of_plain_bf16(
    vocab: int, chunk_size: int | None, options: dict[str, Any]
) -> None:
    """Also for odd V with padded rows of the buffer."""
    hidden, weight, data = draw_head(512, vocab, 256)
    _, exact = head_in_fp64(hidden, weight, data, **options)
    plain = [x.clone().requires_grad_() for x in (hidden, weight)]
    w = torch.full((512,), 1 / 512, device="cuda")
    eager = draws.exact(plain[0] @ plain[1].T, *data, w, **options).loss
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    loss = fastppo.linear_ppo_loss(*leaves, *data, chunk_size=chunk_size, **options).loss
    for ours, theirs, true in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(eager, plain), exact, strict=True
    ):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - true).norm() <= 2 * (theirs.double() - true).norm()


def test_fp32_equals_the_definition() -> None:
    hidden, weight, data = draw_head(300, 4001, 96, torch.float32)
    wanted_loss, wanted_grads = head_in_fp64(hidden, weight, data, entropy_coef=0.01)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    loss = fastppo.linear_ppo_loss(*leaves, *data, chunk_size=128, entropy_coef=0.01).loss
    torch.testing.assert_close(loss.double(), wanted_loss, rtol=1e-5, atol=1e-6)
    for grad, true in zip(torch.autograd.grad(loss, leaves), wanted_grads, strict=True):
        assert (grad.double() - true).abs().max() <= 1e-5 * true.abs().max()


@pytest.mark.parametrize("chunk_size", [64, 4096])
@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32], ids=("bf16", "fp32"))
def test_dw_is_accumulated_in_fp32(chunk_size: int, own: torch.dtype) -> None:
    """64 chunks lose no accuracy, and a bf16 dW is the fp32 one rounded once.

    Small integers have exact logits in bf16, so every chunk size gives the same gradient of the
    logits. The expected result is its product with the hidden states in fp64.
    """
    n, vocab, width = 4096, 1000, 64
    _, _, data = draw_head(n, vocab, width)
    hidden, weight = (torch.randint(-1, 2, (k, width), device="cuda").to(own) for k in (n, vocab))
    rows = head_loss(hidden, weight, data, ENTROPY, Gemm(chunk_size, torch.bfloat16))
    logits = hidden.bfloat16() @ weight.bfloat16().T
    assert torch.equal(logits.float(), hidden.float() @ weight.float().T)
    per_token = PerToken(*data, torch.full((n,), 1 / n, device="cuda"))
    grad = triton_backend.ppo_loss(logits, per_token, ENTROPY, PLAIN).grad
    wanted = grad.double().T @ hidden.double()
    assert rows.grads.weight.dtype == own
    error = (rows.grads.weight.double() - wanted).norm() / wanted.norm()
    assert error < (2.0**-8 if own == torch.bfloat16 else 1e-5)


class Gemms(TorchDispatchMode):
    """Records the matrix products in this context: dtypes of the matrices and of the result."""

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
    hidden, weight, data = draw_head(256, 1000, 64)
    with Gemms() as gemms:
        head_loss(hidden.to(own), weight.to(own), data, CLIPPED, Gemm(64, torch.bfloat16))
    assert all(matrices == {torch.bfloat16} for matrices, _ in gemms.seen)
    assert [out for _, out in gemms.seen] == [torch.bfloat16, own, torch.float32] * 4


# --------------------------------------------------------------- reproducibility, capture and waits


@pytest.mark.parametrize("name", ["rows", "head", "sequences"])
def test_the_same_bits_in_a_hundred_runs(name: str) -> None:
    if name == "rows":
        needs(3 * 2 * N * V)
        arguments = draw_rows(N, V)

        def run() -> tuple[Tensor, ...]:
            rows = rows_loss(arguments, entropy_coef=0.01)
            return rows.sums, rows.logprobs, rows.grad

    elif name == "head":
        hidden, weight, data = draw_head(2048, 32000, 512)

        def run() -> tuple[Tensor, ...]:
            rows = head_loss(hidden, weight, data, ENTROPY, Gemm(512))
            return rows.sums, rows.logprobs, rows.grads.hidden, rows.grads.weight

    else:
        batch = draw_sequences((64, 131072))

        def run() -> tuple[Tensor, ...]:
            return tuple(advantages_of(*batch))

    first = run()
    for _ in range(100):
        assert all(map(torch.equal, run(), first))


Step = Callable[[], tuple[Tensor, ...]]


def steps(name: str) -> tuple[Step, list[Tensor]]:
    """Return (a forward and backward pass, the tensors that it reads)."""
    if name.startswith("head"):
        hidden, weight, data = draw_head(256, 32000, 128)
        mask = torch.arange(256, device="cuda") % 3 != 0 if name == "head, mask" else None
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]

        def head_step() -> tuple[Tensor, ...]:
            options: dict[str, Any] = {"chunk_size": 100, "entropy_coef": 0.01}
            out = fastppo.linear_ppo_loss(*leaves, *data, mask, **options)
            grads = torch.autograd.grad(out.loss, leaves)
            return out.loss.detach(), out.metrics["clip_fraction"], *grads

        return head_step, leaves
    if name == "sequences":
        batch = draw_sequences((4, 20000))
        return lambda: tuple(advantages_of(*batch)), list(batch)
    logits, *rest = public_arguments(256, 32000)
    factor = 0.25 if "factor" in name else 1.0

    def step() -> tuple[Tensor, ...]:
        # On a copy, since in place the gradient overwrites the logits.
        leaf = logits.clone().requires_grad_()
        options: dict[str, Any] = {"inplace": "in place" in name, "entropy_coef": 0.01}
        out = fastppo.ppo_loss(leaf * 1, *rest, backend="triton", **options)
        (grad,) = torch.autograd.grad(out.loss * factor, leaf)
        return out.loss.detach(), out.metrics["clip_fraction"], grad

    return step, [logits]


@pytest.mark.parametrize(
    "name", ["loss", "loss, in place, factor", "head", "head, mask", "sequences"]
)
def test_captured_in_a_cuda_graph(name: str) -> None:
    """A synchronization makes a capture fail. The replay uses other numbers in the same memory."""
    step, inputs = steps(name)
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
        inputs[0].copy_(inputs[0].flip(0))
    graph.replay()
    for replayed, eager in zip(captured, step(), strict=True):
        if name.startswith("head"):
            # A mask cuts rows out in eager mode alone, and cuBLAS may choose another algorithm:
            # sums in another order, and logits near a boundary of bf16 that round to its other
            # side.
            scale = eager.abs().max().item()
            torch.testing.assert_close(replayed, eager, rtol=2.0**-7, atol=2.0**-7 * scale)
        else:
            assert torch.equal(replayed, eager)


@pytest.mark.parametrize("name", ["ppo_loss", "token_logprobs", "the head's"])
def test_nothing_waits_for_the_gpu_without_a_mask(name: str) -> None:
    logits, *rest = public_arguments(64, 32000)
    hidden, weight, data = draw_head(256, 32000, 128)
    leaves = [x.requires_grad_() for x in (logits, hidden, weight)]
    weights = torch.rand(256, device="cuda")

    def step() -> None:
        if name == "ppo_loss":
            fastppo.ppo_loss(logits, *rest).loss.backward()
        elif name == "token_logprobs":
            fastppo.token_logprobs(logits, rest[0]).sum().backward()
        else:
            fastppo.linear_ppo_loss(
                hidden, weight, *data, weights=weights, chunk_size=64
            ).loss.backward()
            fastppo.linear_token_logprobs(hidden, weight, data[0], chunk_size=64).sum().backward()

    step()
    with refused_by_torch():
        step()
    assert all(leaf.grad is None or leaf.grad.isfinite().all() for leaf in leaves)


# ------------------------------------------------------------------------------------------ memory


class Attach(torch.autograd.Function):
    """Return the logits' memory as a non-leaf, and drop the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shift: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.new_zeros(())


def test_extra_memory_in_place() -> None:
    """Under 1 % of the logits, forward and backward."""
    needs(2 * 2 * N * V)
    logits, *rest = public_arguments(N, V)
    # Not a leaf, like a head's output; `Attach` drops its gradient.
    shift = torch.zeros((), dtype=logits.dtype, device="cuda", requires_grad=True)
    x = Attach.apply(logits, shift)
    extra = extra_memory(lambda: fastppo.ppo_loss(x, *rest, inplace=True).loss.backward())
    assert extra < 0.01 * logits.nbytes, f"{extra / logits.nbytes:.2%} of the logits"


@pytest.mark.parametrize("n", [8192, 32768])
@pytest.mark.parametrize("head", ["frozen", "fp32"])
def test_extra_memory_at_the_default_chunk(n: int, head: str) -> None:
    """At most 15 % of the logits besides the gradients, for a frozen head and an fp32 one.

    A trained bf16 head also has an fp32 accumulator, the size of 2·H rows of logits: see
    kernels/NOTES.md.
    """
    width = 1024
    hidden, weight, data = draw_head(n, V, width)
    needs(8 * V * width + n * width * 16 + n * V // 2)
    if head == "fp32":
        weight = weight.float()
    leaves = [hidden.requires_grad_(), weight.requires_grad_(head == "fp32")]
    cast = V * width * 2 if head == "fp32" else 0  # autocast's copy, which any bf16 GEMM needs
    gradients = hidden.nbytes + (weight.nbytes if head == "fp32" else 0)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = fastppo.linear_ppo_loss(*leaves, *data).loss
        loss.backward()

    extra, logits = extra_memory(step) - gradients - cast, 2 * n * V
    assert extra <= 0.15 * logits, f"{extra / logits:.1%} of the logits"


def test_extra_memory_without_a_gradient() -> None:
    hidden, weight, data = draw_head(N, V, 1024)
    with torch.no_grad():
        extra = extra_memory(
            lambda: fastppo.linear_token_logprobs(hidden, weight, data[0], return_entropy=True)
        )
    assert extra <= 0.15 * 2 * N * V


# --------------------------------------------------------------------------------- public functions


def test_compiles_to_a_full_graph_with_inductor() -> None:
    logits, *rest = public_arguments(64, 1000)
    leaf = logits.float().requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return fastppo.ppo_loss(x, *rest, entropy_coef=0.1).loss / 3

    losses = torch.compile(loss, fullgraph=True)(leaf), loss(leaf)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(value, leaf)[0] for value in losses))
