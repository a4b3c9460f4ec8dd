"""A rollout that the ranks of a world share: each draws for its own prompts, and all get all.

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
from torch import Tensor

from fastppo.data.world import World
from fastppo.models.policy import LanguageModel
from fastppo.models.sharding import reshard, settle, unsharded
from fastppo.rollout import Rollout, RolloutEngine, Sampling


class SharedEngine(RolloutEngine):
    """Runs an engine on this rank's prompts.

    Args:
        engine: of this rank; it reads the policy's weights, or holds its own.
    """

    def __init__(self, engine: RolloutEngine, policy: LanguageModel, world: World) -> None:
        self.engine, self.policy, self.world = engine, policy, world
        self.same_weights = engine.same_weights
        together = engine.ranks_together
        self.group = replace(world, rank=world.rank // together, size=world.size // together)
        self.speaks = world.rank % together == 0

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        own = self.group.own(len(prompt_ids))
        placed = replace(sampling, place=(own.start, len(prompt_ids)))
        device = self.policy.device

        def draw() -> dict[str, Any] | None:
            if not own:
                return None
            rollout = self.engine.generate(prompt_ids[own.start : own.stop], placed)
            return _packed(rollout) if self.speaks else None

        devices = [device] if device.type == "cuda" else []
        gathered = nullcontext() if self.engine.holds_weights else unsharded(self.policy)
        with gathered, torch.random.fork_rng(devices=devices):
            if not self.engine.draws_by_row and not sampling.greedy:
                torch.manual_seed(_seed() + self.group.rank)
            found = self.world.share(draw, "generate")
        if not sampling.greedy:
            _seed()  # every rank goes on from the same state, the one that the decoder leaves
        return Rollout.joined([_unpacked(each) for each in found if each is not None])

    def release(self) -> None:
        self.world.share(self.engine.release)
        settle(self.policy)

    def weights_changed(self, policy: Any) -> None:
        reshard(self.policy)  # a group that is still whole has the weights before the update
        self.world.share(lambda: self.engine.weights_changed(policy))


def _seed() -> int:
    return int(torch.randint(2**63 - 1, ()))


def _packed(rollout: Rollout) -> dict[str, Any]:
    """With a tensor in place of each list of tensors: they are sent."""
    found = {each.name: getattr(rollout, each.name) for each in fields(rollout)}
    flat = torch.tensor([*itertools.chain(*rollout.tokens)], dtype=torch.int64)
    found |= {"tokens": flat, "lengths": rollout.lengths}
    for name in ("sampler_logprobs", "logprobs", "values"):
        if found[name] is not None:
            found[name] = torch.cat(found[name])
    return found


def _unpacked(packed: dict[str, Any]) -> Rollout:
    lengths = packed.pop("lengths")
    tokens: Tensor = packed.pop("tokens")
    rollout = Rollout([row.tolist() for row in tokens.split(lengths)], **packed)
    for name in ("sampler_logprobs", "logprobs", "values"):
        if packed[name] is not None:
            setattr(rollout, name, list(packed[name].split(lengths)))
    return rollout
