"""The CPU's loops and the kernels for advantages equal the definition, through the public
functions.

Sums on a CPU are fp64 on both sides: 1e-12 of the largest entry. fp32 values are read exactly and
results rounded once: 1e-7. The kernels' fp32 trees: 1e-5. Layouts (padded, packed, with and without
gaps) are concatenated before the sum, so padded and packed results must be equal.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from fastppo_kernels import cpu_backend, definition, torch_backend
from fastppo_kernels.cpu import threads as cpu_threads
from fastppo_kernels.records import Shaping
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trajectories import assert_close, bounds, in_fp64, operands, packed, padded, small_blocks

import fastppo


class Drawn(NamedTuple):
    """A batch of sequences: lengths, the share of unmasked tokens, and the optional operands."""

    lengths: list[int]
    kept: float
    estimator: str | None
    token_rewards: bool
    truncated: bool
    per_sequence: bool
    clipped: bool
    bound: torch.dtype
    seed: int


def batches(*lengths: int) -> st.SearchStrategy[Drawn]:
    """Draw batches whose lengths include the ends of blocks."""
    of_one = st.sampled_from(lengths) | st.integers(0, 34)
    return st.builds(
        Drawn,
        lengths=st.lists(of_one, min_size=1, max_size=4),
        kept=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
        estimator=st.sampled_from(["k1", "k2", "k3", None]),
        bound=st.sampled_from([torch.int32, torch.int64]),
        seed=st.integers(0, 2**31),
        **dict.fromkeys(("token_rewards", "truncated", "per_sequence", "clipped"), st.booleans()),
    )


def check(drawn: Drawn, backend: str, dtype: torch.dtype, tolerance: float) -> None:
    """Test gaps, token rewards, bootstrap values, clipped scores, and discounts per batch or
    sequence. Masked tokens may hold anything, and have results of 0."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(drawn.seed)
    lengths, estimator, batch = drawn.lengths, drawn.estimator, len(drawn.lengths)

    def numbers(count: int) -> Tensor:
        return torch.randn(count, generator=g, dtype=torch.float64).to(device, dtype)

    masks = [(torch.rand(n, generator=g) < drawn.kept).to(device) for n in lengths]
    values, logprobs, ref, extra = ([numbers(n) for n in lengths] for _ in range(4))
    discounts = torch.rand(2, batch, generator=g).to(device)
    how: dict[str, Any] = {
        "gamma": discounts[0] if drawn.per_sequence else 0.97,
        "lam": discounts[1] if drawn.per_sequence else 0.9,
        "bootstrap": numbers(batch) if drawn.truncated else None,
    }
    scores = numbers(batch)
    cu_seqlens = bounds(lengths, drawn.bound, device)
    options: dict[str, Any] = {"kl_coef": 0.3, "kl_estimator": estimator} if estimator else {}
    options |= {"score_clip": 0.5} if drawn.clipped else {}
    moments: list[Tensor] = []

    def keep(own: Tensor) -> Tensor:
        moments.append(own)
        return own

    def results(arrange: Any, cu_seqlens: Tensor | None = None) -> list[Tensor]:
        mask = arrange(masks)
        v, p, q, r = (
            torch.where(mask, arrange(rows), math.nan) for rows in (values, logprobs, ref, extra)
        )
        layout = {"cu_seqlens": cu_seqlens, "backend": backend, **how}
        of_gae = fastppo.gae(r, v, mask, **layout)
        shaped = fastppo.compute_advantages(
            scores,
            v,
            p,
            q if estimator else None,
            mask,
            token_rewards=r if drawn.token_rewards else None,
            reduce_moments=keep,
            **layout,
            **options,
        )
        return [*of_gae, *shaped]

    flat = results(packed, cu_seqlens)
    grid = results(lambda rows: padded(rows, max(lengths) + 2))
    inside = padded([torch.ones_like(row) for row in masks], max(lengths) + 2)
    for one, other in zip(flat[:-1], grid[:-1], strict=True):
        assert torch.equal(one, other[inside])
        assert not other[~padded(masks, max(lengths) + 2)].any()
    assert torch.equal(flat[-1], grid[-1])
    assert torch.equal(*moments)

    given = operands(packed(values), packed(extra), packed(masks), cu_seqlens=cu_seqlens, **how)
    trajectory, exact_discounts = map(in_fp64, given)
    shaping = Shaping(
        scores,
        packed(logprobs),
        packed(ref) if estimator else None,
        0.3 if estimator else 0.0,
        estimator or "k1",
        0.5 if drawn.clipped else None,
    )
    paid = trajectory if drawn.token_rewards else trajectory._replace(token_rewards=None)
    exact = definition.shaped_advantages(paid, in_fp64(shaping), exact_discounts)
    white = definition.whiten(
        exact.advantages, trajectory.mask, shift_mean=True, moments=moments[0].cpu()
    )
    wanted = [*definition.gae(trajectory, exact_discounts), white, exact.returns, exact.kl]
    for one, other in zip(flat, wanted, strict=True):
        assert_close(one, other, tolerance)
    assert_close(moments[0], exact.moments, 10 * tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str
)
@settings(max_examples=30, deadline=None)
@given(batches(63, 64, 65, 129))
def test_the_cpus_loops_equal_the_definition_padded_and_packed(
    dtype: torch.dtype, tolerance: float, drawn: Drawn
) -> None:
    check(drawn, "cpu", dtype, tolerance)


