"""The rollout policy as PPO's ratio needs it: its logprobs and values, and how far the sampler was
from it.

The sampler's own are taken where it computes what the learner computes, the same weights in fp32;
then the learner needs no pass over the batch before its first update. Elsewhere the learner
recomputes them, and what was drawn from another distribution is corrected by the importance weight
π_old/π_sampler of each token, or the product of those of its response, which multiplies the policy
term of its loss. Beyond its bounds it is moved to them (truncated), or the token teaches nothing
(masked). With top-k, top-p or another restriction π_old/π_sampler is the probability that the
restriction left. What it left out is never drawn, and no weight brings it back: how much that was
is among the metrics.

With `old_logprobs=sampler` the ratio of the loss itself is to the sampler, and the policy makes no
pass before the update.

Sources: truncation, Ionides 2008; for engines that differ from the learner, Yao et al. 2025; the
mask of tokens with two bounds, Ling Team 2025 (IcePop, arXiv:2510.18855).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastppo.data.microbatches import MicrobatchPlan
from fastppo.models.policy import ActorCritic
from fastppo.models.reference_policy import ReferencePolicy
from fastppo.ppo.metrics import to_floats
from fastppo.ppo.options.config import PPOConfig
from fastppo.rollout import Rollout, RolloutEngine, Sampling

MISMATCH_LIMIT = 0.1
"""Tokens whose ratio π_old/π_sampler is beyond 1 ± this are a metric: half of the default clip
range. Of the probability that a restriction of the sampler left out, more than this too."""

LEAST = torch.finfo(torch.float32).tiny
"""Replaces a sum of squares that is 0, where all tokens are masked."""


class OldPolicy(NamedTuple):
    """Statistics of a batch under the policy before the update: fp32, packed [N], no gradient."""

    logprobs: Tensor
    """Nats, of softmax(z/T)."""
    values: Tensor
    final_values: Tensor | None
    """[B], of the state after each sequence's last token; read where a response was cut off."""
    importance_weights: Tensor | None = None
    """[N]; None where the sampler drew from the policy itself."""
    metrics: dict[str, float] = {}  # noqa: RUF012 (replaced, never written to)


class GivenPolicy(NamedTuple):
    """What is known of responses that somebody else generated: fp32, packed [N] on the CPU."""

    logprobs: Tensor | None = None
    """Nats, of softmax(z/T) under the policy that drew them; None: those of the policy as it is."""
    values: Tensor | None = None


class ReferenceStats(NamedTuple):
    """Statistics of a batch under the reference policy: [N] fp32, nats, no gradient."""

    logprobs: Tensor | None = None
    """None without a reference."""
    exact_kl: Tensor | None = None
    """KL(policy, reference) of each token's distribution, where the reward takes it."""


def read_old_policy(
    rollout: Rollout,
    plan: MicrobatchPlan,
    options: PPOConfig,
    *,
    model: ActorCritic,
    engine: RolloutEngine,
    sampling: Sampling,
    given_policy: GivenPolicy | None = None,
) -> OldPolicy:
    """Old logprobs and values of the responses of a rollout.

    Args:
        plan: prompts and responses in microbatches.
        engine, sampling: what drew them, and how.
        given_policy: in place of what the engine says; values after responses that were cut off are
            always those of the model as it is.
    """
    device = model.device
    logprobs = None
    values = None
    if given_policy is not None:
        logprobs = _on(device, given_policy.logprobs)
        values = _on(device, given_policy.values)
    if logprobs is not None and values is not None and not options.bootstrap_truncated:
        return OldPolicy(logprobs, values, None)
    is_exact = engine.same_weights and model.is_full_precision
    if wants_sampler(rollout, is_exact, options):
        assert rollout.logprobs is not None
        assert rollout.values is not None
        old = OldPolicy(
            torch.cat(rollout.logprobs).to(device),
            torch.cat(rollout.values).to(device),
            _on(device, rollout.final_values),
        )
    elif options.old_logprobs == "sampler" and rollout.sampler_logprobs is not None:
        sampled = rollout.sampler_logprobs if rollout.logprobs is None else rollout.logprobs
        values, final_values = model.values_of_plan(plan)
        old = OldPolicy(torch.cat(sampled).to(device), values, final_values)
        if rollout.logprobs is None:
            return old  # the loss's own ratio is to the distribution that was drawn from
    else:
        evaluation = model.evaluate_plan(plan, **options.softmax)
        old = OldPolicy(
            evaluation.logprobs if logprobs is None else logprobs,
            evaluation.values if values is None else values,
            evaluation.final_values,
        )
        if rollout.sampler_logprobs is not None:
            # Those without the restrictions of the sampling, if the engine gives them.
            engine_logprobs = rollout.logprobs
            if engine_logprobs is None:
                engine_logprobs = rollout.sampler_logprobs
            metrics = mismatch(old.logprobs, torch.cat(engine_logprobs).to(device))
            old = old._replace(metrics=metrics)
    # The same weights in fp32 differ by rounding alone, and there is nothing to correct.
    if rollout.sampler_logprobs is None or (is_exact and not sampling.is_restricted):
        return old
    sampler_logprobs = torch.cat(rollout.sampler_logprobs).to(device)
    lengths = torch.tensor(rollout.written_lengths, device=device)
    weights, metrics = importance(old.logprobs, sampler_logprobs, lengths, options)
    if sampling.is_restricted:
        metrics |= excluded(old.logprobs, sampler_logprobs)
    return old._replace(importance_weights=weights, metrics=old.metrics | metrics)


