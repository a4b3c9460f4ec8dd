"""The GEMM with the softmax in its epilogue against the definition in fp64, under the interpreter.

Tolerance: logits are fp32 sums of H products of order 1, so off by some 1e-6·√H, and the statistics
by as much: 2e-5 nats for logits up to 30. Where products are rounded to 16 bits the operands are
small integers, so that the rounded logits are exact and the statistics keep their fp32 accuracy
(the interpreter cuts bf16 off where hardware rounds it, and both agree on exact numbers).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fastppo_kernels import definition
from fastppo_kernels.records import Projection, Softmax, TokenStats
from torch import Tensor

triton_linear_stats = pytest.importorskip(
    "fastppo_kernels.triton_linear_stats", reason="Triton is not installed"
)

pytestmark = [
    # NumPy announces what the kernels mean to happen: see test_triton_rows.py.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda":  # there the same tests run the compiled kernels
    pytestmark.append(pytest.mark.gpu)
NATS = 2e-5
PLAIN = Softmax()


def draw(n: int, vocab: int, width: int, *, whole: bool = False) -> tuple[Projection, Tensor]:
    """(projection, tokens), fp64; `whole`: logits are integers below 256, exact in bf16."""
    g = torch.Generator().manual_seed(0)
    if whole:
        hidden = torch.randint(-2, 3, (n, width), generator=g).double()
        weight = torch.randint(-1, 2, (vocab, width), generator=g).double()
    else:
        hidden = torch.randn(n, width, generator=g, dtype=torch.float64)
        weight = torch.randn(vocab, width, generator=g, dtype=torch.float64) * 3 / width**0.5
    return Projection(hidden, weight), torch.randint(vocab, (n,), generator=g)


def moved(record: Any, dtype: torch.dtype, device: str = "cpu") -> Any:
    return type(record)(*(x.to(device, dtype) if isinstance(x, Tensor) else x for x in record))


def kernel_stats(
    projection: Projection, tokens: Tensor, softmax: Softmax = PLAIN, dtype: Any = torch.float32
) -> TokenStats:
    return triton_linear_stats.linear_token_stats(
        moved(projection, dtype, DEVICE),
        tokens.to(DEVICE),
        moved(softmax, torch.float32, DEVICE),
    )


def check(
    projection: Projection, tokens: Tensor, softmax: Softmax = PLAIN, dtype: Any = torch.float32
) -> TokenStats:
    rounded = moved(moved(projection, dtype), torch.float64)
    wanted = definition.linear_token_stats(rounded, tokens, moved(softmax, torch.float64))
    found = kernel_stats(projection, tokens, softmax, dtype)
    for name, one, other in zip(wanted._fields, found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert one.shape == other.shape
        error = (one.cpu().double() - other).abs() - NATS - 1e-6 * other.abs()
        assert not (error > 0).any(), f"{name}: got {one}, want {other}"
        assert torch.equal(one.cpu().isnan(), other.isnan()), name
    return found


SIZES = [(1, 1, 1), (1, 3, 5), (5, 64, 16), (65, 129, 33), (3, 1003, 48), (130, 67, 100)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_odd_sizes(size: tuple[int, int, int]) -> None:
    """Less than a tile, whole tiles, and a rest, along each of N, V and H."""
    check(*draw(*size))


EACH = torch.linspace(0.5, 2.0, 7)
SOFTMAX: dict[str, Softmax] = {
    "bias": PLAIN,
    "temperature": Softmax(temperature=0.6),
    "temperature per token": Softmax(temperatures=EACH),
    "logit scale": Softmax(logit_scale=0.3),
    "soft-cap": Softmax(softcap=5.0),
    "everything": Softmax(1.0, EACH, 1.5, 8.0),
}


@pytest.mark.parametrize("name", SOFTMAX)
def test_every_operand(name: str) -> None:
    projection, tokens = draw(7, 101, 16)
    if name in ("bias", "everything"):
        projection = projection._replace(bias=torch.linspace(-2, 2, 101, dtype=torch.float64))
    check(projection, tokens, SOFTMAX[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=("bf16", "fp16"))
@pytest.mark.parametrize("size", [(5, 131, 16), (130, 300, 64), (3, 67, 21)], ids=str)
def test_sixteen_bit_operands_are_summed_in_fp32(
    dtype: torch.dtype, size: tuple[int, int, int]
) -> None:
    """Both tiles, the aligned one and the other."""
    check(*draw(*size, whole=True), dtype=dtype)


def test_logits_are_rounded_as_they_are_on_the_path_through_memory() -> None:
    """fp16, which the interpreter rounds as hardware does: the chunked path's own statistics."""
    projection, tokens = draw(40, 301, 64)
    half = moved(moved(projection, torch.float16), torch.float64)
    found = kernel_stats(projection, tokens, dtype=torch.float16)
    logits = definition.logits_of(half).half()
    rounded = definition.token_stats(logits.double(), tokens, PLAIN)
    exact = definition.linear_token_stats(half, tokens, PLAIN)
    error = (found.logprobs.cpu().double() - rounded.logprobs).abs()
    # fp32 sums may fall on the other side of a boundary of fp16: 2⁻¹¹ of a logit, in few rows
    assert error.median() < NATS
    assert (exact.logprobs - rounded.logprobs).abs().median() > 10 * NATS


