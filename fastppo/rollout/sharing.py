"""Distribute rollouts: each rank generates for its share of the prompts and receives all responses.

Sharded weights are gathered once for the whole rollout, so ranks do not wait for one another while
decoding. An engine with a copy of the weights needs them only at a handover.

With the decoder, responses do not depend on the number of ranks. Other engines seed one generator
per rank, or per group of ranks that share an engine.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import Any

import torch

from fastppo.data.world import World
from fastppo.models.policy import LanguageModel
from fastppo.models.sharding import reshard, reshard_for_update, unsharded
from fastppo.rollout import Rollout, RolloutEngine, Sampling


class SharedEngine(RolloutEngine):
    """Run this rank's engine on its share of the prompts.

    Args:
        engine: this rank's engine.
    """

    def __init__(self, engine: RolloutEngine, policy: LanguageModel, world: World) -> None:
        self.engine = engine
        self.policy = policy
        self.world = world
        self.same_weights = engine.same_weights
        self.is_quantized = engine.is_quantized
        together = engine.ranks_together
        self.group = replace(world, rank=world.rank // together, size=world.size // together)
        """World of the groups of ranks that share an engine, with the rank of this rank's group."""
        self.is_first_of_group = world.rank % together == 0

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        own = self.group.local_rows(len(prompt_ids))
        own_sampling = replace(sampling, place=(own.start, len(prompt_ids)))

        def draw() -> dict[str, Any] | None:
            if not own:
                return None
            rollout = self.engine.generate(prompt_ids[own.start : own.stop], own_sampling)
            return _packed(rollout) if self.is_first_of_group else None

        device = self.policy.device
        devices = [device] if device.type == "cuda" else []
        gathered = nullcontext() if self.engine.holds_weights else unsharded(self.policy)
        with gathered, torch.random.fork_rng(devices=devices):
            if not self.engine.draws_by_row and not sampling.greedy:
                torch.manual_seed(_draw_seed() + self.group.rank)
            packed = self.world.gather_results(draw)
        if not sampling.greedy:
            _draw_seed()  # every rank ends with the same state as after the decoder
        return Rollout.joined([_unpacked(fields) for fields in packed if fields is not None])

    def conversations(self) -> AbstractContextManager[None]:
        return self.engine.conversations()

    def release(self) -> None:
        self.world.gather_results(self.engine.release)
        reshard_for_update(self.policy)

    def weights_changed(self, policy: Any) -> None:
        reshard(self.policy)  # weights that are still gathered predate the update
        self.world.gather_results(lambda: self.engine.weights_changed(policy))

    def close(self) -> None:
        self.engine.close()


def _draw_seed() -> int:
    return int(torch.randint(2**63 - 1, ()))


TENSORS_PER_ROW = ("sampler_logprobs", "logprobs", "values")


def _packed(rollout: Rollout) -> dict[str, Any]:
    """Return the fields with each list of tensors concatenated, which pickles faster."""
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
