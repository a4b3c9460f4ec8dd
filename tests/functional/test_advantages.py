"""GAE, reward shaping and whitening: against the textbook loop, NumPy, and themselves repacked.

`gae` sums in fp64 and casts once: against fp64 it is within an fp32 rounding, 1e-6 of the largest
entry. Layouts (padded, packed, with gaps, without) are laid end to end before the sum, so between
layouts nothing may differ at all; but for whitening without given moments, which adds up rows
first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import published_formulas as paper
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastppo

B, T = 5, 9
LENGTHS = [9, 4, 1, 0, 7]
property_based = settings(max_examples=40)

masks = st.tuples(st.integers(1, 6), st.integers(1, 12)).flatmap(
    lambda shape: st.lists(
        st.lists(st.booleans(), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    )
)


def prefix_mask(lengths: list[int], length: int) -> Tensor:
    return torch.arange(length) < torch.tensor(lengths).unsqueeze(1)


def packed(mask: Tensor, *padded: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(cu_seqlens, the unmasked entries of each tensor, end to end)."""
    lengths = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1)])
    return lengths.cumsum(0).to(torch.int32), [x[mask] for x in padded]


def bits(actual: Any, expected: Any) -> None:
    torch.testing.assert_close([*actual], [*expected], rtol=0, atol=0)


# --------------------------------------------------------------------------------------------- GAE


@property_based
@given(masks, st.booleans(), st.booleans(), st.integers(0, 1000))
def test_gae_is_the_textbook_loop_over_the_unmasked_tokens(
    rows: list[list[bool]], truncated: bool, per_sequence: bool, seed: int
) -> None:
    """Gaps, empty and full rows, bootstrap values, one discount or one per sequence."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.tensor(rows)
    batch = len(rows)
    rewards, values = torch.randn(2, *mask.shape, generator=g, dtype=torch.float64)
    ends = torch.randn(batch, generator=g, dtype=torch.float64) if truncated else None
    gamma: Any = torch.rand(batch, generator=g, dtype=torch.float64) if per_sequence else 0.97
    lam: Any = torch.rand(batch, generator=g, dtype=torch.float64) if per_sequence else 0.9
    actual = fastppo.gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=ends)
    for b in range(batch):
        kept = mask[b]
        row = paper.gae(
            rewards[b, kept].numpy(),
            values[b, kept].numpy(),
            float(gamma[b]) if per_sequence else gamma,
            float(lam[b]) if per_sequence else lam,
            0.0 if ends is None else float(ends[b]),
        )
        for one, other in zip(actual, row, strict=True):
            np.testing.assert_allclose(one[b, kept].numpy(), other, rtol=1e-12, atol=1e-12)
            assert (one[b, ~kept] == 0).all()


@property_based
@given(masks, st.integers(0, 1000))
def test_a_row_with_gaps_gives_the_bits_of_the_row_without_them(
    rows: list[list[bool]], seed: int
) -> None:
    """A tool's output in a multi-turn response is stepped over, whatever stands there."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.tensor(rows)
    rewards, values = torch.randn(2, *mask.shape, generator=g)
    ends = torch.randn(len(rows), generator=g)
    expected = fastppo.gae(
        rewards[mask],
        values[mask],
        cu_seqlens=packed(mask)[0],
        gamma=0.99,
        bootstrap=ends,
    )
    garbage = torch.where(mask, 0.0, float("nan"))
    actual = fastppo.gae(rewards + garbage, values + garbage, mask, gamma=0.99, bootstrap=ends)
    bits((x[mask] for x in actual), expected)
    assert all((x[~mask] == 0).all() for x in actual)


