"""The CPU's loops over sequences against the definition.

test_advantages.py tests the public functions, which run this backend, and their layouts. Sums run
in fp64 on both sides: 1e-12 of the largest entry; fp32 values are read exactly, and results rounded
to fp32 once: 1e-7.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fastppo_kernels import cpu_advantages, cpu_threads, definition, torch_advantages
from fastppo_kernels.records import Shaping
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectories import assert_close, bounds, in_fp64, operands, packed, padded

lengths_of_batches = st.lists(
    st.one_of(st.sampled_from([0, 1, 63, 64, 65, 129]), st.integers(0, 40)), min_size=1, max_size=5
)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    lengths=lengths_of_batches,
    estimator=st.sampled_from(["k1", "k2", "k3", None]),
    layout=st.sampled_from(["padded", "packed"]),
    given_=st.tuples(*[st.booleans()] * 4),
    seed=st.integers(0, 2**31),
)
def test_shaped_advantages_and_gae_are_the_definition_s(
    lengths: list[int], estimator: str | None, layout: str, given_: tuple[bool, ...], seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    batch, width = len(lengths), max(lengths) + 2
    token_rewards, truncated, per_sequence, clipped = given_

    def arrange(rows: Any) -> Any:
        return packed(rows) if layout == "packed" else padded(rows, width)

    def numbers() -> list[torch.Tensor]:
        return [torch.randn(n, generator=g, dtype=torch.float64) for n in lengths]

    masks = [torch.rand(n, generator=g) < 0.7 for n in lengths]
    values, logprobs, ref, extra = (arrange(numbers()) for _ in range(4))
    discount = torch.rand(2, batch, generator=g, dtype=torch.float64)
    trajectory, discounts = operands(
        values,
        extra if token_rewards else None,
        arrange(masks),
        cu_seqlens=bounds(lengths) if layout == "packed" else None,
        gamma=discount[0] if per_sequence else 0.97,
        lam=discount[1] if per_sequence else 0.9,
        bootstrap=torch.randn(batch, generator=g, dtype=torch.float64) if truncated else None,
    )
    shaping = Shaping(
        torch.randn(batch, generator=g, dtype=torch.float64),
        logprobs,
        None if estimator is None else ref,
        0.0 if estimator is None else 0.3,
        estimator or "k1",
        0.5 if clipped else None,
    )
    found = cpu_advantages.shaped_advantages(trajectory, shaping, discounts)
    wanted = definition.shaped_advantages(trajectory, shaping, discounts)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, 1e-12)
    pairs = zip(
        cpu_advantages.gae(trajectory, discounts),
        definition.gae(trajectory, discounts),
        strict=True,
    )
    for one, other in pairs:
        assert_close(one, other, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrower_values_are_read_exactly_and_bits_do_not_depend_on_the_threads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_threads, "ENTRIES_PER_THREAD", 1)
    values, rewards, logprobs, ref = torch.randn(4, 50, 1000).to(dtype)
    mask = torch.rand(50, 1000) < 0.9
    trajectory, discounts = operands(values, rewards, mask, gamma=0.99)
    shaping = Shaping(torch.randn(50), logprobs, ref, 0.1, "k3", 0.5)
    wanted = definition.shaped_advantages(in_fp64(trajectory), in_fp64(shaping), in_fp64(discounts))

    def results() -> list[torch.Tensor]:
        advantages = cpu_advantages.shaped_advantages(trajectory, shaping, discounts)
        white = cpu_advantages.whiten(advantages.advantages, mask)
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


def test_without_rewards_or_a_mask_there_are_zeros_and_everything() -> None:
    values = torch.randn(2, 7)
    bare = cpu_advantages.gae(*operands(values))
    whole = operands(values, torch.zeros(2, 7), torch.ones(2, 7, dtype=torch.bool))
    for one, other in zip(bare, cpu_advantages.gae(*whole), strict=True):
        assert torch.equal(one, other)
    trajectory, discounts = operands(values)
    shaping = Shaping(torch.ones(2), values)
    found = cpu_advantages.shaped_advantages(trajectory, shaping, discounts)
    same = trajectory._replace(mask=torch.ones(2, 7, dtype=torch.bool))
    for one, other in zip(
        found, cpu_advantages.shaped_advantages(same, shaping, discounts), strict=True
    ):
        assert torch.equal(one, other)


def test_the_torch_backend_is_the_definition_in_its_dtype() -> None:
    """On the CPU, wherever the tensors are: the recurrence is a loop in Python."""
    trajectory, discounts = operands(torch.randn(2, 7), torch.randn(2, 7))
    pairs = zip(
        torch_advantages.gae(trajectory, discounts),
        cpu_advantages.gae(trajectory, discounts),
        strict=True,
    )
    for one, other in pairs:
        assert_close(one, other, 1e-7)
