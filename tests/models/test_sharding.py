"""A model over several processes: what is gathered, what each holds, and what it computes."""

from __future__ import annotations

from pathlib import Path

import many_ranks
import pytest
import ranks
import tiny
from torch.distributed.fsdp import FSDPModule


def test_an_optimiser_step_gathers_what_it_should(tmp_path: Path) -> None:
    """Of two layers: root, embedding, two layers and the value head before the forward pass of a
    microbatch; before its backward pass all of them but the root, which stays. One reduction each,
    but of the value head, which has no gradient.
    """
    counts_by_microbatches = ranks.run(2, many_ranks.collectives, tmp_path, str(tmp_path))
    for microbatches, counts in counts_by_microbatches.items():
        assert counts["forward"] == 5 * microbatches
        extra = not hasattr(FSDPModule, "reset_iter_state")  # torch 2.11 orders one too many
        assert counts["backward"] == 4 * microbatches + extra
        assert counts["reduced"] == 4 * microbatches


def test_what_a_process_holds_falls_with_their_number(tmp_path: Path) -> None:
    """Weights, gradients, moments: bytes of the tensors that a rank has between two steps."""
    held = {
        n: ranks.run(n, many_ranks.held_bytes, tmp_path / str(n), str(tmp_path / str(n)))
        for n in (1, 2)
    }
    assert held[2] < 0.55 * held[1]


def test_weights_in_half_precision_are_widened_a_part_at_a_time(tmp_path: Path) -> None:
    """Shards of two processes are half of the weights; what is no shard is in half precision."""
    assert ranks.run(2, many_ranks.whole_in_fp32, tmp_path) < 1


@pytest.mark.slow
def test_copies_of_shards_add_up_the_same_gradient(tmp_path: Path) -> None:
    """Two copies of two shards each (HSDP) train what one process trains."""
    variant = {"model_dtype": "float64", "iterations": 1}
    one = ranks.run(1, many_ranks.train, tmp_path / "1", str(tmp_path / "1"), variant)
    copies = variant | {"shard_size": 2}
    four = ranks.run(4, many_ranks.train, tmp_path / "4", str(tmp_path / "4"), copies)
    off = many_ranks.difference(one, four)
    assert max(off.values()) <= 1e-12, off


def test_layers_that_a_user_has_sharded_are_trained_after_a_rollout(tmp_path: Path) -> None:
    """FSDP keeps what it gathers first, which must not have been gathered in inference mode."""
    trained = ranks.run(1, many_ranks.decode_and_train_sharded_layers, tmp_path)
    assert trained == [name for name, _ in tiny.model().named_parameters()]