@property_based
@given(masks, st.sampled_from(["k1", "k2", "k3"]), st.booleans(), st.integers(0, 1000))
def test_packed_sequences_give_the_bits_of_padded_ones(
    rows: list[list[bool]], estimator: str, whiten: bool, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    mask = torch.tensor(rows)
    batch = len(rows)
    scores, ends = torch.randn(2, batch, generator=g)
    padded = torch.randn(4, *mask.shape, generator=g).unbind()
    cu_seqlens, flat = packed(mask, *padded)

    def advantages(
        tensors: Any, mask: Tensor, cu_seqlens: Tensor | None = None
    ) -> fastppo.Advantages:
        values, logprobs, ref_logprobs, token_rewards = tensors
        return fastppo.compute_advantages(
            scores,
            values,
            logprobs,
            ref_logprobs,
            mask,
            cu_seqlens=cu_seqlens,
            token_rewards=token_rewards,
            kl_coef=0.1,
            kl_estimator=estimator,
            gamma=torch.linspace(0, 1, batch),
            whiten=whiten,
            bootstrap=ends,
            score_clip=0.8,
        )

    expected = advantages(padded, mask)
    every = torch.ones_like(flat[0], dtype=torch.bool)
    for dtype in (torch.int32, torch.int64):
        actual = advantages(flat, every, cu_seqlens.to(dtype))
        bits(actual, (expected.advantages[mask], expected.returns[mask], expected.kl))


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


def test_a_fully_masked_batch_is_zero() -> None:
    x = torch.full((2, 3), float("nan"))
    mask = torch.zeros(2, 3, dtype=torch.bool)
    out = fastppo.compute_advantages(torch.ones(2), x, x, x, mask, kl_coef=0.1)
    for part in out:
        assert (part == 0).all()


def test_advantages_are_constants_of_the_loss() -> None:
    leaves = [torch.randn(B, T, requires_grad=True) for _ in range(3)]
    scores = torch.randn(B, requires_grad=True)
    mask = torch.ones(B, T, dtype=torch.bool)
    out = fastppo.compute_advantages(scores, *leaves, mask, kl_coef=0.1)
    for part in (*out, *fastppo.gae(*leaves[:2]), fastppo.whiten(leaves[0])):
        assert not part.requires_grad


# --------------------------------------------------------------------------------- reward shaping


def test_the_score_lands_on_the_last_response_token_whatever_follows_it() -> None:
    """λ = γ = 1 and no values: the return is the score up to the last unmasked token, then 0."""
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


def test_token_rewards_and_clipped_scores_add_up() -> None:
    mask = prefix_mask(LENGTHS, T)
    # Multiples of 1/8, whose sums are exact in fp32 and in fp64.
    scores = (80 * torch.randn(B)).round() / 8
    extra = (8 * torch.randn(B, T)).round() / 8
    values = torch.randn(B, T)
    options: dict[str, Any] = {"gamma": 0.9, "lam": 0.8, "whiten": False}
    actual = fastppo.compute_advantages(
        scores, values, values, None, mask, token_rewards=extra, score_clip=2.0, **options
    )
    rewards = extra.clone()
    for b, n in enumerate(mask.sum(1).tolist()):
        if n:
            rewards[b, n - 1] += scores[b].clamp(-2, 2)
    expected = fastppo.gae(rewards, values, mask, gamma=0.9, lam=0.8)
    bits(actual[:2], expected)


# --------------------------------------------------------------------------------------- whitening


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_is_the_masked_standard_score(shift_mean: bool) -> None:
    """Whatever stands where the mask leaves out."""
    mask = prefix_mask(LENGTHS, T)
    x = 3 * torch.randn(B, T, dtype=torch.float64) + 5
    expected = np.zeros((B, T))
    expected[mask.numpy()] = paper.whiten(x[mask].numpy(), shift_mean)
    for garbage in (0.0, float("nan"), float("inf")):
        actual = fastppo.whiten(torch.where(mask, x, garbage), mask, shift_mean=shift_mean)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_whitening_few_or_equal_numbers_stays_finite(count: int) -> None:
    mask = torch.arange(4) < count
    white = fastppo.whiten(torch.full((4,), 7.0), mask)
    assert (white == 0).all()


@pytest.mark.parametrize("scale", [1e-20, 1e10, 1e20, 1e30])
def test_whitening_stands_numbers_whose_squares_leave_fp32(scale: float) -> None:
    x = scale * torch.randn(64, generator=torch.Generator().manual_seed(1))
    expected = torch.from_numpy(paper.whiten(x.double().numpy()))
    torch.testing.assert_close(fastppo.whiten(x).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 2), (2, 4096)])
def test_whitening_stands_numbers_whose_sum_leaves_fp32(shape: tuple[int, int]) -> None:
    x = 1.75e38 * (1 + 0.9 * torch.rand(shape, generator=torch.Generator().manual_seed(1)))
    assert x.sum(-1).isinf().all()
    expected = torch.from_numpy(paper.whiten(x.double().numpy()))
    torch.testing.assert_close(fastppo.whiten(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_whitening_at_a_large_mean_keeps_its_digits() -> None:
    """Σx² − n·mean² cancels: in fp32 nothing would be left at a mean of 10⁵."""
    x = torch.randn(1000, dtype=torch.float64)
    shifted = (x + 1e5).float()
    expected = paper.whiten(shifted.double().numpy())
    np.testing.assert_allclose(fastppo.whiten(shifted).numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_moments_of_the_parts_whiten_as_the_whole_batch_does(ranks: int) -> None:
    """An all-reduce between the moments and the whitening: each rank gets its part of the whole."""
    mask = torch.rand(6, 8) < 0.7
    inputs = (torch.randn(6), *torch.randn(3, 6, 8).unbind(), mask)
    expected = fastppo.compute_advantages(*inputs, kl_coef=0.1)
    rows_by_rank = torch.randperm(6).tensor_split(ranks)
    parts = [[x[rows] for x in inputs] for rows in rows_by_rank]
    moments: list[Tensor] = []

    def collect(own: Tensor) -> Tensor:
        moments.append(own)
        return own

    for part in parts:
        fastppo.compute_advantages(*part, kl_coef=0.1, reduce_moments=collect)
    total = torch.stack(moments).sum(0)
    assert total.dtype == torch.float64
    assert total[0] == mask.sum()
    for rows, part in zip(rows_by_rank, parts, strict=True):
        actual = fastppo.compute_advantages(*part, kl_coef=0.1, reduce_moments=lambda own: total)
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
    """It reaches the tokens before it, and no other sequence."""
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


def test_a_reduction_that_returns_nothing_is_refused_and_one_that_returns_is_used() -> None:
    """One that works in place and returns None would leave every rank to whiten by itself."""
    values = torch.randn(2, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)
    inputs = (torch.randn(2), values, values, None, mask)

    def in_place(moments: Tensor) -> None:
        moments.mul_(2)

    with pytest.raises(TypeError, match=r"reduce_moments must return the moments .* got None"):
        fastppo.compute_advantages(*inputs, reduce_moments=in_place)
    with pytest.raises(ValueError, match=r"what reduce_moments returns must have shape \[3\]"):
        fastppo.compute_advantages(*inputs, reduce_moments=lambda moments: moments[:2])
    alone = fastppo.compute_advantages(*inputs)
    shared = fastppo.compute_advantages(
        *inputs, reduce_moments=lambda moments: moments * torch.tensor([2, 2, 3])
    )
    assert not torch.equal(alone.advantages, shared.advantages)
