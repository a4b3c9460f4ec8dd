"""The processes of a run: rows, collectives, errors."""

from __future__ import annotations

from pathlib import Path

import many_ranks
import pytest
import ranks
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastppo.data.world import World, join


@given(st.integers(0, 50), st.integers(1, 9))
def test_ranks_share_the_rows_evenly(count: int, size: int) -> None:
    shares = [World(rank, size).local_rows(count) for rank in range(size)]
    assert [row for share in shares for row in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_world_of_one_changes_nothing() -> None:
    world, x = World(), torch.arange(3)
    assert world.is_main
    assert world.cat(x) is x
    assert world.gather("a") == ["a"]
    assert world.gather_results(lambda: 3) == [3]
    assert world.sum(x[2]) == 2
    with pytest.raises(KeyError), world.with_timeout():
        world.on_main_rank(lambda: {}["nothing"])
    assert join(torch.device("cpu")).size == 1


def test_ranks_gather_rows_values_and_errors(tmp_path: Path) -> None:
    actual = ranks.run(2, many_ranks.gathered, tmp_path)
    assert actual == {
        "rows": [0, 10, 11],
        "none": [7],
        "values": ["of 0", "of 1"],
        "sum": 21.0,
        "first": "of 0",
        "error": "ValueError: of 1",
        "unpicklable": "RuntimeError: OddError: of 1",
        "of an engine": "RolloutError: OddEngineError: of 1",
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[x/gloo/y.cc] Timed out waiting 4000ms for recv", "rank 1 of 2: .*1800 s"),
        ("[x/gloo/y.cc] Connection closed by peer", "rank 1 of 2: .*ended"),
    ],
)
def test_a_lost_rank_is_reported(text: str, named: str) -> None:
    with pytest.raises(RuntimeError, match=named), World(1, 2).with_timeout():
        raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="something else"), World(1, 2).with_timeout():
        raise RuntimeError("something else")


def test_shard_size_divides_the_processes(monkeypatch) -> None:
    with pytest.raises(ValueError, match="shard_size=2"):
        join(torch.device("cpu"), shard_size=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"shard_size .* 3"):
        join(torch.device("cpu"), shard_size=3)