ON_A_GPU = [pytest.mark.gpu] if torch.cuda.is_available() else []
"""On a GPU the kernels run compiled."""


@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=ON_A_GPU) for dtype in (torch.float32, torch.bfloat16)]
)
@settings(max_examples=5, deadline=None)
@given(batches(7, 8, 9, 15, 16, 17, 32, 33))
def test_the_kernels_equal_the_definition_padded_and_packed(
    dtype: torch.dtype, drawn: Drawn
) -> None:
    pytest.importorskip("triton", reason="Triton is a Linux package")
    with small_blocks():
        check(drawn, "triton", dtype, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_16_bit_values_are_read_exactly_and_bits_do_not_depend_on_threads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_threads, "ENTRIES_PER_THREAD", 1)
    values, rewards, logprobs, ref = torch.randn(4, 50, 1000).to(dtype)
    mask = torch.rand(50, 1000) < 0.9
    trajectory, discounts = operands(values, rewards, mask, gamma=0.99)
    shaping = Shaping(torch.randn(50), logprobs, ref, 0.1, "k3", 0.5)
    wanted = definition.shaped_advantages(in_fp64(trajectory), in_fp64(shaping), in_fp64(discounts))

    def results() -> list[torch.Tensor]:
        advantages = cpu_backend.shaped_advantages(trajectory, shaping, discounts)
        white = cpu_backend.whiten(advantages.advantages, mask)
        return [*advantages, white]

    found = results()
    for one, other in zip(found[:3], wanted[:3], strict=True):
        assert one.dtype == torch.float32
        assert_close(one, other, 1e-7)
    assert_close(found[3], wanted.moments, 1e-6)  # those of the rounded advantages
    exact = definition.whiten(found[0].double(), mask)
    assert_close(found[4], exact, 1e-7)
    try:
        torch.set_num_threads(3)
        for one, other in zip(results(), found, strict=True):
            assert torch.equal(one, other)
    finally:
        torch.set_num_threads(1)


def test_the_torch_backend_equals_the_definition_in_its_dtype() -> None:
    """On the CPU for tensors on any device, since the recurrence is a Python loop."""
    trajectory, discounts = operands(torch.randn(2, 7), torch.randn(2, 7))
    pairs = zip(
        torch_backend.gae(trajectory, discounts),
        cpu_backend.gae(trajectory, discounts),
        strict=True,
    )
    for one, other in pairs:
        assert_close(one, other, 1e-7)


def test_values_and_rewards_may_be_strided() -> None:
    pairs = torch.randn(5, 4, 2, generator=torch.Generator().manual_seed(0))
    rewards, values = pairs.unbind(-1)
    strided = fastppo.gae(rewards, values, backend="cpu")
    dense = fastppo.gae(rewards.contiguous(), values.contiguous(), backend="cpu")
    assert all(torch.equal(a, b) for a, b in zip(strided, dense, strict=True))
    ends = torch.tensor([0, 3, 5])
    packed_rows = fastppo.gae(rewards[:, 0], values[:, 0], cu_seqlens=ends, backend="cpu")
    dense = fastppo.gae(
        rewards[:, 0].contiguous(), values[:, 0].contiguous(), cu_seqlens=ends, backend="cpu"
    )
    assert all(torch.equal(a, b) for a, b in zip(packed_rows, dense, strict=True))