def _on(device: torch.device, x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(device)


def read_reference(
    reference: ReferencePolicy | None, plan: MicrobatchPlan, options: PPOConfig, *, kl_coef: float
) -> ReferenceStats:
    """The reference's logprobs of a batch in microbatches, and the exact KL if the reward takes it.

    Args:
        kl_coef: of the reward; 0 asks for no exact KL.
    """
    if reference is None:
        return ReferenceStats()
    if options.kl_estimator == "full" and kl_coef > 0:
        token_kl = reference.token_kl(plan.batches, **options.softmax)
        return ReferenceStats(plan.in_order(token_kl.ref_logprobs), plan.in_order(token_kl.kl))
    return ReferenceStats(plan.in_order(reference.logprobs(plan.batches, **options.softmax)))


def wants_sampler(rollout: Rollout, is_exact: bool, options: PPOConfig) -> bool:
    """Whether old logprobs and values are both the sampler's.

    Args:
        is_exact: sampler and learner compute the same weights in fp32.
    """
    lacks_values = rollout.values is None
    if options.bootstrap_truncated:
        lacks_values = lacks_values or rollout.final_values is None
    if options.old_logprobs == "recompute" or rollout.logprobs is None or lacks_values:
        return False
    return is_exact or options.old_logprobs == "sampler"


def importance(
    logprobs: Tensor, sampler_logprobs: Tensor, lengths: Tensor, options: PPOConfig
) -> tuple[Tensor | None, dict[str, float]]:
    """(the importance weights [N] fp32, or None without a bound; their metrics).

    The effective sample size, (Σw)²/(N·Σw²) of the bounded weights, is 1 where all are equal. The
    other metric is the share of tokens, or of responses, whose ratio was beyond the bounds.

    Args:
        lengths: [B] int64, tokens of each response.
    """
    cap = options.importance_cap
    floor = options.importance_floor
    if (cap is None and floor is None) or not len(logprobs):
        return None, {}
    by_response = options.importance_mode.startswith("sequence")
    log_ratio = logprobs - sampler_logprobs
    if by_response:
        log_ratio = torch.segment_reduce(log_ratio, "sum", lengths=lengths)
    ratio = log_ratio.clamp(-20, 20).exp()
    bounded = ratio.clamp(min=floor, max=cap)
    beyond = bounded != ratio
    weights = bounded
    if options.importance_mode.endswith("mask"):
        weights = torch.where(beyond, 0.0, ratio)
    if by_response:
        weights = weights.repeat_interleave(lengths)
    size = weights.sum() ** 2 / (len(weights) * (weights**2).sum()).clamp(min=LEAST)
    metrics = {
        "mismatch/effective_sample_size": size,
        "mismatch/beyond_bounds": beyond.float().mean(),
    }
    return weights, to_floats(metrics)


def excluded(logprobs: Tensor, sampler_logprobs: Tensor) -> dict[str, float]:
    """What top-k, top-p or another restriction kept from being drawn, of π_old's probability.

    With m = min(π_old/π_sampler, 1), the probability of the tokens that were left: the mean of
    1 − m, and the share of tokens at which it was more than a tenth.
    """
    if not len(logprobs):
        return {}
    mass = -torch.expm1((logprobs - sampler_logprobs).clamp(max=0))
    return to_floats(
        {
            "mismatch/excluded_mass": mass.mean(),
            "mismatch/excluded_share": (mass > MISMATCH_LIMIT).float().mean(),
        }
    )


def mismatch(logprobs: Tensor, sampled: Tensor) -> dict[str, float]:
    """How far the learner's logprobs [N] are from the sampler's, token by token, nats."""
    if not len(logprobs):
        return {}
    gap = logprobs - sampled
    ratio = gap.clamp(-20, 20).exp()
    return to_floats(
        {
            "mismatch/mean": gap.abs().mean(),
            "mismatch/worst": gap.abs().max(),
            "mismatch/outside": ((ratio - 1).abs() > MISMATCH_LIMIT).float().mean(),
        }
    )
