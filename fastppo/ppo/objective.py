"""Terms of PPO's loss besides the fused policy loss in `PPOTrainer.policy_loss`.

    clip       −w·min(r·A, clip(r, 1−ε, 1+ε)·A) + kl_loss_coef·KL(reference) − entropy_coef·entropy
    penalty    −w·r·A + β(r − 1 − log r) − entropy_coef·entropy

cispo, sapo, gspo and dis replace the first term of clip; see `fastppo.ppo_loss`. With
kl_loss_estimator=k1_by_ratio or k3_by_ratio the KL is multiplied by r. w is the importance weight,
1 for tokens sampled from π_old.

Source: Schulman et al. 2017, eq. 7 and 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fastppo_kernels.records import SUMS
from torch import Tensor

from fastppo.data.batch import Layout
from fastppo.data.world import World
from fastppo.functional.losses import PPOLoss, linear_ppo_loss
from fastppo.models.head import Head
from fastppo.models.policy import ActorCritic
from fastppo.models.reference_policy import ReferencePolicy
from fastppo.ppo.experience import Experience
from fastppo.ppo.options.config import BY_RATIO, PPOConfig


def penalty_loss(
    hidden: Tensor, micro: Experience, options: PPOConfig, *, head: Head, beta: float
) -> PPOLoss:
    """PPO-Penalty on the hidden states [N, H] that predict the response tokens.

    Up to the constant β, it equals an unclipped loss with advantage A − β/w and −β times k1 to the
    rollout policy, so the fused loss computes it.
    """
    # The KL to the rollout policy is not weighted: at ratio 1 it is 0, with zero gradient.
    beta_over_weight: Any = beta
    if micro.importance_weights is not None:
        beta_over_weight = beta / micro.importance_weights
    out = linear_ppo_loss(
        hidden,
        head.weight,
        micro.batch.response_tokens,
        micro.old_logprobs,
        micro.advantages - beta_over_weight,
        bias=head.bias,
        weights=micro.token_weights,
        importance_weights=micro.importance_weights,
        clip_ratio=None,
        ref_logprobs=micro.old_logprobs,
        kl_coef=-beta,
        kl_estimator="k1",
        entropy_coef=options.entropy_coef,
        temperature=options.temperature,
        backend=options.backend,
        **head.transform,
    )
    assert micro.token_weights is not None
    ratio = (out.logprobs - micro.old_logprobs).exp()
    constant = beta * micro.token_weights.sum(dtype=out.loss.dtype)
    sums = out.sums.clone()
    sums[SUMS.index("loss")] -= constant
    sums[SUMS.index("policy_loss")] -= beta * (micro.token_weights * ratio).sum()
    return out._replace(loss=out.loss - constant, sums=sums)


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
    size = options.limits().count(options.ptx_block_size)
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
