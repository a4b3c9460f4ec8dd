"""The losses of PPO tutorials, from plain tensors: logprobs, values and logits.

    policy_loss   Σ w·(−min(ratio·A, clip(ratio)·A))
    entropy       the mean entropy
    total_loss    policy_loss + vf_coef·(twice value_loss) − entropy_coef·entropy

The weights w are those of `aggregation_weights`.
"""

from __future__ import annotations

from typing import Any

import torch
from fastppo_kernels import definition
from fastppo_kernels.records import LOG_RATIO_LIMIT, Objective, accumulation_dtype
from torch import Tensor

from fastppo.functional import arguments, scalars
from fastppo.functional.aggregation import token_weights
from fastppo.functional.statistics import token_stats
from fastppo.functional.value_loss import value_loss


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    clip_ratio: float | tuple[float, float] | None = 0.2,
    dual_clip: float | None = None,
    importance_weights: Tensor | None = None,
    aggregation: str = "token-mean",
    denominator: float | Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the clipped surrogate `Σ w·(−min(ratio·A, clip(ratio)·A))`, a 0-d tensor.

    Args:
        logprobs: (...) nats, differentiable.
        old_logprobs, advantages: (...). No gradient.
        mask: (...) bool. The keywords are those of `ppo_loss`.

    Source: Schulman et al. 2017, eq. 7.
    """
    arguments.tensor("logprobs", logprobs)
    shape = logprobs.shape
    for name, value in (("old_logprobs", old_logprobs), ("advantages", advantages)):
        arguments.tensor(name, value, shape=shape, like=logprobs)
    wide = accumulation_dtype(logprobs.dtype)
    weights = token_weights(
        mask,
        aggregation=aggregation,
        denominator=denominator,
        weights=weights,
        shape=shape,
        like=logprobs,
    )
    counted = weights != 0
    lowest_ratio, highest_ratio = scalars.clip_range(clip_ratio)
    objective = Objective(lowest_ratio, highest_ratio, scalars.check_dual_clip(dual_clip))
    difference = logprobs.to(wide) - old_logprobs.detach().to(wide)
    # Masked entries may hold anything: remove them before the exponential.
    difference = torch.where(counted, difference, 0.0)
    advantages = torch.where(counted, advantages.detach().to(wide), 0.0)
    ratio = torch.exp(difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    policy = definition.policy_term(logprobs, ratio, ratio, advantages, objective)
    if importance_weights is not None:
        arguments.tensor("importance_weights", importance_weights, shape=shape, like=logprobs)
        policy = policy * importance_weights.detach().to(wide)
    return (torch.where(counted, policy, 0.0) * weights).sum()


def entropy(
    logits: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    aggregation: str = "token-mean",
    denominator: float | Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return the mean entropy of `softmax(z/T)` over unmasked rows of logits (..., V), in nats."""
    arguments.tensor("logits", logits)
    stats = token_stats(
        logits,
        torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device),
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        backend=backend,
    )
    weights = token_weights(
        mask,
        aggregation=aggregation,
        denominator=denominator,
        weights=None,
        shape=logits.shape[:-1],
        like=logits,
    )
    return (torch.where(weights != 0, stats.entropy, 0.0) * weights).sum()


def total_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    values: Tensor,
    returns: Tensor,
    logits: Tensor,
    mask: Tensor | None = None,
    *,
    clip_ratio: float | tuple[float, float] | None = 0.2,
    vf_coef: float = 0.5,
    entropy_coef: float = 0.01,
    dual_clip: float | None = None,
    old_values: Tensor | None = None,
    value_clip: float | None = None,
    temperature: float | Tensor = 1.0,
    aggregation: str = "token-mean",
    denominator: float | Tensor | None = None,
) -> dict[str, Tensor]:
    """Return `policy_loss + vf_coef·value_loss − entropy_coef·entropy` and its three parts.

    Args:
        logprobs, old_logprobs, advantages, values, returns: (...).
        logits: (..., V).
        vf_coef: factor of the squared error (V − R)², as in the paper; with `value_clip`, of the
            larger of the clipped and unclipped errors. `fastppo.value_loss` is half of it.

    Returns:
        dict[str, Tensor]: total_loss, policy_loss, value_loss (without the ½) and entropy, 0-d,
        differentiable in logprobs, values and logits.

    Source: Schulman et al. 2017, eq. 9.
    """
    scalars.finite("vf_coef", vf_coef)
    scalars.finite("entropy_coef", entropy_coef)
    aggregation_options: dict[str, Any] = {"aggregation": aggregation, "denominator": denominator}
    policy = policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_ratio=clip_ratio,
        dual_clip=dual_clip,
        **aggregation_options,
    )
    value = 2 * value_loss(
        values, returns, mask, old_values=old_values, clip_ratio=value_clip, **aggregation_options
    )
    mean_entropy = entropy(logits, mask, temperature=temperature, **aggregation_options)
    return {
        "total_loss": policy + vf_coef * value - entropy_coef * mean_entropy,
        "policy_loss": policy,
        "value_loss": value,
        "entropy": mean_entropy,
    }
