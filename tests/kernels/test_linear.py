"""PPO's loss and the statistics from hidden states equal the definition, with each backend.

A matrix of backend, dtype, term, number of rows and chunk size; then masked rows, rows without a
gradient, the GEMMs, chunks and memory. The Triton kernels run in Triton's interpreter.
`test_losses.py` tests the public function in fp64, keyword by keyword.

Tolerances: 1e-5 of the largest entry in fp32, where sums of some hundred terms have some 1e-6, and
1e-11 in fp64. bf16 is compared with plain bf16 PyTorch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import draws
import pytest
import torch
from allocations import allocations
from draws import as_linear
from fastppo_kernels import cpu_backend, definition, linear
from fastppo_kernels.cpu.losses import GEMM_ROWS
from fastppo_kernels.records import (
    Gemm,
    GradientsWanted,
    LinearPPORows,
    Objective,
    PerToken,
    Projection,
    Softmax,
    StatsGradients,
    map_tensors,
)
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastppo

triton_backend = pytest.importorskip(
    "fastppo_kernels.triton_backend", reason="Triton is not installed"
)

pytestmark = [
    # NumPy warns about intended overflows: see test_logits.py.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning"),
]
BACKENDS = {"cpu": cpu_backend, "triton": triton_backend}
backends = pytest.mark.parametrize("backend", BACKENDS)
if torch.cuda.is_available():
    pytest.skip("test_on_a_gpu.py does this on a GPU", allow_module_level=True)

CLIPPED = Objective(0.8, 1.2)
ENTROPY = CLIPPED._replace(entropy_coef=0.1)


def loss_of(
    backend: str,
    parts: list[Tensor],
    data: draws.Batch,
    weights: Tensor,
    objective: Objective = CLIPPED,
    **how: Any,
) -> LinearPPORows:
    """Return the chunk loop's loss of (hidden, weight[, bias])."""
    per_token = PerToken(*data[1:], weights)
    return linear.ppo_loss(
        Projection(*parts), per_token, objective, Softmax(), row_functions=BACKENDS[backend], **how
    )


