"""How the processes of a run share the weights."""

from __future__ import annotations


def shards_of(size: int, shard_size: int | None) -> int:
    """How many of `size` processes hold one copy of the weights between them: the option, or all.

    Raises:
        ValueError: they cannot be divided into copies.
    """
    if shard_size is None:
        return size
    if size % shard_size:
        raise ValueError(f"shard_size must divide the {size} processes, got {shard_size}")
    return shard_size
