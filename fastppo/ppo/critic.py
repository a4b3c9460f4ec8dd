"""Extra passes that train only a separate critic (`value_epochs`), before the policy's update."""

from __future__ import annotations

import torch
from torch import Tensor

from fastppo.data.microbatches import Limits
from fastppo.data.world import World
from fastppo.functional.value_loss import ValueLossFunction
from fastppo.models.policy import ActorCritic
from fastppo.ppo.experience import Experience
from fastppo.ppo.metrics import to_floats
from fastppo.ppo.optimizer import Optimizer
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.out_of_memory import MicrobatchLimits


def value_loss(values: Tensor, micro: Experience, options: PPOConfig) -> tuple[Tensor, Tensor]:
    """Return the value loss of a microbatch, 0-d and differentiable, and its clipped tokens."""
    return ValueLossFunction.apply(
        values, micro.returns, micro.token_weights, micro.old_values, options.value_clip
    )


def train_critic(
    experience: Experience,
    options: PPOConfig,
    *,
    model: ActorCritic,
    optimizer: Optimizer,
    microbatch_limits: MicrobatchLimits,
    world: World,
) -> None:
    """Make one pass over a batch that trains the critic, at the current learning rate."""
    order = torch.randperm(len(experience))
    for minibatch in experience.minibatches(order, options.minibatches, options.aggregation):

        def accumulate(limits: Limits, minibatch: Experience = minibatch) -> None:
            optimizer.zero_grad()
            for micro in minibatch.microbatches(limits, world):
                layout = model.layout(micro.batch)
                with model.autocast():
                    values = model.values(layout, layout.predicting)
                value, _ = value_loss(values, micro, options)
                optimizer.backward(options.vf_coef * value)

        microbatch_limits.fit(accumulate, options.limits(model.packing), len(minibatch))
        norms = to_floats(optimizer.clip_gradients(options.max_grad_norm))
        optimizer.step({"loss": 0.0, **norms})
