"""The terms of PPO's loss: policy and value.

    clip       −w·min(r·A, clip(r, 1−ε, 1+ε)·A) + kl_loss_coef·KL(reference) − entropy_coef·entropy
    penalty    −w·r·A + β(r − 1 − log r) − entropy_coef·entropy

cispo, sapo, gspo, dis, dppo_tv and dppo_kl, or a user-defined function, replace the first term of
clip; see `fastppo.ppo_loss`. penalty is such a function too. With kl_loss_estimator=k1_by_ratio or
k3_by_ratio the KL is multiplied by r. w is the importance weight, 1 for tokens sampled from π_old.

Source: Schulman et al. 2017, eq. 7 and 8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastppo_kernels.records import LOG_RATIO_LIMIT, POLICY_TERMS
from torch import Tensor

from fastppo.data.batch import Layout
from fastppo.functional.losses import PPOLoss, linear_ppo_loss
from fastppo.functional.statistics import sampled_kl
from fastppo.functional.user_functions import Offering
from fastppo.functional.value_loss import ValueLossFunction
from fastppo.models.policy import ActorCritic
from fastppo.models.reference_policy import ReferencePolicy
from fastppo.ppo.coefficients import Coefficients
from fastppo.ppo.experience import Experience
from fastppo.ppo.options.config import BY_RATIO, PPOConfig


class PolicyLoss:
    """The policy loss of a run: the objective, the KL to the reference and the entropy bonus.

    Args:
        head: the policy's lm-head.
        reference: the reference of the KL in the loss, if there is one.
        function: the user's objective. In addition to the arguments that `linear_ppo_loss` offers,
            it may name `scores`, [N]: the score of each token's response before normalization.
    """

    def __init__(
        self,
        config: PPOConfig,
        model: ActorCritic,
        reference: ReferencePolicy | None = None,
        function: Callable[..., Tensor] | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.reference = reference
        self.function = function

    def __call__(
        self, hidden: Tensor, layout: Layout, micro: Experience, coefficients: Coefficients
    ) -> PPOLoss:
        """Compute the loss of the hidden states [N, H] that predict the response tokens."""
        head = self.model.head
        objective = self._objective(micro, coefficients)
        with self._kl_keywords(layout, coefficients) as kl:
            return linear_ppo_loss(
                hidden,
                head.weight,
                layout.response_tokens,
                micro.old_logprobs,
                micro.advantages,
                bias=head.bias,
                weights=micro.token_weights,
                importance_weights=micro.importance_weights,
                objective=objective,
                cu_seqlens=None if objective in POLICY_TERMS else micro.batch.cu_seqlens,
                clip_ratio=coefficients.clip_range,
                dual_clip=coefficients.dual_clip,
                ref_logprobs=micro.ref_logprobs,
                **kl,
                entropy_coef=coefficients.entropy_coef,
                temperature=self.config.temperature,
                backend=self.config.backend,
                **head.transform,
            )

    def _objective(
        self, micro: Experience, coefficients: Coefficients
    ) -> str | Callable[..., Tensor]:
        """Return the name of the built-in objective, or the function in its place."""
        if self.function is not None:
            return Offering(self.function, scores=micro.scores)
        if self.config.objective == "penalty":
            return functools.partial(penalty, beta=coefficients.policy_kl_coef)
        return self.config.objective

    @contextmanager
    def _kl_keywords(self, layout: Layout, coefficients: Coefficients) -> Iterator[dict[str, Any]]:
        """Yield the keywords of `linear_ppo_loss` for the KL in the loss.

        The exact KL (`full`) needs the reference's hidden states and lm-head. With sharded models
        they are gathered only inside the block, so compute the loss inside it.
        """
        estimator = self.config.kl_loss_estimator
        keywords: dict[str, Any] = {
            "kl_coef": coefficients.kl_loss_coef,
            "kl_estimator": estimator.removesuffix(BY_RATIO),
            # The coefficient may be 0 because of a schedule.
            "kl_ratio_weighted": estimator.endswith(BY_RATIO) and coefficients.kl_loss_coef > 0,
        }
        if estimator != "full" or not coefficients.kl_loss_coef:
            yield keywords
            return
        assert self.reference is not None
        with self.reference.states(layout) as states:
            yield keywords | states.operands


def value_loss(
    values: Tensor, micro: Experience, coefficients: Coefficients
) -> tuple[Tensor, Tensor]:
    """Return the value loss of a microbatch, 0-d and differentiable, and its clipped tokens."""
    return ValueLossFunction.apply(
        values, micro.returns, micro.token_weights, micro.old_values, coefficients.value_clip
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