def head(n: int, vocab: int, width: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return [hidden, weight, bias] with logits of order 1 and the same numbers in every dtype."""
    g = torch.Generator().manual_seed(3)
    shapes = ((n, width), (vocab, width), (vocab,))
    hidden, weight, bias = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    return [x.to(dtype) for x in (hidden, 2 * weight / width**0.5, bias)]


def near(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> draws.Batch:
    """Draw a batch with old logprobs close to this head's, on both sides of every clip."""
    logits = hidden.double() @ weight.double().T
    logits = logits if bias is None else logits + bias.double()
    data = draws.batch((hidden.shape[0],), weight.shape[0], torch.float32)
    logprobs = draws.log_softmax(logits).gather(-1, data.tokens[:, None])[:, 0]
    drawn = draws.log_softmax(data.logits).gather(-1, data.tokens[:, None])[:, 0]
    old = (logprobs + data.old_logprobs.double() - drawn).float()
    return data._replace(logits=logits, old_logprobs=old)


def by_autograd(
    parts: list[Tensor], data: draws.Batch, keywords: dict[str, Any]
) -> tuple[draws.Exact, list[Tensor]]:
    """Return the loss and the gradients of (hidden, weight, bias) by plain autograd in fp64."""
    leaves = [x.double().requires_grad_() for x in parts]
    n = max(1, len(data.tokens))
    w = torch.full(data.tokens.shape, 1 / n, dtype=torch.float64)
    out = draws.exact(leaves[0] @ leaves[1].T + leaves[2], *data[1:], w, **keywords)
    return out, list(torch.autograd.grad(out.loss, leaves))


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Compare relative to the largest entry."""
    scale = wanted.abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(
        found.detach().double(), wanted.detach().double(), rtol=0, atol=tolerance * scale + 1e-30
    )


# --------------------------------------------------------------------------------------- the matrix

LOOPED = (
    "policy",
    "gspo",
    "k1",
    "k3 from ref_logits",
    "full KL",
    "importance weights",
    "temperature per token",
    "soft-cap",
    "everything",
)
"""Terms with operands per row, or with another path through the loop. The others are scalars, which
test_logits.py tests."""

FP32, FP64 = torch.float32, torch.float64
MATRIX = [
    # (backend, dtype, term, rows, rows per chunk)
    *(("triton", FP32, term, 7, 3) for term in LOOPED),
    *(("triton", FP32, "full KL", 7, size) for size in (1, None)),
    *(
        ("cpu", dtype, term, 7, size)
        for dtype in (FP32, FP64)
        for term in ("policy", "everything")
        for size in (1, 3, None)
    ),
    *((backend, FP32, "policy", n, None) for backend in BACKENDS for n in (0, 1)),
]


@pytest.mark.parametrize(("backend", "dtype", "term", "n", "chunk_size"), MATRIX)
def test_the_loop_gives_the_loss_and_gradients_of_autograd(
    backend: str, dtype: torch.dtype, term: str, n: int, chunk_size: int | None
) -> None:
    """Odd N, V and H; chunks of one row, of all rows, and with a shorter last one."""
    parts = head(n, 29, 13)
    data = near(*parts)
    keywords = draws.options(data, term)
    wanted, wanted_grads = by_autograd(parts, data, keywords)
    leaves = [x.to(dtype).requires_grad_() for x in parts]
    given = {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in as_linear(keywords).items()
    }
    loss = fastppo.linear_ppo_loss(
        *leaves[:2], *data[1:], bias=leaves[2], chunk_size=chunk_size, backend=backend, **given
    )
    tolerance = 1e-11 if dtype == FP64 else 1e-5
    for name in ("loss", "logprobs", "entropy", "kl"):
        assert_close(getattr(loss, name), getattr(wanted, name), tolerance)
    for grad, wanted_grad in zip(torch.autograd.grad(loss.loss, leaves), wanted_grads, strict=True):
        assert_close(grad, wanted_grad, tolerance)
        assert bool((grad != 0).any()) == (n > 0)


def as_fp32(record: Any) -> Any:
    return map_tensors(Tensor.float, record)


def as_fp64(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


@backends
@pytest.mark.parametrize("chunk_size", [3, None])
@pytest.mark.parametrize("upstream", ["all", "KL alone", "no reference"])
def test_statistics_with_a_reference_head_and_their_gradients(
    backend: str, chunk_size: int | None, upstream: str
) -> None:
    """With a reference of another width and with a bias, and a gradient for each statistic."""
    n, vocab = 7, 29
    parts = head(n, vocab, 13)
    ref_parts = [x + 0.3 for x in head(n, vocab, 5)]
    tokens = torch.arange(n) * 4 % vocab
    temperatures = torch.linspace(0.5, 2.0, n, dtype=torch.float64)
    softmax = Softmax(temperatures=temperatures, logit_scale=0.7, softcap=4.0)
    g = torch.randn(3, n, dtype=torch.float64)
    if upstream == "KL alone":
        g[:2] = 0
    grads = StatsGradients(*g) if upstream != "no reference" else StatsGradients(g[0], g[1])
    ref = Projection(*ref_parts) if grads.kl is not None else None

    leaves = [x.clone().requires_grad_() for x in parts]
    wanted = definition.linear_token_stats(Projection(*leaves), tokens, softmax, ref_projection=ref)
    total = sum((x * y).sum() for x, y in zip(wanted, grads, strict=False) if y is not None)
    wanted_grads = torch.autograd.grad(total, leaves)

    options: dict[str, Any] = {
        "row_functions": BACKENDS[backend],
        "gemm": Gemm(chunk_size),
        "ref_projection": None if ref is None else as_fp32(ref),
    }
    projection = as_fp32(Projection(*parts))
    stats = linear.token_stats(projection, tokens, as_fp32(softmax), **options)
    for statistic, wanted_statistic in zip(stats, wanted, strict=True):
        assert_close(statistic, wanted_statistic, 1e-5)
    if ref is not None:
        assert (stats.kl > 1e-3).all()
    projection_grads = linear.token_stats_backward(
        as_fp32(grads), projection, tokens, stats, as_fp32(softmax), **options
    )
    for grad, wanted_grad in zip(projection_grads, wanted_grads, strict=True):
        assert_close(grad, wanted_grad, 1e-5)


# ------------------------------------------------------------------------------------ masked rows


@backends
@pytest.mark.parametrize("by", ["mask", "weights", "mask under compile"])
def test_masked_rows_may_hold_anything_whether_they_are_skipped_or_not(
    backend: str, by: str
) -> None:
    """A NaN row times a gradient of 0 would make all of dW NaN."""
    keep = torch.tensor([True, False, True, True, False, True, True])
    parts = head(7, 29, 13, torch.float32)
    data = near(*parts)

    def gradients(hidden: Tensor, data: draws.Batch) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden, *parts[1:])]
        selection = {"weights": keep / 5.0} if by == "weights" else {"mask": keep}

        def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return fastppo.linear_ppo_loss(
                hidden, weight, *data[1:], bias=bias, chunk_size=3, backend=backend, **selection
            ).loss

        if by == "mask under compile":
            loss = torch.compile(loss, backend="eager", fullgraph=True)
        found = loss(*leaves)
        return [found.detach(), *torch.autograd.grad(found, leaves)]

    wanted = gradients(parts[0], data)
    bad = draws.Batch(data.logits, *(x.clone() for x in data[1:]))
    bad.tokens[~keep], bad.old_logprobs[~keep], bad.advantages[~keep] = -100, torch.nan, torch.inf
    found = gradients(torch.where(keep[:, None], parts[0], torch.nan), bad)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert (found[1][~keep] == 0).all()
    _, wanted_grads = by_autograd(
        [parts[0][keep], *parts[1:]], draws.Batch(*(x[keep] for x in data)), {}
    )
    assert_close(found[1][keep], wanted_grads[0], 1e-5)
    assert_close(found[2], wanted_grads[1], 1e-5)


@pytest.mark.parametrize("width", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32])
def test_the_loop_requests_only_dtypes_that_cublas_supports(
    width: torch.dtype, wanted: torch.dtype
) -> None:
    """cuBLAS writes the operands' dtype, or fp32. On meta tensors, which have torch's dtype checks
    and no numbers."""

    class OnGpu(Tensor):
        is_cuda = True  # type: ignore[assignment]

    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(4, 4, device="meta", dtype=dtype).as_subclass(OnGpu)

    linear._mm(empty(width), empty(width), out=empty(wanted))
    into = empty(torch.float32)
    linear._accumulate(into, empty(width), empty(width), is_first=True)
    if torch.__version__ >= "2.13":  # the meta function of 2.11 takes out_dtype for beta
        linear._accumulate(into, empty(width), empty(width), is_first=False)


# ------------------------------------------------------------- rows whose gradient is exactly 0


class Product(NamedTuple):
    """A matrix product: shapes and dtypes of its two matrices."""

    shapes: list[tuple[int, ...]]
    dtypes: set[torch.dtype]


class Products(TorchDispatchMode):
    """Records the matrix products in this context."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.__name__.split(".")[0].rstrip("_") in ("mm", "addmm"):
            matrices = [x for x in args[-2:] if isinstance(x, Tensor) and x.dim() == 2]
            self.seen.append(
                Product([tuple(x.shape) for x in matrices], {x.dtype for x in matrices})
            )
        return out

    def rows_with_inner(self, size: int) -> int:
        """Count the rows of the first matrices with this inner dimension.

        With the vocabulary's size these are the rows of dX = G W.
        """
        return sum(shapes[0][0] for shapes, _ in self.seen if shapes[0][1] == size)


CAUSES = ("clip", "zero advantage", "all", "none", "one")


def caused(cause: str, parts: list[Tensor]) -> draws.Batch:
    """Return a batch with some rows without a gradient, for this cause."""
    data = near(*parts)
    n = len(data.tokens)
    if cause == "zero advantage":
        data.advantages[::3] = 0.0
    if cause in ("all", "none"):  # above or below every clip
        data.old_logprobs.sub_(5.0)
        data.advantages.copy_(torch.ones(n) if cause == "all" else -torch.ones(n))
    if cause == "one":
        data.advantages.zero_()[17] = 1.0
        data.old_logprobs[17] = data.old_logprobs[17] + 5.0  # ratio below the clip: pulled back up
    return data


WITH_TERMS = {
    "policy": CLIPPED,
    "entropy": ENTROPY,
    "k3": CLIPPED._replace(kl_coef=0.4),
    "full KL": CLIPPED._replace(kl_coef=0.4, kl_estimator="full"),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("cause", "term"),
    [(cause, "policy") for cause in CAUSES]
    + [("all", term) for term in WITH_TERMS if term != "policy"],
)
def test_rows_without_a_gradient_skip_the_gradient_gemms(
    cause: str, term: str, masked: bool
) -> None:
    """Loss and gradients of the definition, from products over fewer rows. Clipped rows are kept if
    entropy or KL have a gradient."""
    n = 36
    parts = head(n, 31, 9, torch.float32)
    data = caused(cause, parts)
    weights = torch.ones(n) / n
    if masked:
        weights[::5] = 0.0
    ref_logprobs = data.old_logprobs - 0.3 if term == "k3" else None
    per_token = PerToken(*data[1:], weights, ref_logprobs=ref_logprobs)
    ref = Projection(0.9 * parts[0], parts[1]) if term == "full KL" else None
    operands = (Projection(*parts), per_token, WITH_TERMS[term], Softmax())
    how: dict[str, Any] = {
        "row_functions": cpu_backend,
        "ref_projection": ref,
        "gemm": Gemm(14),
    }
    with Products() as products:
        rows = linear.ppo_loss(*operands, **how)
    again = linear.ppo_loss(*operands, **how)
    wide = [map_tensors(as_fp64, record) for record in (*operands, ref or Projection(*parts))]
    wanted = definition.linear_ppo_loss(*wide[:4], ref_projection=wide[4])
    assert_close(rows.sums, wanted.sums, 1e-5)
    for grad, same, wanted_grad in zip(rows.grads, again.grads, wanted.grads, strict=True):
        assert torch.equal(grad, same)
        assert_close(grad, wanted_grad, 1e-5)
    moving = int((wanted.grads.hidden != 0).any(1).sum())
    assert int((rows.grads.hidden != 0).any(1).sum()) == moving
    inputs = products.rows_with_inner(31)
    kept = int((weights != 0).sum())
    chunks = math.ceil(kept / 14)
    assert moving <= inputs <= min(kept, moving + chunks * (GEMM_ROWS - 1))
    assert (inputs == 0) == (moving == 0)
    expected = {"all": 0, "none": kept, "one": 1}.get(cause)
    if term != "policy":
        assert moving == inputs == kept
    elif expected is not None:
        assert moving == expected
    else:
        assert 0 < moving < kept


def test_a_nan_row_is_kept() -> None:
    """It must reach the gradient, to be noticed."""
    parts = head(6, 31, 9, torch.float32)
    data = near(*parts)
    data.advantages.zero_()
    parts[0][2, 0] = torch.nan
    grads = loss_of("cpu", parts, data, torch.full((6,), 1 / 6)).grads
    assert grads.weight is not None
    assert grads.hidden is not None
    assert grads.weight.isnan().all()
    assert grads.hidden.isnan().any(1).tolist() == [i == 2 for i in range(6)]


# ------------------------------------------------------------------ GEMMs: how many, which dtypes


@backends
@pytest.mark.parametrize("need", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_frozen_parts_cost_no_gemm(backend: str, need: tuple[int, int, int]) -> None:
    """The loss computes the logits once, the statistics again in their backward pass; dX and dW
    only if needed."""
    parts = head(8, 31, 9, torch.float32)
    data = near(*parts)
    weights = torch.full((8,), 0.125)
    wanted = GradientsWanted(*map(bool, need))
    with Products() as products:
        rows = loss_of(backend, parts, data, weights, ENTROPY, gemm=Gemm(4), wanted=wanted)
    assert len(products.seen) == 2 * (1 + need[0] + need[1])
    assert tuple(grad is not None for grad in rows.grads) == wanted
    options: dict[str, Any] = {"row_functions": BACKENDS[backend], "gemm": Gemm(4)}
    with Products() as products:
        stats = linear.token_stats(Projection(*parts), data.tokens, Softmax(), **options)
        grads = linear.token_stats_backward(
            StatsGradients(torch.ones(8)),
            Projection(*parts),
            data.tokens,
            stats,
            Softmax(),
            wanted=wanted,
            **options,
        )
    assert len(products.seen) == 2 * (1 + 1 + need[0] + need[1])
    assert tuple(grad is not None for grad in grads) == wanted


@backends
@pytest.mark.parametrize(
    ("dtype", "chunk_size", "cast"),
    [
        (torch.bfloat16, 4, False),
        (torch.bfloat16, 4, True),
        (torch.bfloat16, 8, True),
        (torch.float16, 4, False),
        (torch.float32, 4, False),
    ],
)
def test_gemms_run_in_the_compute_dtype_except_an_accumulated_dw_on_a_cpu(
    backend: str, dtype: torch.dtype, chunk_size: int, cast: bool
) -> None:
    """For any dtype of the parameters; gradients have the parameters' dtypes.

    A CPU has no product of 16-bit matrices in fp32: with several chunks it multiplies fp32 copies.
    """
    own = torch.float32 if cast else dtype
    parts = head(8, 31, 9, own)
    data = near(*parts)
    how: dict[str, Any] = {"gemm": Gemm(chunk_size, dtype)}
    with Products() as products:
        rows = loss_of(backend, parts, data, torch.full((8,), 0.125), ENTROPY, **how)
    chunks = 8 // chunk_size
    assert len(products.seen) == 3 * chunks
    shares = [x for x in products.seen if x.shapes == [(31, chunk_size), (chunk_size, 9)]]
    assert len(shares) == chunks
    for product in products.seen:
        added_up = product in shares and chunks > 1
        assert product.dtypes == {torch.float32 if added_up else dtype}
    assert {x.dtype for x in rows.grads if x is not None} == {own}


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("cpu", torch.bfloat16), ("cpu", torch.float16), ("triton", torch.float16)],
)
def test_a_chunks_contribution_to_dw_is_not_rounded(backend: str, dtype: torch.dtype) -> None:
    """With one row per chunk, dW is rounded once, compared with an fp64 sum of the same rounded
    gradients.

    A sum in the weight's dtype, rounded per chunk, would be off by about √n of that.
    """
    n = 64 if backend == "cpu" else 16
    parts = head(n, 31, 9, dtype)
    data = near(*parts)
    rows = BACKENDS[backend]
    logits = (parts[0] @ parts[1].T).contiguous()
    per_token = PerToken(*data[1:], torch.full((n,), 1 / n))
    grad = rows.ppo_loss(logits, per_token, ENTROPY, Softmax()).grad
    wanted = grad.double().T @ parts[0].double()
    found = loss_of(backend, parts[:2], data, per_token.weights, ENTROPY, gemm=Gemm(1)).grads.weight
    assert found is not None
    unit = torch.finfo(dtype).eps
    error = (found.double() - wanted).abs()
    # half a unit in the last place of dW, and of a gradient that a one-row GEMM rounds differently
    assert (error <= unit * wanted.abs() + unit * wanted.abs().max() / n).all()


