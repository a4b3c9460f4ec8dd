"""User-defined parts by name: `rollout`, `objective`, `advantage` and `optimizer`.

Each option takes the name of a built-in, `file.py:function` or `package.module:function`, and the
trainer's argument of the same name takes the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fastppo.functional.losses import ppo_loss
from fastppo.functional.user_functions import Offering, name_and_place
from fastppo.plugins.calling import explaining
from fastppo.plugins.loading import Plugin, load_plugin
from fastppo.ppo.estimators import user_advantages
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.out_of_memory import is_out_of_memory


def load_functions(
    config: PPOConfig, given: Mapping[str, Callable[..., Any]], *, has_ref: bool = False
) -> dict[str, Plugin]:
    """Load the user-defined functions by option, and check them on made-up numbers.

    Args:
        given: functions passed to `PPOTrainer`, by option.
        has_ref: whether a reference is passed to it too.

    Raises:
        ValueError: one does not exist, or does not work on made-up numbers.
    """
    plugins = {}
    for option in config.user_functions:
        plugin = load_plugin(given.get(option, getattr(config, option)), option)
        if option not in ("optimizer", "rollout"):  # their makers explain errors
            name = f"{option} {name_and_place(plugin.function)}"
            function = explaining(name, plugin.function, is_passed=is_out_of_memory)
            plugin = replace(plugin, function=function)
        plugins[option] = plugin
    if "objective" in plugins:
        has_ref = has_ref or config.wants_reference or config.reference_model is not None
        check_objective(plugins["objective"].function, has_ref=has_ref)
    if "advantage" in plugins:
        check_advantage(plugins["advantage"].function, config)
    return plugins


def check_objective(function: Callable[..., Any], *, has_ref: bool) -> None:
    """Compute the loss of an objective on two made-up responses of three and two tokens.

    Args:
        has_ref: whether the run has the reference's logprobs.
    """
    numbers = torch.linspace(-1, 1, 5)
    scores = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    ppo_loss(
        torch.stack([numbers, -numbers], 1).requires_grad_(),
        torch.tensor([0, 1, 0, 1, 0]),
        numbers - 1,
        numbers,
        objective=Offering(function, scores=scores),
        cu_seqlens=torch.tensor([0, 3, 5]),
        ref_logprobs=numbers - 1.1 if has_ref else None,
        backend="torch",
    )


def check_advantage(function: Callable[..., Any], config: PPOConfig) -> None:
    """Compute advantages of made-up responses to one prompt, of three tokens and then two each."""
    count = max(2, config.samples_per_prompt)
    numbers = torch.linspace(-1, 1, 2 * count + 1)
    user_advantages(
        function,
        numbers,
        -numbers,
        cu_seqlens=torch.tensor([0, *range(3, 2 * count + 2, 2)]),
        old_logprobs=numbers - 1,
        ref_logprobs=numbers - 1.1,
        samples_per_prompt=config.samples_per_prompt,
        gamma=config.gamma,
        episodes=torch.arange(count),
    )
