"""Shard models with torch's FSDP2: each rank holds a shard of every weight.

The root is the policy with its heads (`LanguageModel`), so FSDP's hooks run on the passes of PPO.
Layers, an untied embedding and the value head are FSDP groups, gathered when they run. The rest,
the last norm and the lm-head, belongs to the root, which stays gathered from a forward pass to the
end of its backward pass. So `head.weight` is a plain tensor for the losses, tied or not.

    hidden, forward, values, language_model_loss, padded_states
                            forward passes; each gathers the weights it needs, so all ranks must run
                            the same number of passes
    unsharded(model)        gathers the whole model on every rank for a block, for rollouts and
                            saving; ranks do not communicate inside the block

Gradients are summed, not averaged over ranks, as a loss is normalized over the whole minibatch.
Trained weights, their gradients and moments are sharded in fp32. Models in half precision are
gathered in half precision, so one GPU and many compute the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from fastppo.data.batch import Batch
from fastppo.data.world import World
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.trunk import layers_of, trunk_of
from fastppo.models.value import CriticValue

PASSES = ("hidden", "language_model_loss")
"""Methods other than `forward` that run a forward pass."""

HALVES = (torch.bfloat16, torch.float16)


def shard(model: LanguageModel, world: World) -> None:
    """Shard a model over the ranks in place, and run a first pass, in which FSDP finds its root."""
    model.fixed_precision = model.is_full_precision
    passes: tuple[str, ...] = PASSES
    if isinstance(model, ActorCritic):
        passes += ("values",)
    _shard(model, _groups(model), world=world, passes=passes)
    batch = Batch.of([[0]], [[0]], model.device)
    with torch.no_grad(), model.autocast():  # frozen matrices may have the products' dtype
        model.hidden(model.layout(batch))
    reshard(model)


def shard_around(root: nn.Module, trunk: Any, world: World, passes: Sequence[str] = ()) -> None:
    """Shard a module around a trunk in place.

    The root must run the first pass afterwards.

    Args:
        passes: methods of the root other than `forward` that run a forward pass.
    """
    head = None
    if isinstance(root, LanguageModel):
        head = root.causal_lm.get_output_embeddings().weight
    _shard(root, _groups_of_trunk(trunk, head), world=world, passes=passes)


def _shard(
    root: nn.Module, groups: Sequence[nn.Module], *, world: World, passes: Sequence[str]
) -> None:
    """Shard a module and its groups.

    Args:
        groups: submodules gathered separately, and freed after use.
    """
    grouped = {id(weight) for module in groups for weight in module.parameters()}
    rest = _precision([weight for weight in root.parameters() if id(weight) not in grouped])
    for module in groups:
        policy = _precision(module.parameters())
        _widen(module)
        fully_shard(module, mesh=world.mesh, mp_policy=policy, reshard_after_forward=True)
    if isinstance(root, ActorCritic):
        fully_shard(root.value_function.head, mesh=world.mesh)  # always fp32
    _widen(root)
    fully_shard(root, mesh=world.mesh, mp_policy=rest)
    for group in groups_of(root):
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)  # gloo supports no other
    for name in passes:
        register_fsdp_forward_method(root, name)


def _precision(weights: Iterable[nn.Parameter]) -> MixedPrecisionPolicy:
    """Return the policy that gathers trained weights in their dtype before `_widen`."""
    for weight in weights:
        if weight.requires_grad and weight.dtype in HALVES:
            return MixedPrecisionPolicy(weight.dtype, torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy()


def _widen(module: nn.Module) -> None:
    """Convert trained weights in half precision to fp32."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in HALVES:
            parameter.data = parameter.data.float()


def _groups(model: LanguageModel) -> list[nn.Module]:
    """Return the submodules to gather separately, except the value head."""
    head = model.causal_lm.get_output_embeddings().weight
    groups = _groups_of_trunk(trunk_of(model.causal_lm), head)
    if isinstance(model, ActorCritic) and isinstance(model.value_function, CriticValue):
        groups += _groups_of_trunk(model.value_function.trunk, head)
    return groups


def _groups_of_trunk(trunk: Any, head: Tensor | None) -> list[nn.Module]:
    """Return a trunk's layers, and its embedding if it is not tied to the lm-head."""
    groups: list[nn.Module] = []
    with suppress(ValueError):  # a trunk without a list of layers belongs to the root
        groups += layers_of(trunk)
    embedding = trunk.get_input_embeddings()
    if embedding.weight is not head:
        groups.append(embedding)
    return groups


def is_sharded(model: nn.Module) -> bool:
    """Return whether the model is sharded."""
    return isinstance(model, FSDPModule)


def groups_of(model: nn.Module) -> list[Any]:
    """Return the FSDP modules, root first; empty if the model is not sharded."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free the gathered weights, so that the parameters are the optimizer's shards again."""
    for group in groups_of(model):
        group.reshard()


def reshard_for_update(model: nn.Module) -> None:
    """Reshard, and reset FSDP's record of passes without gradients.

    With the record, FSDP would gather too many weights in the backward pass.
    """
    # torch 2.11 lacks the method, so an update gathers the weights once too often.
    reset = getattr(model, "reset_iter_state", None)
    if reset is not None:
        reset()
    reshard(model)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Gather the whole model on this rank for a block of passes without gradients.

    Ranks do not wait for one another in the block.
    """
    groups = groups_of(model)
    for group in groups:
        group.unshard()
        group.set_reshard_after_forward(False, recurse=False)
        group.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for group in groups:
            # By default, the root stays gathered after its forward passes.
            group.set_reshard_after_forward(group is not model, recurse=False)
            group.set_reshard_after_backward(True, recurse=False)
            group.reshard()


def sharded_like(value: Tensor, weight: Tensor) -> Tensor:
    """Place a full tensor on the weight's device, and shard it if the weight is sharded."""
    value = value.to(weight.device)
    if not isinstance(weight, DTensor) or isinstance(value, DTensor):
        return value
    if value.shape != weight.shape:
        return value
    return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)


def local_part(value: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, sharing its memory."""
    return value.to_local() if isinstance(value, DTensor) else value


def full_tensor(value: Tensor) -> Tensor:
    """Gather a sharded tensor on every rank; all ranks must call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value
