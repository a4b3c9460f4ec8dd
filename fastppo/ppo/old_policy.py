"""Old logprobs and values, and the importance weights of a sampler that differs from the policy.

If the sampler computes the same weights in fp32, its own logprobs and values are used, and the
learner needs no forward pass before the first update. Otherwise the learner recomputes them. The
policy term of the loss is then multiplied by the importance weight π_old/π_sampler, per token or
multiplied over the response. Outside its bounds the weight is clamped (truncate) or 0 (mask). Under
top-k, top-p or another restriction, π_old/π_sampler is the probability mass that remained.
Excluded tokens are never sampled, and no weight corrects for that; the metrics report the excluded
mass.

With `old_logprobs=sampler` the ratio in the loss is to the sampler, and there is no forward pass
before the update.

Sources: truncation, Ionides 2008; engines that differ from the learner, Yao et al. 2025; masking
with two bounds, Ling Team 2025 (IcePop, arXiv:2510.18855).
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
"""Tokens with |π_old/π_sampler − 1| above this, or with more excluded mass, are counted in the
metrics. Half of the default clip range."""

LEAST = torch.finfo(torch.float32).tiny
"""Lower bound of a sum of squares, for a batch with all tokens masked."""


class OldPolicy(NamedTuple):
    """Statistics of a batch under the policy before the update: [N] fp32, no gradient."""

    logprobs: Tensor
    """Nats, of softmax(z/T)."""
    values: Tensor
    final_values: Tensor | None
    """[B], value after each sequence's last token, used for truncated responses."""
    importance_weights: Tensor | None = None
    """[N]; None if the sampler is the policy."""
    metrics: dict[str, float] = {}  # noqa: RUF012 (replaced, never written to)


class GivenPolicy(NamedTuple):
    """Known statistics of responses generated elsewhere: [N] fp32 on the CPU."""

    logprobs: Tensor | None = None
    """Nats of softmax(z/T) under the generating policy; None means the current policy."""
    values: Tensor | None = None


class ReferenceStats(NamedTuple):
    """Statistics of a batch under the reference policy: [N] fp32, nats, no gradient."""

    logprobs: Tensor | None = None
    """None without a reference."""
    exact_kl: Tensor | None = None
    """KL(policy, reference) of each token's distribution, if the reward uses it."""


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
    """Return old logprobs and values of a rollout's responses.

    Args:
        plan: prompts and responses in microbatches.
        engine, sampling: the rollout's engine and sampling.
        given_policy: used instead of the engine's. Values after truncated responses always come
            from the current model.
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
            return old  # the ratio in the loss is to the sampler itself
    else:
        evaluation = model.evaluate_plan(plan, **options.softmax)
        old = OldPolicy(
            evaluation.logprobs if logprobs is None else logprobs,
            evaluation.values if values is None else values,
            evaluation.final_values,
        )
        if rollout.sampler_logprobs is not None:
            # Before top-k and top-p, if the engine returns those.
            engine_logprobs = rollout.logprobs
            if engine_logprobs is None:
                engine_logprobs = rollout.sampler_logprobs
            metrics = mismatch(old.logprobs, torch.cat(engine_logprobs).to(device))
            old = old._replace(metrics=metrics)
    # With the same weights in fp32, only rounding differs.
    if rollout.sampler_logprobs is None or (is_exact and not sampling.is_restricted):
        return old
    sampler_logprobs = torch.cat(rollout.sampler_logprobs).to(device)
    lengths = torch.tensor(rollout.written_lengths, device=device)
    weights: Tensor | None = None
    of_weights: dict[str, float] = {}
    if options.importance_bounds is not None and len(old.logprobs):
        weights, of_weights = importance(
            old.logprobs,
            sampler_logprobs,
            lengths,
            mode=options.importance,
            bounds=options.importance_bounds,
        )
    if sampling.is_restricted:
        of_weights |= excluded(old.logprobs, sampler_logprobs)
    return old._replace(importance_weights=weights, metrics=old.metrics | of_weights)


def _on(device: torch.device, x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(device)


def read_reference(
    reference: ReferencePolicy | None, plan: MicrobatchPlan, options: PPOConfig, *, kl_coef: float
) -> ReferenceStats:
    """Return the reference's logprobs, and the exact KL if the reward uses it.

    Args:
        kl_coef: β in the reward; with 0 the exact KL is not computed.
    """
    if reference is None:
        return ReferenceStats()
    if options.kl_estimator == "full" and kl_coef > 0:
        token_kl = reference.token_kl(plan.batches, **options.softmax)
        return ReferenceStats(plan.in_order(token_kl.ref_logprobs), plan.in_order(token_kl.kl))
    return ReferenceStats(plan.in_order(reference.logprobs(plan.batches, **options.softmax)))


def wants_sampler(rollout: Rollout, is_exact: bool, options: PPOConfig) -> bool:
    """Whether old logprobs and values both come from the sampler.

    Args:
        is_exact: whether sampler and learner compute the same weights in fp32.
    """
    lacks_values = rollout.values is None
    if options.bootstrap_truncated:
        lacks_values = lacks_values or rollout.final_values is None
    if options.old_logprobs == "recompute" or rollout.logprobs is None or lacks_values:
        return False
    return is_exact or options.old_logprobs == "sampler"


def importance(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    lengths: Tensor,
    *,
    mode: str,
    bounds: tuple[float, float],
) -> tuple[Tensor, dict[str, float]]:
    """Return bounded importance weights and their metrics.

    The effective sample size of the bounded weights, (Σw)²/(N·Σw²), is 1 if all are equal. The
    other metric is the share of tokens, or of responses, outside the bounds.

    Args:
        lengths: [B] int64, tokens of each response.
        mode: truncate, mask, sequence-truncate or sequence-mask.
        bounds: lowest and highest weight.

    Returns:
        (weights [N] fp32; metrics).
    """
    by_response = mode.startswith("sequence")
    log_ratio = logprobs - sampler_logprobs
    if by_response:
        log_ratio = torch.segment_reduce(log_ratio, "sum", lengths=lengths)
    ratio = log_ratio.clamp(-20, 20).exp()
    bounded = ratio.clamp(*bounds)
    beyond = bounded != ratio
    weights = bounded
    if mode.endswith("mask"):
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
    """Return the probability mass of π_old that top-k, top-p or another restriction excluded.

    With the remaining mass m = min(π_old/π_sampler, 1): the mean of 1 − m, and the share of tokens
    with 1 − m above `MISMATCH_LIMIT`.
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
    """Return the distance of the learner's logprobs [N] from the sampler's, in nats."""
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
