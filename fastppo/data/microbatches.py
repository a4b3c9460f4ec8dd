"""Split a batch into microbatches, the sequences of one forward and backward pass.

Loss weights are normalized over the whole minibatch, so the split affects memory and speed but not
the gradient. Sequences are sorted by length, longest first: this reduces padding, and a microbatch
too large for memory fails first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastppo.data.batch import Batch, in_one_copy, spans, starts
from fastppo.data.world import World


@dataclass(frozen=True, slots=True)
class Limits:
    """Size limits of a microbatch."""

    sequences: int
    """Maximum number of sequences; ignored if `tokens` is given."""
    tokens: int | None = None
    """Maximum number of computed tokens, padding included; a longer sequence gets a microbatch
    alone."""
    packed: bool = False
    """Whether sequences are packed, without padding."""

    def count(self, length: int) -> int:
        """Return how many sequences of this length fit into one microbatch."""
        return self.sequences if self.tokens is None else max(1, self.tokens // length)


def microbatches(lengths: Tensor, limits: Limits) -> list[Tensor]:
    """Return the rows of each microbatch, int64 on the CPU, for sequences of these lengths [B].

    A single microbatch keeps the order of the batch.
    """
    if not len(lengths):
        return []
    if limits.tokens is None and len(lengths) <= limits.sequences:
        return [torch.arange(len(lengths))]
    order = torch.argsort(lengths, descending=True, stable=True)
    sizes = _sizes(lengths[order].tolist(), limits)
    return [torch.arange(len(lengths))] if len(sizes) == 1 else list(order.split(sizes))


def _sizes(longest_first: list[int], limits: Limits) -> list[int]:
    """Return the number of sequences of each microbatch."""
    count = len(longest_first)
    if limits.tokens is None:
        full, rest = divmod(count, limits.sequences)
        return [limits.sequences] * full + ([rest] if rest else [])
    sizes: list[int] = []
    begin = 0
    computed = 0
    for row, length in enumerate(longest_first):
        width = length if limits.packed else longest_first[begin]
        if row > begin and computed + width > limits.tokens:
            sizes.append(row - begin)
            begin = row
            computed = 0
            width = length
        computed += width
    return [*sizes, count - begin]


class Assignment(NamedTuple):
    """Microbatches of a batch assigned to the ranks."""

    ranks: list[list[Tensor]]
    """Rows of each rank's microbatches, int64 on the CPU."""
    rounds: int
    """Number of microbatches that every rank runs: collectives need all ranks."""
    filler: Tensor
    """Row that a rank runs with weight 0 when it has no microbatches left, [1]."""

    def of_rank(self, rank: int) -> list[Tensor]:
        """Return the rows of each microbatch of a rank, fillers included."""
        microbatches_of_rank = self.ranks[rank]
        fillers = [self.filler] * (self.rounds - len(microbatches_of_rank))
        return microbatches_of_rank + fillers


def assign(lengths: Tensor, limits: Limits, world: World) -> Assignment:
    """Assign microbatches to every rank, for sequences of these lengths [B], known to all ranks.

    Each rank gets the same number of sequences, or one more, of similar lengths. The limits apply
    per rank.
    """
    if world.size == 1:
        parts = microbatches(lengths, limits)
        return Assignment([parts], rounds=len(parts), filler=torch.arange(min(1, len(lengths))))
    order = torch.argsort(lengths, descending=True, stable=True)
    ranks = []
    for rank in range(world.size):
        rows = order[rank :: world.size].sort().values
        ranks.append([rows[part] for part in microbatches(lengths[rows], limits)])
    return Assignment(ranks, rounds=max(map(len, ranks)), filler=order[-1:])


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchPlan:
    """This rank's microbatches, and the permutation back to the order of the batch."""

    batches: list[Batch]
    """Microbatches of this rank, in the order they run."""
    world: World
    sequences: list[int]
    """Number of sequences of each rank, without fillers."""
    tokens: list[int]
    """Number of response tokens of each rank, without fillers."""
    sequence_order: Tensor | None = None
    """Index of each sequence of the batch in the concatenation over all ranks, [B] int64 on the
    device; None if the order is unchanged."""
    token_order: Tensor | None = None
    """Index of each response token in that concatenation, [N] int64 on the device."""

    def in_order(self, values: Tensor) -> Tensor:
        """Gather per-token values of all ranks in the batch's order, [N].

        Args:
            values: values of this rank's response tokens, one microbatch after another.
        """
        values = self.world.cat(values[: self.tokens[self.world.rank]], self.tokens)
        return values if self.token_order is None else values[self.token_order]

    def sequences_in_order(self, values: Tensor) -> Tensor:
        """Gather per-sequence values of all ranks in the batch's order, [B]."""
        values = self.world.cat(values[: self.sequences[self.world.rank]], self.sequences)
        return values if self.sequence_order is None else values[self.sequence_order]


def split(batch: Batch, limits: Limits, world: World | None = None) -> MicrobatchPlan:
    """Split a batch into microbatches for passes without a gradient."""
    world = world or World()
    assignment = assign(batch.lengths, limits, world)
    rows = [part for parts in assignment.ranks for part in parts]
    if not rows or (world.size == 1 and len(rows) == 1):
        sequences = [len(batch)] * world.size  # several ranks only share an empty batch here
        tokens = [batch.response_count] * world.size
        return MicrobatchPlan([batch] if rows else [], world, sequences, tokens)
    order = torch.cat(rows)
    place = torch.argsort(order)
    lengths = batch.generated_lengths
    begin = starts(lengths[order])[place]
    rows_of_ranks = [torch.cat([torch.arange(0), *parts]) for parts in assignment.ranks]
    run = assignment.of_rank(world.rank)
    run_rows = torch.cat(run)
    positions, sequence_order, token_order = in_one_copy(
        [batch.positions(run_rows), place, spans(begin, lengths)], batch.device
    )
    return MicrobatchPlan(
        batches=batch.select(run_rows, positions).split([len(part) for part in run]),
        world=world,
        sequences=[len(rows) for rows in rows_of_ranks],
        tokens=[int(lengths[rows].sum()) for rows in rows_of_ranks],
        sequence_order=sequence_order,
        token_order=token_order,
    )
