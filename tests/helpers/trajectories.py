"""Batches of sequences for tests of advantages."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from fastppo_kernels.records import Discounts, Trajectory
from fastppo_kernels.triton import programs
from torch import Tensor


class Operands(NamedTuple):
    """Arguments of a backend's `gae`."""

    trajectory: Trajectory
    discounts: Discounts


def operands(
    values: Tensor,
    rewards: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 0.95,
    bootstrap: Tensor | None = None,
) -> Operands:
    """Build records from keywords."""
    discounts = Discounts(
        1.0 if isinstance(gamma, Tensor) else gamma,
        1.0 if isinstance(lam, Tensor) else lam,
        gamma if isinstance(gamma, Tensor) else None,
        lam if isinstance(lam, Tensor) else None,
    )
    return Operands(Trajectory(values, rewards, mask, cu_seqlens, bootstrap), discounts)


def in_fp64(record: Any) -> Any:
    """Copy to fp64 on the CPU."""
    if isinstance(record, Operands):
        return Operands(*map(in_fp64, record))

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.cpu().double() if x.is_floating_point() else x.cpu()

    return type(record)(*map(moved, record))


def packed(rows: list[Tensor]) -> Tensor:
    return torch.cat([row.new_zeros(0) for row in rows[:1]] + rows)


def padded(rows: list[Tensor], length: int, fill: float = 0.0) -> Tensor:
    out = rows[0].new_full((len(rows), length), fill)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out


def bounds(lengths: list[int], dtype: torch.dtype = torch.int32, device: str = "cpu") -> Tensor:
    """cu_seqlens."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Check the largest error, relative to the largest value or 1."""
    assert actual.shape == expected.shape
    if expected.numel():
        error = (actual.double().cpu() - expected.double().cpu()).abs().max().item()
        assert error <= tolerance * max(1.0, expected.abs().max().item())


@contextlib.contextmanager
def small_blocks(block: int = 8, chunk_blocks: int = 2) -> Iterator[None]:
    """Shrink the Triton kernels' blocks, so that few tokens need several chunks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, small in {
            "scan": {"block": block, "steps": chunk_blocks},
            "sums of a sequence": {"block": 4},
            "moments of a batch": {"block": 4},
            "moments of a tensor": {"block": 8, "steps": 2},
        }.items():
            patch.setitem(programs.TABLE, name, programs.TABLE[name]._replace(**small))
        yield
