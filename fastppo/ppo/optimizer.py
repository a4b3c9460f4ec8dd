"""The optimizer of PPO: its parameter groups, the user's optimizer, and the learning rate.

`fastppo.run.optimizer.Optimizer` wraps AdamW, or what the class or function of `optimizer` returns
for the parameter groups. A group has the `param_names` of its weights, by which it can be divided:
Muon, for one, is for the matrices of layers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from fastppo.models.policy import ActorCritic
from fastppo.plugins.calling import place_of
from fastppo.plugins.loading import load_plugin
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.rate_control import LARGEST_RATE
from fastppo.run.optimizer import Optimizer, schedule

ADAM_BETAS = (0.9, 0.95)
ADAM_EPS = 1e-8


def make_optimizer(
    model: ActorCritic, config: PPOConfig, function: Callable[..., Any] | None = None
) -> Optimizer:
    """Return the optimizer over policy and value function.

    Weight decay applies to the transformers' matrices only; the value function has its own learning
    rate. Each group keeps its peak rate as `peak_lr`, so the schedule needs only the step's number.
    In an `adaptive` group, `peak_lr` is a multiple of the adapted rate.

    Args:
        function: class or function in place of AdamW. By default that of the config.

    Raises:
        ValueError: the class of `optimizer` does not exist, or does not take its options.
    """
    trunk = [p for p in model.causal_lm.parameters() if p.requires_grad]
    head = [p for p in model.value_function.head.parameters() if p.requires_grad]
    critic_layers = [
        p
        for name, p in model.value_function.named_parameters()
        if p.requires_grad and not name.startswith("head.")
    ]
    policy = {"peak_lr": config.policy_rate, "adaptive": config.is_adaptive}
    value = {
        "peak_lr": config.value_rate,
        "adaptive": config.is_adaptive and config.value_learning_rate is None,
    }
    kinds = [
        (_matrices(trunk), policy, config.weight_decay),
        (_vectors(trunk), policy, 0.0),
        (head + _vectors(critic_layers), value, 0.0),
        (_matrices(critic_layers), value, config.weight_decay),
    ]
    groups: list[dict[str, Any]] = []
    for parameters, rate, decay in kinds:
        options = {"lr": rate["peak_lr"], **rate, "weight_decay": decay}
        if groups and options.items() <= groups[-1].items():  # one step for both
            groups[-1]["params"].extend(parameters)
        elif parameters:
            groups.append({"params": parameters, **options})
    names = {id(p): name for name, p in model.named_parameters()}
    for group in groups:
        group["param_names"] = [names[id(p)] for p in group["params"]]
    return Optimizer(
        optimizer_maker(config, function),
        groups,
        critic=head + critic_layers if config.value_model == "critic" else [],
        scaler=GradScaler(model.device.type, enabled=config.precision == "fp16"),
    )


def optimizer_maker(
    config: PPOConfig, function: Callable[..., Any] | None = None
) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """Return the function that makes the optimizer of the options from its parameter groups."""
    options = dict(config.optimizer_options or {})
    for name in ("lr", "weight_decay"):
        if name in options:
            raise ValueError(
                f"optimizer_options: {name} is an option of its own, "
                f"{'learning_rate' if name == 'lr' else name}"
            )
    if config.optimizer == "adamw":
        # On a CPU, the unfused loop takes ten times as long.
        options = {
            "betas": ADAM_BETAS,
            "eps": ADAM_EPS,
            "fused": True,
            **options,
        }
        make: Any = torch.optim.AdamW
    else:
        make = function or load_plugin(config.optimizer, "optimizer").function

    def checked(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        try:
            optimizer: Any = make(groups, **options)
        except Exception as error:
            raise ValueError(f"optimizer={config.optimizer}: {error}{place_of(error)}") from error
        if not all(hasattr(optimizer, name) for name in ("param_groups", "step", "state_dict")):
            raise ValueError(
                f"optimizer={config.optimizer} must return a torch.optim.Optimizer, got "
                f"{type(optimizer).__name__}"
            )
        if not all("peak_lr" in group for group in optimizer.param_groups):
            raise ValueError(
                f"optimizer={config.optimizer} must keep the groups that it is given, with all "
                "their keys"
            )
        return optimizer

    return checked


def check_optimizer(config: PPOConfig, function: Callable[..., Any] | None = None) -> None:
    """Make the optimizer over a matrix and a vector, and take a step.

    Raises:
        ValueError: its class does not exist, does not take its options, or cannot step.
    """
    weights = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
    if config.lora_rank and config.fits_value_head:
        del weights[1]  # adapters are matrices
    rate = config.policy_rate
    group: dict[str, Any] = {"params": weights, "lr": rate, "peak_lr": rate, "weight_decay": 0.0}
    group["param_names"] = ["layers.0.weight", "layers.0.bias"][: len(weights)]
    optimizer = Optimizer(optimizer_maker(config, function), [group])
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    try:
        optimizer.step()
    except Exception as error:
        raise ValueError(
            f"optimizer={config.optimizer} cannot take a step: {error}{place_of(error)}"
        ) from error


def _matrices(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.dim() >= 2]


def _vectors(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.dim() < 2]


def schedule_factor(step: int, config: PPOConfig) -> float:
    """Return the factor of warm-up and schedule on every learning rate, for an optimizer step."""
    return schedule(config.lr_schedule, step, config.warmup_steps, config.optimizer_steps)


def set_learning_rate(
    optimizer: Optimizer, step: int, config: PPOConfig, adaptive_rate: float | None = None
) -> float:
    """Set every group's rate for an optimizer step, and return the policy's.

    Args:
        adaptive_rate: the rate of `learning_rate=auto`.
    """
    factor = schedule_factor(step, config)
    for group in optimizer.param_groups:
        rate = group["peak_lr"]
        if group["adaptive"] and adaptive_rate is not None:
            rate = min(adaptive_rate * rate, LARGEST_RATE)
        rate = factor * rate
        if isinstance(group["lr"], Tensor):  # compiled optimizers keep it on the device
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    return float(optimizer.param_groups[0]["lr"])