def test_one_chunk_needs_no_accumulator() -> None:
    """dW is written in the weight's dtype: no fp32 allocation has its size."""
    hidden, weight = torch.ones(2, 64).bfloat16(), torch.zeros(301, 64).bfloat16()
    data = draws.Batch(torch.empty(0), torch.zeros(2, dtype=torch.int64), *torch.ones(2, 2))
    for backend in BACKENDS:
        largest, _ = allocations(
            lambda backend=backend: loss_of(  # type: ignore[misc]
                backend, [hidden, weight], data, torch.ones(2), gemm=Gemm(2)
            )
        )
        assert largest == weight.nbytes


@pytest.mark.parametrize(
    ("term", "chunk_size"),
    [("policy", 16), ("entropy", 1), ("entropy", 64), ("full KL", 16), ("everything", 16)],
)
def test_the_error_in_bf16_is_at_most_twice_that_of_plain_bf16(term: str, chunk_size: int) -> None:
    """Plain: F.linear in bf16, the loss in fp32 on its logits, autograd. Both against fp64."""
    n, vocab, width = 63, 257, 33
    parts = head(n, vocab, width, torch.bfloat16)
    data = near(*parts)
    keywords = draws.options(data._replace(logits=data.logits.bfloat16()), term)
    exact, exact_grads = by_autograd(parts, data, keywords)

    plain = [x.clone().requires_grad_() for x in parts]
    logits = torch.nn.functional.linear(*plain)
    weights = torch.full((n,), 1 / n)
    eager = draws.exact(logits, *data[1:], weights, **keywords)
    eager_grads = torch.autograd.grad(eager.loss, plain)
    leaves = [x.clone().requires_grad_() for x in parts]
    found = fastppo.linear_ppo_loss(
        *leaves[:2], *data[1:], bias=leaves[2], chunk_size=chunk_size, **as_linear(keywords)
    )
    grads = torch.autograd.grad(found.loss, leaves)
    # The loss is a single draw of a rounding error, which may be 0; its tokens are many.
    for name in ("logprobs", "entropy", "kl"):
        ours, theirs, true = (getattr(x, name).double() for x in (found, eager, exact))
        assert (ours - true).norm() <= 2 * (theirs - true).norm() + 1e-6 * true.norm()
    for ours, theirs, true in zip(grads, eager_grads, exact_grads, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - true).norm() <= 2 * (theirs.double() - true).norm()


