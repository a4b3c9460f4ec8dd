"""Terms of PPO's loss.

    clip       −w·min(r·A, clip(r, 1−ε, 1+ε)·A) + kl_loss_coef·KL(reference) − entropy_coef·entropy
    penalty    −w·r·A + β(r − 1 − log r) − entropy_coef·entropy

cispo, sapo, gspo, dis, dppo_tv and dppo_kl, or a user-defined function, replace the first term of
clip; see `fastppo.ppo_loss`. penalty is such a function too. With kl_loss_estimator=k1_by_ratio or
k3_by_ratio the KL is multiplied by r. w is the importance weight, 1 for tokens sampled from π_old.

Source: Schulman et al. 2017, eq. 7 and 8.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fastppo_kernels.records import LOG_RATIO_LIMIT, POLICY_TERMS
from torch import Tensor

from fastppo.data.batch import Layout
from fastppo.data.world import World
from fastppo.functional.losses import PPOLoss, linear_ppo_loss
from fastppo.functional.statistics import sampled_kl
from fastppo.functional.user_functions import named_by
from fastppo.models.head import Head
from fastppo.models.policy import ActorCritic
from fastppo.models.reference_policy import ReferencePolicy
from fastppo.ppo.experience import Experience
from fastppo.ppo.options.config import BY_RATIO, PPOConfig


def policy_loss(
    hidden: Tensor,
    micro: Experience,
    options: PPOConfig,
    *,
    head: Head,
    kl: dict[str, Any],
    function: Callable[..., Tensor] | None,
    beta: float,
) -> PPOLoss:
    """Compute the policy loss of the hidden states [N, H] that predict the response tokens.

    Args:
        kl: keywords of `linear_ppo_loss` for the KL to the reference.
        function: the user's objective. In addition to the arguments that `linear_ppo_loss` offers,
            it may name `scores`, [N]: the score of each token's response before normalization.
        beta: weight of the KL to the rollout policy, for objective=penalty.
    """
    objective: str | Callable[..., Tensor] = options.objective
    if function is not None:
        objective = functools.partial(function, **named_by(function, {"scores": micro.scores}))
    elif objective == "penalty":
        objective = functools.partial(penalty, beta=beta)
    return linear_ppo_loss(
        hidden,
        head.weight,
        micro.batch.response_tokens,
        micro.old_logprobs,
        micro.advantages,
        bias=head.bias,
        weights=micro.token_weights,
        importance_weights=micro.importance_weights,
        objective=objective,
        cu_seqlens=None if objective in POLICY_TERMS else micro.batch.cu_seqlens,
        clip_ratio=options.clip_range,
        dual_clip=options.dual_clip,
        ref_logprobs=micro.ref_logprobs,
        **kl,
        entropy_coef=options.entropy_coef,
        temperature=options.temperature,
        backend=options.backend,
        **head.transform,
    )


def penalty(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    importance_weights: Tensor,
    beta: float,
) -> Tensor:
    """PPO-Penalty. The KL to the rollout policy has no importance weight."""
    ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    kl = sampled_kl(old_logprobs, logprobs, "k3")
    return -importance_weights * ratio * advantages + beta * kl


@contextmanager
def kl_keywords(
    reference: ReferencePolicy | None, layout: Layout, options: PPOConfig
) -> Iterator[dict[str, Any]]:
    """Yield the keywords of `linear_ppo_loss` for the KL in the loss.

    The exact KL (`full`) needs the reference's hidden states and lm-head. With sharded models they
    are gathered only inside the block, so compute the loss inside it.
    """
    estimator = options.kl_loss_estimator
    keywords: dict[str, Any] = {
        "kl_coef": options.kl_loss_coef,
        "kl_estimator": estimator.removesuffix(BY_RATIO),
        # The coefficient may be 0 because of a schedule.
        "kl_ratio_weighted": estimator.endswith(BY_RATIO) and options.kl_loss_coef > 0,
    }
    if estimator != "full" or not options.kl_loss_coef:
        yield keywords
        return
    assert reference is not None
    with reference.states(layout) as states:
        yield keywords | states.operands


def add_ptx_gradient(
    model: ActorCritic,
    blocks: Tensor,
    options: PPOConfig,
    *,
    world: World,
    backward: Callable[[Tensor], None],
) -> Tensor:
    """PPO-ptx: add γ times the gradient of the language-modeling loss on blocks of text.

    Args:
        blocks: [n, T] int64, split over the ranks.
        backward: accumulates the gradient of a loss.

    Returns:
        The language-modeling loss, 0-d.
    """
    rows = world.local_rows(len(blocks))
    size = options.limits().count(blocks.shape[1])
    parts: list[Tensor] = []
    if rows:
        parts += blocks[rows.start : rows.stop].to(model.device).split(size)
    blocks_per_rank = math.ceil(len(blocks) / world.size)
    losses = []
    for i in range(math.ceil(blocks_per_rank / size)):
        # A rank without blocks left runs one with weight 0, because collectives wait for all ranks.
        part = blocks[:1].to(model.device)
        share = 0.0
        if i < len(parts):
            part = parts[i]
            share = len(part) / len(blocks)
        with model.autocast():
            loss = model.language_model_loss(part, options.backend)
            loss = loss * share
        backward(options.ptx_coef * loss)
        losses.append(loss.detach())
    total = torch.zeros((), device=model.device)
    for loss in world.cat(torch.stack(losses)):
        total = total + loss
    return total
