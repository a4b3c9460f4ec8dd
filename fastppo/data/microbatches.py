"""How a batch is cut into the parts that are run at once.

The weights of a loss are those of the whole minibatch, so the cut decides memory and speed and not
the gradient. Sequences of like length go together, longest first: less padding, and a part that
does not fit in memory shows at once.
"""

from __future__ import annotations

from collections.abc import Callable
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
        return [limits.sequences] * full + [rest] * (rest > 0)
    sizes: list[int] = []
    begin = computed = 0
    for row, length in enumerate(longest_first):
        width = length if limits.packed else longest_first[begin]
        if row > begin and computed + width > limits.tokens:
            sizes.append(row - begin)
            begin, computed, width = row, 0, length
        computed += width
    return [*sizes, count - begin]


class Dealt(NamedTuple):
    """The microbatches of a batch that the ranks of a world share."""

    ranks: list[list[Tensor]]
    """Of each rank its microbatches' rows, int64 on the CPU."""
    rounds: int
    """How many every rank runs: collectives wait for all."""
    filler: Tensor
    """[1]: what a rank runs, without weight, in the rounds that it has nothing for."""

    def work(self, lengths: Tensor, limits: Limits) -> Tensor:
        """[rounds, ranks]: the tokens that each rank computes in each round, padding included."""

        def tokens(rows: Tensor) -> int:
            found = lengths[rows]
            return int(found.sum() if limits.packed else found.max() * len(found))

        fillers = [self.filler] * self.rounds
        found = [map(tokens, (parts + fillers)[: self.rounds]) for parts in self.ranks]
        return torch.tensor([*zip(*found, strict=True)], dtype=torch.float64)


def longest_over_mean(work: Tensor) -> float:
    """How much longer ranks are at work than if it were evenly dealt: in each round [rounds, ranks]
    all wait for the one that has most."""
    if not work.numel():
        return 1.0
    return (work.amax(1).sum() / work.mean(1).sum().clamp(min=1)).item()


def deal(lengths: Tensor, limits: Limits, world: World) -> Dealt:
    """Microbatches for every rank, of sequences of these lengths [B], which all ranks know. Every
    rank has as many sequences, or one more, of like lengths; the limits are of one rank."""
    if world.size == 1:
        found = microbatches(lengths, limits)
        return Dealt([found], len(found), torch.arange(min(1, len(lengths))))
    order = torch.argsort(lengths, descending=True, stable=True)
    ranks = []
    for rank in range(world.size):
        rows = order[rank :: world.size].sort().values
        ranks.append([rows[part] for part in microbatches(lengths[rows], limits)])
    return Dealt(ranks, max(map(len, ranks)), order[-1:])


class Parts(NamedTuple):
    """A batch in microbatches, those of this rank, and the way back to its order."""

    batches: list[Batch]
    sequence_order: Tensor | None
    """[B] int64 on the device: where each of the batch's sequences is among those of the parts;
    None if nothing moved."""
    token_order: Tensor | None
    """[N] int64 on the device: likewise for response tokens."""
    cat: Callable[[Tensor], Tensor] = World().cat
    """What ranks have, end to end."""
    counts: tuple[int | None, int | None] = (None, None)
    """Sequences and response tokens of this rank, without what it runs to fill its rounds."""
    metrics: dict[str, float] = {}  # noqa: RUF012 (replaced, never written to)
    """Of several ranks `straggler/experience`, `longest_over_mean` of their work."""

    def in_order(self, values: Tensor) -> Tensor:
        """[N] values of the parts' response tokens, one part after another, as the batch has
        them."""
        values = self.cat(values[: self.counts[1]])
        return values if self.token_order is None else values[self.token_order]

    def sequences_in_order(self, values: Tensor) -> Tensor:
        """[B]: likewise for one value per sequence."""
        values = self.cat(values[: self.counts[0]])
        return values if self.sequence_order is None else values[self.sequence_order]


def split(batch: Batch, limits: Limits, world: World | None = None) -> Parts:
    """The microbatches of a batch that is only read."""
    world = world or World()
    dealt = deal(batch.lengths, limits, world)
    rows = [each for of_rank in dealt.ranks for each in of_rank]
    if world.size == 1 and len(rows) == 1:
        return Parts([batch], None, None)
    place = torch.argsort(torch.cat(rows)) if rows else torch.arange(0)
    lengths = batch.written_lengths
    begin = starts(lengths[torch.cat(rows)])[place] if rows else lengths
    own = dealt.ranks[world.rank]
    mine = torch.cat(own) if own else torch.arange(0)
    return Parts(
        [batch.select(each) for each in own + [dealt.filler] * (dealt.rounds - len(own))],
        on_device(place, batch.device),
        on_device(spans(begin, lengths), batch.device),
        world.cat,
        (len(mine), int(lengths[mine].sum())),
        {}
        if world.size == 1
        else {"straggler/experience": longest_over_mean(dealt.work(batch.lengths, limits))},
    )
