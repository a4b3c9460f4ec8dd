"""The policy's objective on a microbatch: clipped, or with a penalty.

    clip       −w·min(r·A, clip(r, 1−ε, 1+ε)·A) + kl_loss_coef·KL(reference) − entropy_coef·entropy
    penalty    −w·r·A + β(r − 1 − log r) − entropy_coef·entropy

With kl_loss_ratio_weighted the KL is times r. w is 1, or the importance weight of a token that was
drawn from another distribution than π_old.

Source: Schulman et al. 2017, eq. 7 and 8.
"""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from fastppo_kernels.records import SUMS
from torch import Tensor
from torch.amp import GradScaler

from fastppo.data.batch import Layout
from fastppo.data.microbatches import Limits
from fastppo.data.world import World
from fastppo.functional.losses import PPOLoss
from fastppo.functional.tutorial_losses import ValueLossFunction
from fastppo.models.head import Head, RefStates
from fastppo.models.policy import ActorCritic
from fastppo.models.reference_policy import ReferencePolicy
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.experience import Experience
from fastppo.ppo.metrics import Microbatch, of_all_ranks
from fastppo.ppo.out_of_memory import agreed


def clipped_loss(
    head: Head, hidden: Tensor, micro: Experience, ref: RefStates | None, options: PPOConfig
) -> PPOLoss:
    """The clipped objective of the hidden states [N, H] that predict the response tokens.

    Args:
        ref: the reference's, for the exact KL in the loss.
    """
    return head.ppo_loss(
        hidden,
        micro.batch.response_tokens,
        micro.old_logprobs,
        micro.advantages,
        ref=ref,
        clip_ratio=options.clip_range,
        dual_clip=options.dual_clip,
        ref_logprobs=micro.ref_logprobs,
        kl_coef=options.kl_loss_coef,
        kl_estimator=options.kl_loss_estimator,
        # A schedule may have taken the coefficient to 0.
        kl_ratio_weighted=options.kl_loss_ratio_weighted and options.kl_loss_coef > 0,
        **_shared(micro, options),
    )


def penalty_loss(
    head: Head, hidden: Tensor, micro: Experience, beta: float, options: PPOConfig
) -> PPOLoss:
    """PPO-Penalty, with KL(old, new) by its estimator on the rollout's tokens.

    It is, but for the constant β, an unclipped loss with advantage A − β/w and −β times k1 to the
    rollout policy, so it goes the same way as the other objective.
    """
    weights = micro.importance_weights
    out = head.ppo_loss(
        hidden,
        micro.batch.response_tokens,
        micro.old_logprobs,
        # The penalty estimates a KL that is 0, with no gradient, at ratio 1: it is not weighted.
        micro.advantages - (beta if weights is None else beta / weights),
        clip_ratio=None,
        ref_logprobs=micro.old_logprobs,
        kl_coef=-beta,
        kl_estimator="k1",
        **_shared(micro, options),
    )
    assert micro.token_weights is not None
    ratio = (out.logprobs - micro.old_logprobs).exp()
    constant = beta * micro.token_weights.sum(dtype=out.loss.dtype)
    sums = out.sums.clone()
    sums[SUMS.index("loss")] -= constant
    sums[SUMS.index("policy_loss")] -= beta * (micro.token_weights * ratio).sum()
    return out._replace(loss=out.loss - constant, sums=sums)


def policy_loss(
    head: Head,
    hidden: Tensor,
    micro: Experience,
    ref: RefStates | None,
    beta: float,
    options: PPOConfig,
) -> PPOLoss:
    """The policy's loss from the hidden states that predict the response tokens.

    Args:
        ref: the reference's, for the exact KL in the loss.
        beta: of the penalty.
    """
    if options.objective == "penalty":
        return penalty_loss(head, hidden, micro, beta, options)
    return clipped_loss(head, hidden, micro, ref, options)


def _reference_states(
    layout: Layout, reference: ReferencePolicy | None, options: PPOConfig
) -> AbstractContextManager[RefStates | None]:
    """What the exact KL in the loss is formed with, for the time of the block; else None."""
    is_exact = options.kl_loss_coef and options.kl_loss_estimator == "full"
    if options.objective == "penalty" or not is_exact:
        return nullcontext()
    assert reference is not None
    return reference.states(layout)


def value_term(values: Tensor, micro: Experience, options: PPOConfig) -> tuple[Tensor, Tensor]:
    """(the value loss of a microbatch, without its coefficient; how many tokens' loss is that of
    the clipped value), 0-d each."""
    assert micro.token_weights is not None
    weights, clip = micro.token_weights, options.value_clip
    return ValueLossFunction.apply(values, micro.returns, weights, micro.old_values, clip)


def minibatch_gradient(
    minibatch: Experience,
    model: ActorCritic,
    reference: ReferencePolicy | None,
    optimizer: Any,
    world: World,
    scaler: GradScaler,
    beta: float,
    warming_up: bool,
    options: PPOConfig,
    limits: Limits,
) -> list[Microbatch]:
    """Adds up the gradient of a weighted minibatch over its microbatches; of those, every rank's.

    Args:
        scaler: of the loss, whose scale the gradient then has.
        beta: of the penalty. warming_up: the value function alone is trained.
    """
    optimizer.zero_grad(set_to_none=True)
    found = []
    for micro, counts in minibatch.microbatches(limits, world):
        layout = model.layout(micro.batch)
        with model.autocast():
            hidden, values = model(layout, detach_values=warming_up)
            # The reference's pass waits for other ranks, and the loss does not.
            with _reference_states(layout, reference, options) as ref:
                of = model.head, hidden, micro, ref, beta, options
                with torch.set_grad_enabled(not warming_up):
                    policy = agreed(world, functools.partial(policy_loss, *of))
            value, clipped = value_term(values, micro, options)
        part = options.vf_coef * value if warming_up else policy.loss + options.vf_coef * value
        scaler.scale(part).backward()
        sizes = len(micro.batch.tokens), layout.input_ids.numel()
        if counts:
            found.append(Microbatch(part.detach(), policy.sums, value.detach(), clipped, *sizes))
    return of_all_ranks(found, world, model.device)


def add_ptx_gradient(
    model: ActorCritic, blocks: Tensor, options: PPOConfig, world: World, scaler: GradScaler
) -> Tensor:
    """PPO-ptx: adds γ times the gradient of the language-model loss on blocks of text [n, T] int64,
    which the ranks share; returns that loss, 0-d."""
    own = world.own(len(blocks))
    size = options.limits().count(options.ptx_block_size)
    parts = [*blocks[own.start : own.stop].to(model.device).split(size)] if own else []
    most = math.ceil(len(blocks) / world.size)  # of one rank
    losses = []
    for i in range(math.ceil(most / size)):
        part = parts[i] if i < len(parts) else blocks[:1].to(model.device)
        with model.autocast():
            loss = model.language_model_loss(part, options.backend)
            loss = loss * (len(part) / len(blocks) if i < len(parts) else 0.0)
        scaler.scale(options.ptx_coef * loss).backward()
        losses.append(loss.detach())
    total = torch.zeros((), device=model.device)
    for loss in world.cat(torch.stack(losses)):
        total = total + loss
    return total


def _shared(micro: Experience, options: PPOConfig) -> dict[str, Any]:
    return {
        "entropy_coef": options.entropy_coef,
        "temperature": options.temperature,
        "importance_weights": micro.importance_weights,
        "weights": micro.token_weights,
        "backend": options.backend,
    }
