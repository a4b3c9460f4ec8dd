"""Experience: a batch of responses with the per-token inputs of PPO's losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.data.batch import Batch, on_device, spans, split_packed, starts
from fastppo.data.microbatches import Limits, assign
from fastppo.data.prompts import Prompts
from fastppo.data.world import World
from fastppo.functional.aggregation import aggregation_weights
from fastppo.rewards.scorer import Scores
from fastppo.rollout import Rollout


class Responses(NamedTuple):
    """Prompts, responses and scores of an iteration."""

    prompts: Prompts
    rollout: Rollout
    scores: Scores

    def select(self, rows: Sequence[int]) -> Responses:
        """Return the given rows, in that order."""
        return Responses(
            self.prompts.select(rows), self.rollout.select(rows), self.scores.select(rows)
        )

    @classmethod
    def joined(cls, parts: Sequence[Responses]) -> Responses:
        """Concatenate the responses of several draws."""
        prompts, rollouts, scores = zip(*parts, strict=True)
        return cls(Prompts.joined(prompts), Rollout.joined(rollouts), Scores.joined(scores))


@dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """One iteration's batch with the update's inputs. Per-token tensors are [N] fp32."""

    batch: Batch
    old_logprobs: Tensor
    """Of the rollout policy, nats."""
    old_values: Tensor
    """Value of the state before each token, at the time of the rollout."""
    advantages: Tensor
    returns: Tensor
    """Targets of the value loss."""
    monte_carlo_returns: Tensor
    """Monte Carlo returns (λ = 1). They contain no values, except the bootstrap value after a
    truncated response if there is one."""
    ref_logprobs: Tensor | None = None
    importance_weights: Tensor | None = None
    """π_old/π_sampler, bounded. None if both are the same distribution."""
    scores: Tensor | None = None
    """Score of each token's response, before normalization."""
    token_weights: Tensor | None = None
    """Weight of each token in its minibatch's loss."""
    masked: Tensor | None = None
    """[B] bool on the CPU, responses left out of the loss. None means that all are in it."""

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def has_loss(self) -> bool:
        """Whether any sequence is in the loss."""
        return self.masked is None or not bool(self.masked.all())

    def select(self, rows: Tensor) -> Experience:
        """Select sequences by `rows`, [k] int64 on the CPU, in that order."""
        lengths = self.batch.written_lengths
        index = on_device(spans(starts(lengths)[rows], lengths[rows]), self.batch.device)
        per_token = {name: value[index] for name, value in self._per_token().items()}
        masked = None if self.masked is None else self.masked[rows]
        return Experience(self.batch.select(rows), **per_token, masked=masked)

    def in_loss(self) -> Experience:
        """Drop the masked sequences. If all are masked, they stay, with weights of 0."""
        if self.masked is None or not self.has_loss or not self.masked.any():
            return self
        return replace(self.select((~self.masked).nonzero()[:, 0]), masked=None)

    def minibatches(self, order: Tensor, count: int, aggregation: str) -> list[Experience]:
        """Split into at most `count` minibatches of about equal size, each with its loss weights.

        The weights belong to the minibatch, so splitting it further changes nothing. All
        minibatches share the memory of one shuffled copy.

        Args:
            order: [B] int64 on the CPU.
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
            if shuffled.masked is not None:
                minibatch = replace(minibatch, masked=shuffled.masked.split(sizes)[i])
            minibatches.append(minibatch.weighted(aggregation))
        return minibatches

    def microbatches(self, limits: Limits, world: World | None = None) -> Iterator[Experience]:
        """Yield this rank's microbatches; see `fastppo.data.microbatches`.

        If other ranks have more microbatches, a sequence without weight fills in.
        """
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
        """Return a copy with each token's weight in a loss over the whole batch."""
        weights = token_weights(self.batch.written_lengths, aggregation, self.masked)
        return replace(self, token_weights=on_device(weights, self.batch.device))

    def _per_token(self) -> dict[str, Tensor]:
        tensors = _tensors(self)
        return {name: tensors[name] for name in tensors if name not in ("batch", "masked")}


def _tensors(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass except None, by name."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: value for name, value in values.items() if value is not None}


def token_weights(lengths: Tensor, aggregation: str, masked: Tensor | None = None) -> Tensor:
    """Return the weights [N] fp32 of packed response tokens, from the lengths [B].

    Args:
        masked: [B] bool, responses with weights of 0.
    """
    longest = int(lengths.max()) if lengths.numel() else 0
    mask = torch.arange(longest, device=lengths.device) < lengths.unsqueeze(1)
    in_loss = mask if masked is None else mask & ~masked.unsqueeze(1)
    return aggregation_weights(in_loss, aggregation)[mask]
