"""FastPPO: PPO for language models with fused losses.

Names are imported on first use: `fastppo --help` needs no torch, and the losses need no
transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastppo_kernels.cpu.threads import empty_cache

    from fastppo.functional.advantages import Advantages, compute_advantages, gae, whiten
    from fastppo.functional.aggregation import aggregation_weights
    from fastppo.functional.lm_head import head_weight
    from fastppo.functional.losses import (
        PPOLoss,
        combine_sums,
        linear_ppo_loss,
        loss_metrics,
        ppo_loss,
    )
    from fastppo.functional.statistics import (
        TokenStats,
        linear_token_logprobs,
        linear_token_stats,
        token_logprobs,
        token_stats,
    )
    from fastppo.functional.tutorial_losses import entropy, policy_loss, total_loss
    from fastppo.functional.value_loss import value_loss
    from fastppo.ppo.options.config import PPOConfig
    from fastppo.ppo.trainer import PPOTrainer

__version__ = "0.3.0"

HOMES = {
    "fastppo.functional.advantages": ("Advantages", "compute_advantages", "gae", "whiten"),
    "fastppo.functional.aggregation": ("aggregation_weights",),
    "fastppo.functional.lm_head": ("head_weight",),
    "fastppo.functional.losses": (
        "PPOLoss",
        "combine_sums",
        "linear_ppo_loss",
        "loss_metrics",
        "ppo_loss",
    ),
    "fastppo.functional.statistics": (
        "TokenStats",
        "linear_token_logprobs",
        "linear_token_stats",
        "token_logprobs",
        "token_stats",
    ),
    "fastppo.functional.tutorial_losses": ("entropy", "policy_loss", "total_loss"),
    "fastppo.functional.value_loss": ("value_loss",),
    "fastppo.ppo.options.config": ("PPOConfig",),
    "fastppo.ppo.trainer": ("PPOTrainer",),
    "fastppo_kernels.cpu.threads": ("empty_cache",),
}
"""Public names, by module."""
_HOME_OF = {name: module for module, names in HOMES.items() for name in names}

__all__ = [
    "Advantages",
    "PPOConfig",
    "PPOLoss",
    "PPOTrainer",
    "TokenStats",
    "aggregation_weights",
    "combine_sums",
    "compute_advantages",
    "empty_cache",
    "entropy",
    "gae",
    "head_weight",
    "linear_ppo_loss",
    "linear_token_logprobs",
    "linear_token_stats",
    "loss_metrics",
    "policy_loss",
    "ppo_loss",
    "token_logprobs",
    "token_stats",
    "total_loss",
    "value_loss",
    "whiten",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fastppo' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
