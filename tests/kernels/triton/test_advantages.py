"""The Triton kernels for GAE, reward shaping and whitening equal the definition in fp64.

Compiled on a GPU, elsewhere in Triton's interpreter, where a scan costs about 0.1 ms per token:
sizes and blocks are small, so that a row of 40 tokens has several chunks.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import trajectories
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is a Linux package")

from fastppo_kernels import definition, triton_backend
from fastppo_kernels.records import Shaping
from fastppo_kernels.triton import gae as triton_gae
from fastppo_kernels.triton.whitening import whitening_moments
from trajectories import bounds as bounds_on
from trajectories import in_fp64, operands, small_blocks

import fastppo

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # there the compiled kernels run

TOLERANCE = 1e-5
"""Relative to the largest value. fp32 trees over random signs reach about 5e-7."""


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    trajectories.assert_close(actual, expected, tolerance)


def bounds(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return bounds_on(lengths, dtype, DEVICE)


# ---------------------------------------------------------------------------------------------- GAE


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
def test_discounts_at_their_ends(gamma: float, lam: float) -> None:
    torch.manual_seed(0)
    v, r = torch.randn(2, 1, 40, device=DEVICE)
    mask, ends = torch.rand(1, 40, device=DEVICE) < 0.7, torch.tensor([0.5], device=DEVICE)
    given = operands(v, r, mask, gamma=gamma, lam=lam, bootstrap=ends)
    with small_blocks():
        found = triton_backend.gae(*given)
    for one, other in zip(found, definition.gae(*in_fp64(given)), strict=True):
        assert_close(one, other)


def test_blocks_of_the_real_size() -> None:
    """Two chunks, the second one short. At γλ = 1 every advantage is a sum to the end, and one near
    0 is a difference of larger numbers, so errors are relative to the root mean square."""
    torch.manual_seed(0)
    v, r = torch.randn(2, 1, 8500, device=DEVICE) + 3
    given = operands(v, r, torch.rand(1, 8500, device=DEVICE) < 0.9, gamma=1.0, lam=1.0)
    for one, other in zip(triton_backend.gae(*given), definition.gae(*in_fp64(given)), strict=True):
        error = (one.cpu().double() - other).abs()
        assert error.max() <= TOLERANCE * other.square().mean().sqrt()
        assert error.norm() <= 0.1 * TOLERANCE * other.norm()


# ---------------------------------------------------------------------------- shaping and whitening


def test_a_nan_score_stays_visible() -> None:
    """A NaN score passes the clip, and affects only its own sequence."""
    scores = torch.tensor([1.0, math.nan], device=DEVICE)
    x = torch.zeros(2, 40, device=DEVICE)
    mask = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    with small_blocks():
        trajectory, discounts = operands(x, None, mask)
        shaping = Shaping(scores, x, score_clip=0.5)
        found = triton_backend.shaped_advantages(trajectory, shaping, discounts)
    assert found.advantages[1].isnan().all()
    assert found.advantages[0].isfinite().all()
    assert found.moments[1:].isnan().all()


def test_sums_longer_than_their_lanes() -> None:
    """More than 4 chunks per row and more than 4 rows, with 4 lanes for each."""
    torch.manual_seed(0)
    x, ref = torch.randn(5, 70, device=DEVICE), torch.randn(5, 70, device=DEVICE)
    mask = torch.rand(5, 70, device=DEVICE) < 0.8
    scores = torch.randn(5, device=DEVICE)
    trajectory, discounts = operands(x, None, mask, gamma=0.99)
    given = (trajectory, Shaping(scores, x, ref, kl_coef=0.1), discounts)
    with small_blocks():
        found = triton_backend.shaped_advantages(*given)
    expected = definition.shaped_advantages(*map(in_fp64, given))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


@settings(max_examples=10, deadline=None)
@given(
    elements=st.sampled_from([0, 1, 2, 7, 8, 16, 17, 50]),
    masked=st.booleans(),
    shift_mean=st.booleans(),
    moments_given=st.booleans(),
    mean=st.sampled_from([0.0, 1000.0]),
    seed=st.integers(0, 2**31),
)
def test_whiten(
    elements: int, masked: bool, shift_mean: bool, moments_given: bool, mean: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(elements, device=DEVICE) + mean
    mask = torch.rand(elements, device=DEVICE) < 0.6 if masked else None
    poisoned = x if mask is None else torch.where(mask, x, math.nan)
    moments = None
    if moments_given:
        moments = torch.tensor([100.0, 100 * mean, 100 * mean**2 + 250.0], dtype=torch.float64)
    kept = (x if mask is None else x[mask]).double().cpu()
    centre = mean if moments_given else kept.mean().nan_to_num()
    if moments_given:
        deviation = math.sqrt(250 / 99 + 1e-8)
    else:
        deviation = (kept.var().nan_to_num() + 1e-8).sqrt() if len(kept) > 1 else 1e-4
    wanted = (x.double().cpu() - centre) / deviation + (0.0 if shift_mean else centre)
    if mask is not None:
        wanted = torch.where(mask.cpu(), wanted, 0.0)
    with small_blocks():
        moments = None if moments is None else moments.to(DEVICE)
        found = triton_backend.whiten(poisoned, mask, shift_mean=shift_mean, moments=moments)
        sums = whitening_moments(poisoned, mask)
    assert found.dtype == torch.float32
    assert_close(found, wanted)
    assert sums.tolist() == pytest.approx(
        [len(kept), kept.sum().item(), kept.square().sum().item()], rel=1e-12
    )


# ----------------------------------------------------------------------------- odd shapes and input


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty_batches(shape: tuple[int, int]) -> None:
    x = torch.zeros(shape, device=DEVICE)
    mask = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
    scores = torch.ones(shape[0], device=DEVICE)
    found = []
    for arrange, starts in ((Tensor.clone, None), (Tensor.flatten, bounds([0] * shape[0]))):
        trajectory, discounts = operands(arrange(x), None, arrange(mask), cu_seqlens=starts)
        shaping = Shaping(scores, arrange(x), arrange(x), 0.1)
        with small_blocks():
            found.append(triton_backend.shaped_advantages(trajectory, shaping, discounts))
    for out in found:
        assert out.kl.tolist() == [0.0] * shape[0]
        assert out.moments.tolist() == [0.0] * 3


@pytest.mark.parametrize("wrong", [[0, 90, 20, 40], [-50, 10, 5, 99], [40, 40, 40, 40]])
def test_wrong_cu_seqlens_stay_inside(wrong: list[int]) -> None:
    """On a device they are not checked, to avoid a wait: wrong numbers, but no stray access."""
    room = torch.full((3, 40), 7.0, device=DEVICE)
    mask = torch.ones(40, dtype=torch.bool, device=DEVICE)
    scores = torch.zeros(3, device=DEVICE)
    outputs = []

    def watched(*shape: Any, **options: Any) -> Tensor:
        outputs.append(torch.full((3, *shape[0]), 7.0, **options))
        return outputs[-1][1]

    with small_blocks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, **options: watched(*shape, **options))
        patch.setattr(
            torch, "empty_like", lambda x: watched(x.shape, dtype=x.dtype, device=x.device)
        )
        trajectory, discounts = operands(
            room[1], room[1], mask, cu_seqlens=torch.tensor(wrong, device=DEVICE), lam=1.0
        )
        triton_gae._scan(trajectory, Shaping(scores, room[1]), discounts)
    assert len(outputs) >= 4
    for buffer in outputs:
        assert (buffer[0] == 7.0).all()
        assert (buffer[2] == 7.0).all()


def test_strided_tensors() -> None:
    torch.manual_seed(0)
    r, v = torch.randn(3, 21, device=DEVICE), torch.randn(20, 3, device=DEVICE)
    mask = torch.rand(3, 21, device=DEVICE) < 0.7
    with small_blocks():
        found = triton_backend.gae(*operands(v.T, r[:, :-1], mask[:, 1:]))
        dense = operands(v.T.contiguous(), r[:, :-1].clone(), mask[:, 1:].clone())
        expected = triton_backend.gae(*dense)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_errors() -> None:
    x = torch.zeros(2, 3, dtype=torch.float64, device=DEVICE)
    mask = torch.ones(2, 3, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match="values must be bfloat16, float16 or float32"):
        triton_backend.gae(*operands(x, x))
    with pytest.raises(ValueError, match="x must be bfloat16, float16 or float32"):
        triton_backend.whiten(x)
    x = x.float()
    trajectory, discounts = operands(x, None, mask)
    shaping = Shaping(x[:, 0], x, x, kl_estimator="full")
    with pytest.raises(ValueError, match="kl_estimator must be k1, k2 or k3, got 'full'"):
        triton_backend.shaped_advantages(trajectory, shaping, discounts)


# ------------------------------------------------------------------------------ public functions


def test_eager_and_compiled_calls_give_the_same_bits_every_run() -> None:
    values, logprobs = torch.randn(2, 3, 40, device=DEVICE)
    batch = (
        torch.randn(3, device=DEVICE),
        values,
        logprobs,
        torch.rand(3, 40, device=DEVICE) < 0.8,
    )

    def call(scores: Tensor, values: Tensor, logprobs: Tensor, mask: Tensor) -> Any:
        return fastppo.compute_advantages(
            scores, values, logprobs, logprobs * 0.9, mask, kl_coef=0.1, backend="triton"
        )

    with small_blocks():
        first = call(*batch)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for again in (call(*batch), compiled(*batch)):
            for one, other in zip(again, first, strict=True):
                assert torch.equal(one, other)
