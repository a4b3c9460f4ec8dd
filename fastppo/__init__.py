"""FastPPO: PPO for language models with the loss in one pass over the logits, or with no logits."""

from fastppo.advantages import Advantages, compute_advantages, gae, whiten
from fastppo.losses import (
    PPOLoss,
    TokenStats,
    aggregation_weights,
    entropy,
    linear_ppo_loss,
    linear_token_logprobs,
    policy_loss,
    ppo_loss,
    token_logprobs,
    token_stats,
    total_loss,
    value_loss,
)

__version__ = "0.1.0"

__all__ = [
    "Advantages",
    "PPOLoss",
    "TokenStats",
    "aggregation_weights",
    "compute_advantages",
    "entropy",
    "gae",
    "linear_ppo_loss",
    "linear_token_logprobs",
    "policy_loss",
    "ppo_loss",
    "token_logprobs",
    "token_stats",
    "total_loss",
    "value_loss",
    "whiten",
]
