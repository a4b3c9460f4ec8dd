"""What the policies before the update say about a batch: old logprobs, values, the reference.

If the sampler computes the same weights in fp32, its logprobs and values are used, and the learner
needs no forward pass before the first update. Otherwise the learner recomputes them. The
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

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastppo.data.batch import on_device
from fastppo.data.microbatches import MicrobatchPlan
from fastppo.models.reference_policy import ReferencePolicy
from fastppo.ppo.experience import Experience
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.parts import Parts
from fastppo.rollout import Rollout

MISMATCH_LIMIT = 0.1
"""Tokens with |π_old/π_sampler − 1| above this, or with more excluded mass, are counted in the
metrics. Half of the default clip range."""

LEAST = torch.finfo(torch.float32).tiny
"""Lower bound of a sum of squares, for a batch with all tokens masked."""


class GivenPolicy(NamedTuple):
    """Known statistics of responses generated elsewhere: [N] fp32 on the CPU."""

    logprobs: Tensor | None = None
    """Nats of softmax(z/T) under the generating policy; None means the current policy."""
    values: Tensor | None = None


def read_old_policy(
    experience: Experience,
    rollout: Rollout,
    plan: MicrobatchPlan,
    config: PPOConfig,
    *,
    parts: Parts,
    given: GivenPolicy | None = None,
) -> tuple[Experience, dict[str, Tensor]]:
    """Fill in the old logprobs and values, and the importance weights.

    Args:
        plan: prompts and responses in microbatches.
        parts: with the model, the engine and the sampling of the rollout.
        given: used instead of the engine's. Values after truncated responses always come from the
            current model.

    Returns:
        (experience, metrics of the mismatch of policy and sampler, 0-d tensors).
    """
    model = parts.model
    device = model.device
    sampling = parts.sampling
    given = given or GivenPolicy()
    logprobs = _on(device, given.logprobs)
    values = _on(device, given.values)
    if logprobs is not None and values is not None and not config.bootstrap_truncated:
        return replace(experience, old_logprobs=logprobs, old_values=values), {}
    metrics: dict[str, Tensor] = {}
    is_exact = parts.engine.same_weights and model.is_full_precision
    if wants_sampler(rollout, is_exact, config):
        assert rollout.logprobs is not None
        assert rollout.values is not None
        logprobs = on_device(torch.cat(rollout.logprobs), device)
        values = on_device(torch.cat(rollout.values), device)
        final_values = _on(device, rollout.final_values)
    elif config.old_logprobs == "sampler" and rollout.sampler_logprobs is not None:
        sampled = rollout.sampler_logprobs if rollout.logprobs is None else rollout.logprobs
        logprobs = on_device(torch.cat(sampled), device)
        values, final_values = model.values_of_plan(plan)
    else:
        evaluation = model.evaluate_plan(plan, **config.softmax)
        logprobs = evaluation.logprobs if logprobs is None else logprobs
        values = evaluation.values if values is None else values
        final_values = evaluation.final_values
        if rollout.sampler_logprobs is not None:
            # Before top-k and top-p, if the engine returns those.
            sampled = rollout.sampler_logprobs if rollout.logprobs is None else rollout.logprobs
            metrics = mismatch(logprobs, on_device(torch.cat(sampled), device))
    experience = replace(
        experience, old_logprobs=logprobs, old_values=values, final_values=final_values
    )
    # With the same weights in fp32, only rounding differs. If the old logprobs are the sampler's,
    # the ratio in the loss is to the sampler itself.
    is_sampler = config.old_logprobs == "sampler" and rollout.logprobs is None
    is_same = is_sampler or (is_exact and not sampling.is_restricted)
    if rollout.sampler_logprobs is None or is_same:
        return experience, metrics
    sampler_logprobs = on_device(torch.cat(rollout.sampler_logprobs), device)
    weights: Tensor | None = None
    if config.importance_bounds is not None and len(logprobs):
        weights, more = importance(
            logprobs,
            sampler_logprobs,
            experience.batch.generated_lengths,
            mode=config.importance,
            bounds=config.importance_bounds,
        )
        metrics |= more
    if sampling.is_restricted:
        metrics |= excluded(logprobs, sampler_logprobs)
    return replace(experience, importance_weights=weights), metrics


def _on(device: torch.device, x: Tensor | None) -> Tensor | None:
    return None if x is None else on_device(x, device)


def read_reference(
    experience: Experience,
    reference: ReferencePolicy | None,
    plan: MicrobatchPlan,
    config: PPOConfig,
    *,
    kl_coef: float,
) -> Experience:
    """Fill in the reference's logprobs, and the exact KL if the reward uses it.

    Args:
        kl_coef: β in the reward; with 0 the exact KL is not computed.
    """
    if reference is None:
        return experience
    if config.kl_estimator == "full" and kl_coef > 0:
        token_kl = reference.token_kl(plan.batches, **config.softmax)
        return replace(
            experience,
            ref_logprobs=plan.in_order(token_kl.ref_logprobs),
            exact_kl=plan.in_order(token_kl.kl),
        )
    logprobs = reference.logprobs(plan.batches, **config.softmax)
    return replace(experience, ref_logprobs=plan.in_order(logprobs))


def wants_sampler(rollout: Rollout, is_exact: bool, config: PPOConfig) -> bool:
    """Whether old logprobs and values both come from the sampler.

    Args:
        is_exact: whether sampler and learner compute the same weights in fp32.
    """
    lacks_values = rollout.values is None
    if config.bootstrap_truncated:
        lacks_values = lacks_values or rollout.final_values is None
    if config.old_logprobs == "recompute" or rollout.logprobs is None or lacks_values:
        return False
    return is_exact or config.old_logprobs == "sampler"


def importance(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    lengths: Tensor,
    *,
    mode: str,
    bounds: tuple[float, float],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return bounded importance weights and their metrics.

    The effective sample size of the bounded weights, (Σw)²/(N·Σw²), is 1 if all are equal. The
    other metric is the share of tokens, or of responses, outside the bounds.

    Args:
        lengths: [B] int64, tokens of each response.
        mode: truncate, mask, sequence-truncate or sequence-mask.
        bounds: lowest and highest weight.

    Returns:
        (weights [N] fp32; metrics, 0-d tensors).
    """
    by_response = mode.startswith("sequence")
    log_ratio = logprobs - sampler_logprobs
    if by_response:
        lengths = on_device(lengths, logprobs.device)
        # `unsafe` skips a check of the lengths that would make the host wait.
        log_ratio = torch.segment_reduce(log_ratio, "sum", lengths=lengths, unsafe=True)
    ratio = log_ratio.clamp(-20, 20).exp()
    bounded = ratio.clamp(*bounds)
    beyond = bounded != ratio
    weights = bounded
    if mode.endswith("mask"):
        weights = torch.where(beyond, 0.0, ratio)
    if by_response:
        weights = weights.repeat_interleave(lengths, output_size=len(logprobs))
    size = weights.sum() ** 2 / (len(weights) * (weights**2).sum()).clamp(min=LEAST)
    return weights, {
        "mismatch/effective_sample_size": size,
        "mismatch/beyond_bounds": beyond.float().mean(),
    }


def excluded(logprobs: Tensor, sampler_logprobs: Tensor) -> dict[str, Tensor]:
    """Return the probability mass of π_old that top-k, top-p or another restriction excluded.

    With the remaining mass m = min(π_old/π_sampler, 1): the mean of 1 − m, and the share of tokens
    with 1 − m above `MISMATCH_LIMIT`, 0-d each.
    """
    if not len(logprobs):
        return {}
    mass = -torch.expm1((logprobs - sampler_logprobs).clamp(max=0))
    return {
        "mismatch/excluded_mass": mass.mean(),
        "mismatch/excluded_share": (mass > MISMATCH_LIMIT).float().mean(),
    }


def mismatch(logprobs: Tensor, sampled: Tensor) -> dict[str, Tensor]:
    """Return the distance of the learner's logprobs [N] from the sampler's, nats, 0-d each."""
    if not len(logprobs):
        return {}
    gap = logprobs - sampled
    ratio = gap.clamp(-20, 20).exp()
    return {
        "mismatch/mean": gap.abs().mean(),
        "mismatch/worst": gap.abs().max(),
        "mismatch/outside": ((ratio - 1).abs() > MISMATCH_LIMIT).float().mean(),
    }
