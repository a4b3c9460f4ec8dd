"""One model over many GPUs, by torch's FSDP2: each rank holds a shard of every weight.

The root is the policy with its heads (`LanguageModel`), not the causal LM: torch's hooks then fire
on the passes that PPO makes. Layers, an untied embedding and the value head are groups of their
own, gathered when they run; what is left, the last norm and the lm-head, is the root's, which torch
keeps whole from a forward pass to the end of its backward pass. So `head.weight` is a plain tensor
where the losses read it, tied or not.

    hidden, forward, values, language_model_loss
                                            the passes; each gathers what it needs, and all ranks
                                            make as many of them; in SFT padded_states
    unsharded(model)                        the whole model on every rank for the block, in which
                                            nothing is gathered: rollouts, and saving

Gradients are summed, never divided by the number of ranks: the weights of a loss are those of the
whole minibatch. Weights that are trained are sharded in fp32, moments and gradients with them;
those of a model in half precision are gathered in it, and a model in fp32 is gathered as it is, so
that one GPU and many compute the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
from fastppo.models.trunk import layers_of
from fastppo.models.value import CriticValue

PASSES = ("hidden", "language_model_loss")
"""Methods that run a pass and are not `forward`."""

HALVES = (torch.bfloat16, torch.float16)


def shard(model: LanguageModel, world: World) -> None:
    """Shards a model over the ranks, in place, and makes a first pass, which sets its root."""
    # No list of the weights: it would keep them whole beside their shards.
    halves = {p.dtype for p in model.parameters() if p.requires_grad and p.dtype in HALVES}
    model.fixed_precision = model.is_full_precision
    policy = MixedPrecisionPolicy()
    if halves:
        (half,) = halves
        policy = MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False)
    passes: tuple[str, ...] = PASSES
    if isinstance(model, ActorCritic):
        passes += ("values",)
    _shard(model, _groups(model), policy, world=world, passes=passes, widened=halves)
    batch = Batch.of([[0]], [[0]], model.device)
    with torch.no_grad(), model.autocast():  # frozen matrices may be in the products' dtype
        model.hidden(model.layout(batch))
    reshard(model)


def shard_as_it_is(root: nn.Module, trunk: Any, world: World, passes: Sequence[str] = ()) -> None:
    """Shards a module around a trunk, in place, with its weights in the dtype that they have. The
    first pass after it must be the root's own.

    Args:
        passes: methods of the root that run a pass and are not `forward`.
    """
    halves = any(p.dtype in HALVES for p in root.parameters() if p.requires_grad)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32) if halves else MixedPrecisionPolicy()
    head = None
    if isinstance(root, LanguageModel):
        head = root.causal_lm.get_output_embeddings().weight
    _shard(root, _groups_of_trunk(trunk, head), policy, world=world, passes=passes)


def _shard(
    root: nn.Module,
    groups: Sequence[nn.Module],
    policy: MixedPrecisionPolicy,
    *,
    world: World,
    passes: Sequence[str],
    widened: Collection[torch.dtype] = (),
) -> None:
    """Shards a module of which some parts are gathered by themselves, and freed after use.

    Args:
        widened: dtypes of trained weights that are sharded in fp32; one part at a time is whole in
            it.
    """
    for module in groups:
        _widen(module, widened)
        fully_shard(module, mesh=world.mesh, mp_policy=policy, reshard_after_forward=True)
    if isinstance(root, ActorCritic):
        fully_shard(root.value_function.head, mesh=world.mesh)  # in fp32 whatever the trunk is
    _widen(root, widened)
    fully_shard(root, mesh=world.mesh, mp_policy=policy)
    for group in groups_of(root):
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)  # gloo has no other
    for name in passes:
        register_fsdp_forward_method(root, name)


def _widen(module: nn.Module, dtypes: Collection[torch.dtype]) -> None:
    """Makes trained weights of these dtypes fp32; what is sharded already has been."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in dtypes:
            parameter.data = parameter.data.float()


def _groups(model: LanguageModel) -> list[nn.Module]:
    """The modules that are gathered by themselves, except the value head and the root."""
    head = model.causal_lm.get_output_embeddings().weight
    groups = _groups_of_trunk(model.causal_lm.base_model, head)
    if isinstance(model, ActorCritic) and isinstance(model.value_function, CriticValue):
        groups += _groups_of_trunk(model.value_function.trunk, head)
    return groups


def _groups_of_trunk(trunk: Any, head: Tensor | None) -> list[nn.Module]:
    """A trunk's layers, and its embedding where that is not the weight of the lm-head."""
    groups: list[nn.Module] = []
    with suppress(ValueError):  # a trunk that is no list of layers is one piece with the root
        groups += layers_of(trunk)
    embedding = trunk.get_input_embeddings()
    if embedding.weight is not head:
        groups.append(embedding)
    return groups


def is_sharded(model: nn.Module) -> bool:
    """Whether a model has been sharded."""
    return isinstance(model, FSDPModule)


def groups_of(model: nn.Module) -> list[Any]:
    """The modules that are gathered by themselves, root first; none if the model is not sharded."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Frees what was gathered; the parameters are the optimiser's shards again."""
    for group in groups_of(model):
        group.reshard()


def reshard_for_update(model: nn.Module) -> None:
    """`reshard`, and makes torch forget the passes without gradients, for whose sake it would
    gather too much in the backward pass."""
    # Newer than torch 2.11, where there is one gather too many in an update.
    reset = getattr(model, "reset_iter_state", None)
    if reset is not None:
        reset()
    reshard(model)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """The whole model on this rank, for passes without gradients of its weights; no rank waits for
    another in the block."""
    groups = groups_of(model)
    for group in groups:
        group.unshard()
        group.set_reshard_after_forward(False, recurse=False)
        group.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for group in groups:
            # The root stays gathered after its forward passes.
            group.set_reshard_after_forward(group is not model, recurse=False)
            group.set_reshard_after_backward(True, recurse=False)
            group.reshard()


def sharded_like(value: Tensor, weight: Tensor) -> Tensor:
    """A tensor that every rank has in full, held as a weight of its shape is: sharded or not."""
    value = value.to(weight.device)
    if not isinstance(weight, DTensor) or isinstance(value, DTensor):
        return value
    if value.shape != weight.shape:
        return value
    return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)


def full_tensor(value: Tensor) -> Tensor:
    """A tensor of which ranks hold shards, in full on every rank; all ranks must call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value
