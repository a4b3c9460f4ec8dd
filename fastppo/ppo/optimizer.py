"""AdamW over policy and value function, its learning rate by the step's number, and clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastppo.models.policy import ActorCritic
from fastppo.models.sharding import full_tensor
from fastppo.ppo.eight_bit import adamw_8bit
from fastppo.ppo.master_weights import MasterAdamW, MasterWeights
from fastppo.ppo.options.config import PPOConfig

ADAM_BETA1 = 0.9
"""The decay of AdamW's first moment."""
ADAM_EPS = 1e-8
"""Added to the root of the second."""


def make_optimizer(model: ActorCritic, config: PPOConfig) -> Any:
    """AdamW on fp32 weights, masters of those that the model has in bfloat16 (`master_weights`, and
    `eight_bit`); weight decay on the matrices of transformers alone, a rate of its own for the
    values.

    Each group keeps its peak rate under `peak_lr`, so a schedule needs only the step's number.

    Raises:
        ValueError: torchao, which `optimizer=adamw8bit` needs, is not installed.
    """
    trunk = [p for p in model.causal_lm.parameters() if p.requires_grad]
    head = [p for p in model.value_function.head.parameters() if p.requires_grad]
    critic_layers = [
        p
        for name, p in model.value_function.named_parameters()
        if p.requires_grad and not name.startswith("head.")
    ]
    kinds = [
        (_matrices(trunk), config.learning_rate, config.weight_decay),
        (_vectors(trunk), config.learning_rate, 0.0),
        (head + _vectors(critic_layers), config.value_rate, 0.0),
        (_matrices(critic_layers), config.value_rate, config.weight_decay),
    ]
    groups: list[dict[str, Any]] = []
    for parameters, rate, decay in kinds:
        options = {"lr": rate, "peak_lr": rate, "weight_decay": decay}
        if groups and options.items() <= groups[-1].items():  # one step for both
            groups[-1]["params"].extend(parameters)
        elif parameters:
            groups.append({"params": parameters, **options})
    betas = (ADAM_BETA1, config.adam_beta2)
    if config.optimizer == "adamw8bit":
        optimizer = adamw_8bit()
        return optimizer(groups, bf16_stochastic_round=True, betas=betas, eps=ADAM_EPS)
    # Fused is one pass over the weights; on a CPU the loop takes ten times as long.
    return MasterAdamW(groups, fused=True, betas=betas, eps=ADAM_EPS)


def _matrices(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p for p in parameters if p.dim() >= 2]


def _vectors(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p for p in parameters if p.dim() < 2]


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: PPOConfig) -> float:
    """Sets every group's rate for optimiser step `step`; returns the trunk's."""
    factor = schedule(config.lr_schedule, step, config.warmup_steps, config.optimizer_steps)
    for group in optimizer.param_groups:
        rate = factor * group["peak_lr"]
        if isinstance(group["lr"], Tensor):  # of a step that is compiled
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    return factor * optimizer.param_groups[0]["peak_lr"]


def clip_gradients(
    optimizer: MasterWeights, model: ActorCritic, config: PPOConfig
) -> dict[str, Tensor]:
    """Scales gradients down to `max_grad_norm`; the norms before, 0-d. A critic's are clipped apart
    from the policy's."""
    groups = {"grad_norm": optimizer.weights}
    if config.value_model == "critic":
        critic = {id(p) for p in model.value_function.parameters()}
        groups = {
            "grad_norm": [p for p in optimizer.weights if id(p) not in critic],
            "value_grad_norm": [p for p in optimizer.weights if id(p) in critic],
        }
    norms = {}
    for name, weights in groups.items():
        norms[name] = full_tensor(torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm))
    return norms


def schedule(name: str, step: int, warmup: int, total: int) -> float:
    """Factor of the peak learning rate at `step`: linear warm-up, then constant or decay to 0."""
    if step < warmup:
        return (step + 1) / warmup
    if name == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - progress if name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
