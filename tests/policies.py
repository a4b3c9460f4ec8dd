"""Policies that the engines decode."""

from __future__ import annotations

from typing import Any

import tiny
import torch
from torch import nn

from fastppo.models.adapters import add_adapters
from fastppo.models.policy import ActorCritic


def make_policy(architecture: str = "llama", *, lora: bool = False, **parts: Any) -> ActorCritic:
    """With a value head that is not zero, so that values tell states apart, and adapters that are
    not either."""
    causal_lm = tiny.model(architecture)
    peft = None
    if lora:
        peft = add_adapters(causal_lm, rank=4, alpha=8)
        torch.manual_seed(3)
        tiny.stir_adapters(causal_lm)
    policy = ActorCritic(causal_lm, peft, **parts)
    torch.manual_seed(5)
    nn.init.normal_(policy.value_function.head.weight)
    nn.init.constant_(policy.value_function.head.bias, 0.3)
    return policy
