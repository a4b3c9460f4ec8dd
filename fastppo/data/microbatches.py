"""How a batch is cut into microbatches, the sequences that one pass reads.

The weights of a loss are those of the whole minibatch, so the cut decides memory and speed and not
the gradient. Sequences of similar length go together, longest first: less padding, and a microbatch
that does not fit in memory shows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastppo.data.batch import Batch, on_device, spans, starts
from fastppo.data.world import World


@dataclass(frozen=True, slots=True)
class Limits:
    """What one microbatch may hold."""

    sequences: int
    """At most so many; where `tokens` is given it does not count."""
    tokens: int | None = None
    """At most so many computed tokens, padding included; a longer sequence goes alone."""
    packed: bool = False
    """Whether sequences are laid end to end, without padding."""

    def count(self, length: int) -> int:
        """How many sequences of one length go together."""
        return self.sequences if self.tokens is None else max(1, self.tokens // length)


def microbatches(lengths: Tensor, limits: Limits) -> list[Tensor]:
    """The rows of each microbatch, int64 on the CPU, of sequences of these lengths [B].

    Where everything fits into one, it keeps the order of the batch.
    """
    if not len(lengths):
        return []
    if limits.tokens is None and len(lengths) <= limits.sequences:
        return [torch.arange(len(lengths))]
    order = torch.argsort(lengths, descending=True, stable=True)
    sizes = _sizes(lengths[order].tolist(), limits)
    return [torch.arange(len(lengths))] if len(sizes) == 1 else list(order.split(sizes))


def _sizes(longest_first: list[int], limits: Limits) -> list[int]:
    """How many of the sequences go into each microbatch."""
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
    """The microbatches of a batch that the ranks of a world share."""

    ranks: list[list[Tensor]]
    """The rows of each rank's microbatches, int64 on the CPU."""
    rounds: int
    """How many every rank runs: collectives wait for all."""
    filler: Tensor
    """[1]: what a rank runs, without weight, in the rounds that it has nothing for."""

    def of_rank(self, rank: int) -> list[Tensor]:
        """The rows of each microbatch that a rank runs, fillers included."""
        microbatches_of_rank = self.ranks[rank]
        fillers = [self.filler] * (self.rounds - len(microbatches_of_rank))
        return microbatches_of_rank + fillers


def assign(lengths: Tensor, limits: Limits, world: World) -> Assignment:
    """Microbatches for every rank, of sequences of these lengths [B], which all ranks know.

    Each rank has the same number of sequences, or one more, of similar lengths; the limits are per
    rank.
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
    """A batch in microbatches, those of this rank, and the way back to its order."""

    batches: list[Batch]
    """What this rank runs, in this order."""
    world: World
    own_sequences: int
    """This rank's, without those that it runs only because other ranks have more microbatches."""
    own_tokens: int
    """The response tokens of those."""
    sequence_order: Tensor | None = None
    """[B] int64 on the device: where each of the batch's sequences is when the sequences of all
    ranks are laid end to end; None if nothing moved."""
    token_order: Tensor | None = None
    """[N] int64 on the device: likewise for response tokens."""

    def in_order(self, values: Tensor) -> Tensor:
        """[N] in the batch's order, of values of the response tokens of this rank's microbatches,
        one microbatch after another."""
        values = self.world.cat(values[: self.own_tokens])
        return values if self.token_order is None else values[self.token_order]

    def sequences_in_order(self, values: Tensor) -> Tensor:
        """[B]: likewise for one value per sequence."""
        values = self.world.cat(values[: self.own_sequences])
        return values if self.sequence_order is None else values[self.sequence_order]


def split(batch: Batch, limits: Limits, world: World | None = None) -> MicrobatchPlan:
    """The microbatches of a batch that is only read, without a gradient."""
    world = world or World()
    assignment = assign(batch.lengths, limits, world)
    rows = [part for parts in assignment.ranks for part in parts]
    if not rows or (world.size == 1 and len(rows) == 1):
        return MicrobatchPlan([batch] if rows else [], world, len(batch), batch.response_count)
    order = torch.cat(rows)
    place = torch.argsort(order)
    lengths = batch.written_lengths
    begin = starts(lengths[order])[place]
    own = assignment.ranks[world.rank]
    own_rows = torch.cat(own) if own else torch.arange(0)
    return MicrobatchPlan(
        batches=[batch.select(part) for part in assignment.of_rank(world.rank)],
        world=world,
        own_sequences=len(own_rows),
        own_tokens=int(lengths[own_rows].sum()),
        sequence_order=on_device(place, batch.device),
        token_order=on_device(spans(begin, lengths), batch.device),
    )
