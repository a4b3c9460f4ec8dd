"""What an update learns from: a batch, and per response token what PPO's losses take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fastppo.data.batch import Batch, on_device, spans, split_packed, starts
from fastppo.data.microbatches import Limits, deal
from fastppo.data.world import World
from fastppo.functional.arguments import aggregation_weights


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
    ref_logprobs: Tensor | None = None
    importance_weights: Tensor | None = None
    """min(π_old/π_sampler, cap), where the sampler drew from another distribution."""
    token_weights: Tensor | None = None
    """The weight of each token in its minibatch's loss."""

    def __len__(self) -> int:
        return len(self.batch)

    def select(self, rows: Tensor) -> Experience:
        """The experience of the sequences `rows` [k], int64 on the CPU, in their order."""
        lengths = self.batch.written_lengths
        index = on_device(spans(starts(lengths)[rows], lengths[rows]), self.batch.device)
        per_token: dict[str, Any] = {
            name: None if value is None else value[index]
            for name, value in self._per_token().items()
        }
        return Experience(self.batch.select(rows), **per_token)

    def minibatches(self, order: Tensor, count: int, aggregation: str) -> list[Experience]:
        """At most `count` parts of about as many sequences each, taken in this order [B] int64 on
        the CPU, each with the weights of its own loss: how it is cut up further does not matter.

        They share the memory of one copy, which is made for all of them together.
        """
        sizes = [len(rows) for rows in order.tensor_split(min(count, len(self)))]
        dealt = self.select(order)
        lengths = dealt.batch.written_lengths
        per_token = [
            [None] * len(sizes) if value is None else split_packed(value, lengths, sizes)
            for value in dealt._per_token().values()
        ]
        parts = zip(dealt.batch.split(sizes), *per_token, strict=True)
        return [Experience(*part).weighted(aggregation) for part in parts]

    def microbatches(
        self, limits: Limits, world: World | None = None
    ) -> Iterator[tuple[Experience, bool]]:
        """(a part that is run at once, whether it is one of the batch); see
        `fastppo.data.microbatches`. Where other ranks have more parts than this one, rows without
        weight come last."""
        world = world or World()
        dealt = deal(self.batch.lengths, limits, world)
        parts = dealt.ranks[world.rank]
        if world.size == 1 and len(parts) == 1:
            yield self, True
            return
        for part in parts:
            yield self.select(part), True
        for _ in range(dealt.rounds - len(parts)):
            filler = self.select(dealt.filler)
            assert filler.token_weights is not None
            yield replace(filler, token_weights=torch.zeros_like(filler.token_weights)), False

    def weighted(self, aggregation: str) -> Experience:
        """With the weight of each token in a loss over all of them."""
        weights = token_weights(self.batch.written_lengths, aggregation)
        return replace(self, token_weights=on_device(weights, self.batch.device))

    def tensors(self) -> dict[str, Tensor | None]:
        """All tensors by name, those of the batch among them."""
        batch = {each.name: getattr(self.batch, each.name) for each in fields(self.batch)}
        return self._per_token() | batch

    def _per_token(self) -> dict[str, Tensor | None]:
        names = [each.name for each in fields(self) if each.name != "batch"]
        return {name: getattr(self, name) for name in names}


def token_weights(lengths: Tensor, aggregation: str) -> Tensor:
    """[N] fp32 weights of packed response tokens, from their sequences' lengths [B]."""
    longest = int(lengths.max()) if lengths.numel() else 0
    mask = torch.arange(longest, device=lengths.device) < lengths.unsqueeze(1)
    return aggregation_weights(mask, aggregation)[mask]
