"""The torch backend of the advantages against the definition, and how its work grows.

test_advantages.py tests the public functions, which run this backend on a CPU, and their layouts.
Sums run in fp64 on both sides: 1e-12 of the largest entry.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fastppo_kernels import definition, torch_advantages
from fastppo_kernels.records import Shaping
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from trajectories import assert_close, bounds, operands, packed, padded

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
    found = torch_advantages.shaped_advantages(trajectory, shaping, discounts)
    wanted = definition.shaped_advantages(trajectory, shaping, discounts)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, 1e-12)
    pairs = zip(
        torch_advantages.gae(trajectory, discounts),
        definition.gae(trajectory, discounts),
        strict=True,
    )
    for one, other in pairs:
        assert_close(one, other, 1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shift_mean", [False, True])
@pytest.mark.parametrize("moments", [None, torch.tensor([50.0, 30.0, 90.0], dtype=torch.float64)])
def test_whitening_is_the_definition_s(
    masked: bool, shift_mean: bool, moments: torch.Tensor | None
) -> None:
    x = torch.randn(4, 9, dtype=torch.float64) + 3
    mask = torch.rand(4, 9) < 0.6 if masked else None
    how: dict[str, Any] = {"shift_mean": shift_mean, "moments": moments}
    found = torch_advantages.whiten(x, mask, **how)
    assert_close(found, definition.whiten(x, mask, **how), 1e-12)
    own = torch_advantages.whitening_moments(x, mask)
    assert_close(own, definition.whitening_moments(x, mask), 1e-12)


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("masked", [False, True])
def test_the_operations_of_gae_do_not_grow_with_time_or_batch(masked: bool) -> None:
    """A loop over the 262144 tokens would take as many steps; the blocked scan takes 64 a level."""

    def operations(batch: int, length: int) -> int:
        values, rewards = torch.randn(2, batch, length)
        mask = torch.rand(batch, length) < 0.9 if masked else None
        with Operations() as operations:
            torch_advantages.gae(*operands(values, rewards, mask))
        return operations.count

    small, large = operations(4, 64 * 64), operations(64, 4096)
    per_level = 12 * torch_advantages.SCAN_BLOCK
    assert large - small <= per_level
    assert large < 4 * per_level


def test_without_rewards_or_a_mask_there_are_zeros_and_everything() -> None:
    values = torch.randn(2, 7)
    bare = torch_advantages.gae(*operands(values))
    whole = operands(values, torch.zeros(2, 7), torch.ones(2, 7, dtype=torch.bool))
    for one, other in zip(bare, torch_advantages.gae(*whole), strict=True):
        assert torch.equal(one, other)
    trajectory, discounts = operands(values)
    shaping = Shaping(torch.ones(2), values)
    found = torch_advantages.shaped_advantages(trajectory, shaping, discounts)
    same = trajectory._replace(mask=torch.ones(2, 7, dtype=torch.bool))
    for one, other in zip(
        found, torch_advantages.shaped_advantages(same, shaping, discounts), strict=True
    ):
        assert torch.equal(one, other)
