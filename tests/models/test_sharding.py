"""Sharded models: collectives, memory and results."""

from __future__ import annotations

from pathlib import Path

import many_ranks
import pytest
import ranks
from torch.distributed.fsdp import FSDPModule


def test_collectives_of_an_optimiser_step(tmp_path: Path) -> None:
    """A forward pass gathers root, embedding, two layers and value head. The backward pass gathers
    all but the root, and reduces all but the value head, which has no gradient.
    """
    counts_by_microbatches = ranks.run(2, many_ranks.collectives, tmp_path, str(tmp_path))
    extra = not hasattr(FSDPModule, "reset_iter_state")  # torch 2.11 gathers once too often
    for microbatches, counts in counts_by_microbatches.items():
        assert counts["c10d::_allgather_base_"] == 9 * microbatches + extra
        assert counts["c10d::_reduce_scatter_base_"] == 4 * microbatches


def test_two_processes_halve_the_memory(tmp_path: Path) -> None:
    """Bytes of a rank's weights, gradients and moments between two steps."""
    held = {
        n: ranks.run(n, many_ranks.held_bytes, tmp_path / str(n), str(tmp_path / str(n)))
        for n in (1, 2)
    }
    assert held[2] < 0.55 * held[1]


def test_half_precision_weights_are_converted_to_fp32_group_by_group(tmp_path: Path) -> None:
    """At most one full group is in fp32 at a time."""
    assert ranks.run(2, many_ranks.whole_in_fp32, tmp_path) < 1


@pytest.mark.slow
def test_hsdp_gives_the_same_gradient(tmp_path: Path) -> None:
    """Two replicas of two shards train as one process does."""
    variant = {"model_dtype": "float64", "iterations": 1}
    one = ranks.run(1, many_ranks.train, tmp_path / "1", str(tmp_path / "1"), variant)
    copies = variant | {"shard_size": 2}
    four = ranks.run(4, many_ranks.train, tmp_path / "4", str(tmp_path / "4"), copies)
    off = many_ranks.difference(one, four)
    assert max(off.values()) <= 1e-12, off