# ------------------------------------------------------------------------- chunks and memory


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("vocab", [3, 1009, 32000, 151936, 262144])
def test_the_default_chunk(device: str, vocab: int) -> None:
    one_chunk, enough = {"cpu": (2**23, 512), "cuda": (2**28, 4096)}[device]
    for width in (896, 4096):
        for rows in (0, 1, 7, 512, 2048, 8192, 8193, 32768, 100_001, 2**20):
            size = linear.chunk_rows(rows, vocab, torch.device(device), width=width)
            assert 1 <= size <= max(1, rows)
            if rows * vocab <= one_chunk:
                assert size == max(1, rows)
                continue
            chunks = math.ceil(rows / size)
            if device == "cuda":
                least = 4096 if width < 2048 else 2048
                assert size >= min(rows, least)
                assert size <= max(enough, one_chunk // vocab, 2 * least - 1)
                if rows >= 8 * least:
                    assert size <= 0.15 * rows
            else:
                assert size < rows or rows == 1
                assert size <= max(enough, one_chunk // vocab)
            # A last chunk of few rows would cost as much dW traffic as a full one.
            assert rows - (chunks - 1) * size > 0.5 * size or rows < 2 * chunks


def test_one_chunk_if_it_takes_no_more_memory_than_the_accumulator_of_several() -> None:
    """A bf16 head's dW is accumulated in fp32, the memory of 2·H rows of bf16 logits; an fp32
    head's is not."""
    cuda, vocab, width = torch.device("cuda"), 151936, 4096
    fp32 = torch.empty(vocab, width, device="meta")
    bf16 = fp32.bfloat16()
    spared = linear.accumulator_rows(bf16, torch.bfloat16)
    assert spared == 2 * width
    assert linear.accumulator_rows(bf16, torch.bfloat16, buffers=2) == width
    assert linear.accumulator_rows(fp32, torch.bfloat16) == 0
    for rows in (2 * width, 2 * width + 1):
        size = linear.chunk_rows(rows, vocab, cuda, width=width, spared_rows=spared)
        assert (size == rows) == (rows <= spared)
    assert (
        linear.chunk_rows(8192, vocab, torch.device("cpu"), width=width, spared_rows=spared) < 8192
    )


def test_the_padding_of_the_buffers_rows_is_zero() -> None:
    """oneDNN's bf16 products read some of it times 0: NaN would reach every gradient."""
    projection = linear.Projection(torch.zeros(2, 8), torch.zeros(1003, 8), None)
    head = linear._Head(projection, torch.bfloat16, buffer_rows=3, row_functions=triton_backend)
    whole = head.buffer._base
    assert whole is not None
    assert whole.shape == (3, 1024)
    assert (whole[:, 1003:] == 0).all()


def test_the_logits_are_freed_before_dw_is_cast() -> None:
    """The cast is the peak of memory, and larger chunks do not raise it."""
    hidden, weight, _ = head(12, 521, 64, torch.bfloat16)
    data = near(hidden, weight, None)

    def peak(chunk_size: int) -> int:
        return allocations(
            lambda: loss_of("cpu", [hidden, weight], data, torch.ones(12), gemm=Gemm(chunk_size))
        )[1]

    row_bytes = 521 * weight.itemsize
    assert peak(4) - peak(2) < row_bytes


@pytest.mark.parametrize(
    ("backend", "term", "grad"),
    [
        ("cpu", "entropy", True),
        ("cpu", "full KL", True),
        ("cpu", "policy", False),
        ("triton", "full KL", True),
    ],
)
def test_no_tensor_has_the_size_of_the_logits(
    backend: str, term: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default and a given chunk size, in forward and backward, and without a gradient."""
    little = linear.LINEAR_BUDGETS["cpu"]._replace(one_chunk=2**16)  # as small as the batch here
    monkeypatch.setitem(linear.LINEAR_BUDGETS, "cpu", little)
    n, vocab, width = (600, 521, 3) if backend == "cpu" else (10, 2053, 3)
    leaves = [x.requires_grad_(grad) for x in head(n, vocab, width, torch.float32)]
    data = near(*(x.detach() for x in leaves))
    options: dict[str, Any] = {"entropy_coef": 0.1} if term == "entropy" else {}
    if term == "full KL":
        options = {"kl_coef": 0.1, "kl_estimator": "full", "ref_hidden": leaves[0].detach()}
        options["ref_weight"] = 0.9 * leaves[1].detach()

    def work(chunk_size: int | None) -> None:
        how: dict[str, Any] = {"bias": leaves[2], "chunk_size": chunk_size, "backend": backend}
        out = fastppo.linear_ppo_loss(*leaves[:2], *data[1:], **how, **options)
        logprobs = fastppo.linear_token_logprobs(*leaves[:2], data.tokens, **how)
        if grad:
            (out.loss + (logprobs**2).mean()).backward()

    for chunk_size in (None, 6) if backend == "cpu" else (3,):
        largest, _ = allocations(lambda chunk_size=chunk_size: work(chunk_size))  # type: ignore[misc]
        assert largest < 4 * n * vocab / 2 + 4 * vocab


@backends
def test_every_chunk_uses_the_same_memory(backend: str) -> None:
    """Twice as many chunks do not raise the peak or need a second buffer."""
    (most, step, vocab), width = (64, 16, 4001) if backend == "cpu" else (12, 3, 2053), 3
    leaves = [x.requires_grad_() for x in head(most, vocab, width, torch.float32)]
    data = near(*(x.detach() for x in leaves))

    def peak(n: int) -> int:
        rows = [x[:n] for x in data[1:]]
        hidden = leaves[0].detach()[:n].requires_grad_()
        return allocations(
            lambda: fastppo.linear_ppo_loss(
                hidden, leaves[1], *rows, chunk_size=step, backend=backend
            ).loss.backward()
        )[1]

    chunk = 4 * step * vocab
    assert peak(most) - peak(most // 2) < 0.05 * chunk


# ---------------------------------------------------------------------------------- many ranks


def test_a_dtensor_raises_an_error_with_a_fix(tmp_path: Path) -> None:
    """On a mesh of one process. Gathered as the message says, it works."""
    parts = head(4, 7, 3, torch.float32)
    data = near(*parts)
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        sharded = distribute_tensor(parts[1], init_device_mesh("cpu", (1,)), [Shard(0)])
        says = r"weight must be a plain tensor, got a DTensor.*weight\.full_tensor\("
        with pytest.raises(TypeError, match=says):
            fastppo.linear_ppo_loss(parts[0], sharded, *data[1:])
        with pytest.raises(TypeError, match=says):
            fastppo.linear_token_logprobs(parts[0], sharded, data.tokens)
        gathered = fastppo.linear_ppo_loss(parts[0], sharded.full_tensor(), *data[1:]).loss
        assert torch.equal(gathered, fastppo.linear_ppo_loss(*parts[:2], *data[1:]).loss)
    finally:
        distributed.destroy_process_group()