@pytest.mark.parametrize("level", [-1000.0, -110.0, 1000.0])
def test_no_offset_of_the_row_costs_digits_or_makes_infinities(level: float) -> None:
    """The maximum does not start at 0, and the entropy's sum holds shifted scores alone."""
    (hidden, weight, _), tokens = draw(4, 203, 16)
    hidden[:, 0], weight[:, 0] = 1.0, level
    # The logits themselves carry fp32's 6e-8 of the level; eighths are exact at 1000.
    hidden[:, 1:] = (hidden[:, 1:] * 4).round() / 4
    weight[:, 1:] = (weight[:, 1:] * 4).round() / 4
    found = check(Projection(hidden, weight), tokens)
    assert found.logprobs.isfinite().all()
    assert found.entropy.isfinite().all()


def test_a_masked_vocabulary_is_the_smaller_vocabulary() -> None:
    """A bias of −inf: over a whole tile, over all but the token, and over the token itself."""
    projection, tokens = draw(4, 203, 16)
    bias = torch.zeros(203, dtype=torch.float64)
    bias[:130] = -torch.inf
    tokens = torch.tensor([130, 202, 150, 175])
    check(projection._replace(bias=bias), tokens)
    bias[:] = -torch.inf
    bias[7] = 0.0
    found = check(projection._replace(bias=bias), torch.full((4,), 7))
    assert found.logprobs.tolist() == [0.0] * 4
    assert found.entropy.tolist() == [0.0] * 4
    ruled_out = kernel_stats(projection._replace(bias=bias), torch.full((4,), 8))
    assert (ruled_out.logprobs <= -1e29).all()
    assert not ruled_out.entropy.isnan().any()


@pytest.mark.parametrize("nats", [5.0, 12.0, 20.0])
def test_a_sure_policy_keeps_the_digits_of_its_logprob(nats: float) -> None:
    """−log(1 + the others' share), where log S near 0 would hold no digit of it."""
    weight = torch.zeros(201, 16, dtype=torch.float64)
    weight[9, 0] = nats
    hidden = torch.zeros(1, 16, dtype=torch.float64)
    hidden[0, 0] = 1.0
    projection, tokens = Projection(hidden, weight), torch.tensor([9])
    found = kernel_stats(projection, tokens)
    wanted = definition.linear_token_stats(projection, tokens, PLAIN)
    assert found.logprobs.item() == pytest.approx(wanted.logprobs.item(), rel=1e-5)


def test_nan_shows_in_its_own_row_and_a_token_outside_reads_nothing() -> None:
    projection, tokens = draw(5, 203, 16)
    projection.hidden[2, 3] = torch.nan
    tokens[0], tokens[4] = -100, 203
    found = kernel_stats(projection, tokens)
    assert found.logprobs.isnan().tolist() == [True, False, True, False, True]
    assert found.entropy[2].isnan()


@pytest.mark.parametrize("multiprocessors", [1, 2, 5, 132, 10_000])
def test_any_cut_of_the_vocabulary_gives_the_same_statistics(
    multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stretch, several, one for each tile of columns; the same bits on a second run."""
    monkeypatch.setattr(
        triton_linear_stats, "device_limits", lambda device: (multiprocessors, 2**20)
    )
    arguments = draw(70, 523, 16)
    found = check(*arguments)
    again = check(*arguments)
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one, other)


def test_strided_operands_are_read_in_place_and_a_transposed_one_is_refused() -> None:
    projection, tokens = draw(5, 67, 16)
    wide = torch.full((5, 40), torch.nan, dtype=torch.float64)
    wide[:, :16] = projection.hidden
    check(projection._replace(hidden=wide[:, :16]), tokens)
    transposed = moved(projection, torch.float32)
    transposed = transposed._replace(weight=transposed.weight.T.contiguous().T)
    with pytest.raises(ValueError, match=r"weight must have a dense last axis, got strides"):
        triton_linear_stats.linear_token_stats(transposed, tokens, PLAIN)
    with pytest.raises(ValueError, match="must be bfloat16, float16 or float32"):
        triton_linear_stats.linear_token_stats(projection, tokens, PLAIN)


def test_no_row() -> None:
    projection = Projection(torch.zeros(0, 4), torch.zeros(5, 4))
    stats = kernel_stats(projection, torch.zeros(0, dtype=torch.int64))
    assert all(x.shape[0] == 0 for x in stats)
