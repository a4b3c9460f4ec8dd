"""A rollout that ranks share: each draws for its own prompts, and all get every response.

The weights are gathered once for the whole rollout, so no rank waits for another while it decodes;
for an engine that holds a copy of them nothing is gathered but when they are handed over. With the
decoder a row draws what it would draw in one process: its random numbers follow from its place in
the batch. Other engines draw from a generator of their own on each rank, or on each group of ranks
that decode the same prompts together.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import torch

from fastppo.data.world import World
from fastppo.models.policy import LanguageModel
from fastppo.models.sharding import reshard, reshard_for_update, unsharded
from fastppo.rollout import Rollout, RolloutEngine, Sampling


class SharedEngine(RolloutEngine):
    """Runs an engine on this rank's prompts.

    Args:
        engine: of this rank; it reads the policy's weights, or holds its own.
    """

    def __init__(self, engine: RolloutEngine, policy: LanguageModel, world: World) -> None:
        self.engine = engine
        self.policy = policy
        self.world = world
        self.same_weights = engine.same_weights
        together = engine.ranks_together
        self.group = replace(world, rank=world.rank // together, size=world.size // together)
        """This rank's group of ranks that decode together, among all groups."""
        self.speaks = world.rank % together == 0
        """Whether this rank hands on what its group decodes."""

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        own = self.group.local_rows(len(prompt_ids))
        own_sampling = replace(sampling, place=(own.start, len(prompt_ids)))

        def draw() -> dict[str, Any] | None:
            if not own:
                return None
            rollout = self.engine.generate(prompt_ids[own.start : own.stop], own_sampling)
            return _packed(rollout) if self.speaks else None

        device = self.policy.device
        devices = [device] if device.type == "cuda" else []
        gathered = nullcontext() if self.engine.holds_weights else unsharded(self.policy)
        with gathered, torch.random.fork_rng(devices=devices):
            if not self.engine.draws_by_row and not sampling.greedy:
                torch.manual_seed(_draw_seed() + self.group.rank)
            packed = self.world.gather_results(draw)
        if not sampling.greedy:
            _draw_seed()  # every rank goes on from the same state, the one that the decoder leaves
        return Rollout.joined([_unpacked(fields) for fields in packed if fields is not None])

    def release(self) -> None:
        self.world.gather_results(self.engine.release)
        reshard_for_update(self.policy)

    def weights_changed(self, policy: Any) -> None:
        reshard(self.policy)  # a group that is still gathered has the weights before the update
        self.world.gather_results(lambda: self.engine.weights_changed(policy))

    def close(self) -> None:
        self.engine.close()


def _draw_seed() -> int:
    return int(torch.randint(2**63 - 1, ()))


TENSORS_PER_ROW = ("sampler_logprobs", "logprobs", "values")


def _packed(rollout: Rollout) -> dict[str, Any]:
    """A rollout's fields, with one tensor in place of each list of tensors: that pickles faster."""
    packed = {field.name: getattr(rollout, field.name) for field in fields(rollout)}
    packed["tokens"] = torch.tensor([*itertools.chain(*rollout.tokens)], dtype=torch.int64)
    packed["lengths"] = rollout.lengths
    for name in TENSORS_PER_ROW:
        if packed[name] is not None:
            packed[name] = torch.cat(packed[name])
    return packed


def _unpacked(packed: dict[str, Any]) -> Rollout:
    lengths = packed.pop("lengths")
    packed["tokens"] = [row.tolist() for row in packed["tokens"].split(lengths)]
    for name in TENSORS_PER_ROW:
        if packed[name] is not None:
            packed[name] = list(packed[name].split(lengths))
    return Rollout(**packed)
