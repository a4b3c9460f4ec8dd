"""What an update learns from: a batch, and per response token what PPO's losses take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.data.batch import Batch, on_device, spans, split_packed, starts
from fastppo.data.microbatches import Limits, assign
from fastppo.data.prompts import Prompts
from fastppo.data.world import World
from fastppo.functional.arguments import aggregation_weights
from fastppo.rewards.scorer import Scores
from fastppo.rollout import Rollout


class Responses(NamedTuple):
    """Prompts, the responses to them, and what those earned."""

    prompts: Prompts
    rollout: Rollout
    scores: Scores


@dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """One iteration's batch with all that the update needs; per-token tensors are [N] fp32."""

    batch: Batch
    old_logprobs: Tensor
    """Nats: the rollout policy's."""
    old_values: Tensor
    """The rollout's value of the state before each token."""
    advantages: Tensor
    returns: Tensor
    """What the value loss regresses to."""
    complete_returns: Tensor
    """Monte Carlo: returns at λ = 1, with nothing of the values in them but the bootstrap value
    after a response that was cut off, where one is taken."""
    ref_logprobs: Tensor | None = None
    importance_weights: Tensor | None = None
    """π_old/π_sampler within its bounds, where the sampler drew from another distribution."""
    token_weights: Tensor | None = None
    """The weight of each token in its minibatch's loss."""

    def __len__(self) -> int:
        return len(self.batch)

    def select(self, rows: Tensor) -> Experience:
        """The experience of the sequences `rows` [k], int64 on the CPU, in their order."""
        lengths = self.batch.written_lengths
        index = on_device(spans(starts(lengths)[rows], lengths[rows]), self.batch.device)
        per_token = {name: value[index] for name, value in self._per_token().items()}
        return Experience(self.batch.select(rows), **per_token)

    def minibatches(self, order: Tensor, count: int, aggregation: str) -> list[Experience]:
        """At most `count` parts of about as many sequences each, taken in this order [B] int64 on
        the CPU, each with the weights of its own loss: how it is cut up further does not matter.

        They share the memory of one copy, which is made for all of them together.
        """
        sizes = [len(rows) for rows in order.tensor_split(min(count, len(self)))]
        shuffled = self.select(order)
        lengths = shuffled.batch.written_lengths
        per_token = {
            name: split_packed(value, lengths, sizes)
            for name, value in shuffled._per_token().items()
        }
        minibatches = []
        for i, batch in enumerate(shuffled.batch.split(sizes)):
            minibatch = Experience(batch, **{name: parts[i] for name, parts in per_token.items()})
            minibatches.append(minibatch.weighted(aggregation))
        return minibatches

    def microbatches(self, limits: Limits, world: World | None = None) -> Iterator[Experience]:
        """The parts that this rank runs at once; see `fastppo.data.microbatches`. Where other ranks
        have more parts than this one, a sequence without weight stands in for the last ones."""
        world = world or World()
        assignment = assign(self.batch.lengths, limits, world)
        parts = assignment.ranks[world.rank]
        if world.size == 1 and len(parts) == 1:
            yield self
            return
        for rows in parts:
            yield self.select(rows)
        for _ in range(assignment.rounds - len(parts)):
            filler = self.select(assignment.filler)
            assert filler.token_weights is not None
            yield replace(filler, token_weights=torch.zeros_like(filler.token_weights))

    def weighted(self, aggregation: str) -> Experience:
        """A copy with the weight of each token in a loss over all of them."""
        weights = token_weights(self.batch.written_lengths, aggregation)
        return replace(self, token_weights=on_device(weights, self.batch.device))

    def _per_token(self) -> dict[str, Tensor]:
        return {name: value for name, value in _tensors(self).items() if name != "batch"}


def _tensors(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not None, by name."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: value for name, value in values.items() if value is not None}


def token_weights(lengths: Tensor, aggregation: str) -> Tensor:
    """[N] fp32 weights of packed response tokens, from their sequences' lengths [B]."""
    longest = int(lengths.max()) if lengths.numel() else 0
    mask = torch.arange(longest, device=lengths.device) < lengths.unsqueeze(1)
    return aggregation_weights(mask, aggregation)[mask]
