"""GAE, reward shaping and whitening against a textbook loop, NumPy, and other layouts of the same
data.

`gae` sums in fp64 and casts once, so it is within an fp32 rounding of fp64: 1e-6 of the largest
entry. Layouts (padded, packed, with and without gaps) are concatenated before the sum and must
agree exactly, except for whitening without given moments, which adds up rows first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastppo
from benchmarks.conformance import formulas as paper

B, T = 5, 9
LENGTHS = [9, 4, 1, 0, 7]


def prefix_mask(lengths: list[int], length: int) -> Tensor:
    return torch.arange(length) < torch.tensor(lengths).unsqueeze(1)


def bits(actual: Any, expected: Any) -> None:
    torch.testing.assert_close([*actual], [*expected], rtol=0, atol=0)


# --------------------------------------------------------------------------------------------- GAE


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 1)], ids=str)
def test_empty_batches_have_empty_advantages(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    mask = torch.ones(shape, dtype=torch.bool)
    out = fastppo.compute_advantages(torch.zeros(shape[0]), x, x, x, mask, kl_coef=0.1)
    assert out.advantages.shape == out.returns.shape == shape
    assert out.kl.shape == shape[:1]
    assert all(torch.isfinite(part).all() for part in out)
    none = torch.zeros(0)
    starts = torch.zeros(3, dtype=torch.int32)  # two packed sequences of no tokens
    for part in fastppo.gae(none, none, cu_seqlens=starts):
        assert part.shape == (0,)


def test_advantages_are_constants_of_the_loss() -> None:
    leaves = [torch.randn(B, T, requires_grad=True) for _ in range(3)]
    scores = torch.randn(B, requires_grad=True)
    mask = torch.ones(B, T, dtype=torch.bool)
    out = fastppo.compute_advantages(scores, *leaves, mask, kl_coef=0.1)
    for part in (*out, *fastppo.gae(*leaves[:2]), fastppo.whiten(leaves[0])):
        assert not part.requires_grad


# --------------------------------------------------------------------------------- reward shaping


def test_the_score_is_on_the_last_response_token() -> None:
    """With λ = γ = 1 and no values, returns are the score up to the last unmasked token, then 0."""
    mask = prefix_mask(LENGTHS, T)
    mask[0, 8] = False  # the last token
    mask[4, 2] = False  # a gap
    scores = torch.arange(1.0, 6.0)
    zeros = torch.zeros(B, T)
    options: dict[str, Any] = {"gamma": 1.0, "lam": 1.0, "whiten": False}
    out = fastppo.compute_advantages(scores, zeros, zeros, None, mask, **options)
    assert torch.equal(out.returns, mask * scores[:, None])
    options["gamma"] = 0.0
    at_once = fastppo.compute_advantages(scores, zeros, zeros, None, mask, **options)
    assert torch.equal(at_once.returns.count_nonzero(1), mask.any(1).long())


# --------------------------------------------------------------------------------------- whitening


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_is_the_masked_standard_score(shift_mean: bool) -> None:
    """Masked entries may hold anything."""
    mask = prefix_mask(LENGTHS, T)
    x = 3 * torch.randn(B, T, dtype=torch.float64) + 5
    expected = np.zeros((B, T))
    counted = paper.whiten({"x": x[mask].numpy()}, shift_mean=shift_mean)
    expected[mask.numpy()] = counted["whitened"]
    for garbage in (0.0, float("nan"), float("inf")):
        actual = fastppo.whiten(torch.where(mask, x, garbage), mask, shift_mean=shift_mean)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_whitening_few_or_equal_numbers_stays_finite(count: int) -> None:
    mask = torch.arange(4) < count
    white = fastppo.whiten(torch.full((4,), 7.0), mask)
    assert (white == 0).all()


@pytest.mark.parametrize(
    ("shape", "scale", "mean"),
    [
        *(((64,), scale, 0.0) for scale in (1e-20, 1e10, 1e20, 1e30)),
        # Numbers whose sum overflows fp32, two of them and many.
        *((shape, 3e37, 3e38) for shape in ((1, 2), (2, 4096))),
        # Σx² − n·mean² cancels completely in fp32.
        ((1000,), 1.0, 1e5),
    ],
)
def test_whitening_handles_sums_that_overflow_or_cancel_in_fp32(
    shape: tuple[int, ...], scale: float, mean: float
) -> None:
    x = mean + scale * torch.rand(shape, generator=torch.Generator().manual_seed(1))
    exact = paper.whiten({"x": x.double().numpy()}, shift_mean=True)["whitened"]
    expected = torch.from_numpy(exact)
    torch.testing.assert_close(fastppo.whiten(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_whitening_does_not_cancel_where_the_first_numbers_are_masked() -> None:
    generator = torch.Generator().manual_seed(1)
    x = 1e7 + torch.randn(60_000, generator=generator, dtype=torch.float64)
    mask = torch.arange(len(x)) >= 20_000
    expected = torch.zeros_like(x)
    exact = paper.whiten({"x": x[mask].numpy()}, shift_mean=True)["whitened"]
    expected[mask] = torch.from_numpy(exact)
    torch.testing.assert_close(fastppo.whiten(x, mask), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_moments_of_parts_whiten_like_the_whole_batch(ranks: int) -> None:
    """With an all-reduce of the moments, each rank gets its part of the whole batch."""
    mask = torch.rand(6, 8) < 0.7
    inputs = (torch.randn(6), *torch.randn(3, 6, 8).unbind(), mask)
    expected = fastppo.compute_advantages(*inputs, kl_coef=0.1)
    rows_by_rank = torch.randperm(6).tensor_split(ranks)
    parts = [[x[rows] for x in inputs] for rows in rows_by_rank]
    moments: list[Tensor] = []

    def collect(local: Tensor) -> Tensor:
        moments.append(local)
        return local

    for part in parts:
        fastppo.compute_advantages(*part, kl_coef=0.1, reduce_moments=collect)
    total = torch.stack(moments).sum(0)
    assert total.dtype == torch.float64
    assert total[0] == mask.sum()
    for rows, part in zip(rows_by_rank, parts, strict=True):
        actual = fastppo.compute_advantages(*part, kl_coef=0.1, reduce_moments=lambda local: total)
        torch.testing.assert_close(
            actual.advantages, expected.advantages[rows], rtol=1e-6, atol=1e-6
        )
        bits((actual.returns, actual.kl), (expected.returns[rows], expected.kl[rows]))
    unwhitened = fastppo.compute_advantages(*inputs, kl_coef=0.1, whiten=False).advantages
    spread = fastppo.compute_advantages(*inputs, kl_coef=0.1, shift_mean=False).advantages
    assert torch.equal(spread, fastppo.whiten(unwhitened, mask, shift_mean=False))
    whitened = fastppo.whiten(unwhitened, mask, moments=total)
    torch.testing.assert_close(whitened, expected.advantages, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_a_nan_stays_in_its_sequence(packed: bool) -> None:
    """It reaches the earlier tokens of its sequence and no other sequence."""
    rewards, values = torch.randn(3, 5), torch.randn(3, 5)
    rewards[1, 2] = float("nan")
    clean = fastppo.gae(rewards[[0, 2]], values[[0, 2]])[0]
    if packed:
        ends = torch.tensor([0, 5, 10, 15])
        actual = fastppo.gae(rewards.flatten(), values.flatten(), cu_seqlens=ends)[0].view(3, 5)
    else:
        actual = fastppo.gae(rewards, values)[0]
    assert torch.equal(actual[[0, 2]], clean)
    assert actual[1].isnan().tolist() == [True, True, True, False, False]


def test_a_reduction_must_return_the_moments() -> None:
    """A function that works in place and returns None would whiten each rank by itself."""
    values = torch.randn(2, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)
    inputs = (torch.randn(2), values, values, None, mask)

    def in_place(moments: Tensor) -> None:
        moments.mul_(2)

    with pytest.raises(TypeError, match="reduce_moments"):
        fastppo.compute_advantages(*inputs, reduce_moments=in_place)
    with pytest.raises(ValueError, match="reduce_moments"):
        fastppo.compute_advantages(*inputs, reduce_moments=lambda moments: moments[:2])
    alone = fastppo.compute_advantages(*inputs)
    shared = fastppo.compute_advantages(
        *inputs, reduce_moments=lambda moments: moments * torch.tensor([2, 2, 3])
    )
    assert not torch.equal(alone.advantages, shared.advantages)
