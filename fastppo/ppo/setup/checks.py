"""Self-check before the first update: on-policy logprobs, and warnings about unusual options."""

from __future__ import annotations

import torch
from torch import Tensor

from fastppo.data.batch import Batch
from fastppo.data.prompts import Prompts
from fastppo.models.device import busy_cpu
from fastppo.models.policy import ActorCritic
from fastppo.models.reference_policy import ReferencePolicy
from fastppo.ppo.algorithm import PPO
from fastppo.ppo.evaluation import random_state_restored
from fastppo.ppo.options.config import CRITIC_FREE, PPOConfig
from fastppo.ppo.out_of_memory import explain_out_of_memory
from fastppo.ppo.parts import Parts
from fastppo.rollout import Rollout, RolloutEngine, RolloutError, Sampling
from fastppo.rollout.agreement import rounding_tolerance
from fastppo.run.options import unused

CHECKED_PROMPTS = 4
CHECKED_TOKENS = 8
"""Tokens of each response, enough to reveal a wrong position or cache."""
QUANTIZED_TOLERANCE = 1.0
"""Mean difference of a quantized sampler's logprobs, nats: an importance weight of e per token."""


def check_can_train(ppo: PPO) -> None:
    """Raise ValueError if there are no prompts, or nothing to train on."""
    has_rewards = ppo.parts.scorer.terms or ppo.parts.episode_runner.has_rewards
    distills = ppo.reference is not None and ppo.reference.is_given
    if ppo.parts.prompts is None or not (has_rewards or distills):
        raise ValueError(
            "train() needs prompts and at least one reward, or reference_model as a teacher; "
            "step() needs neither"
        )
    config = ppo.config
    if not has_rewards and config.is_adaptive and not config.is_used("kl_coef"):
        raise ValueError(
            "learning_rate=auto adapts the rate while advantages move the policy: without rewards "
            "and with kl_coef=0 it must be a number"
        )


def self_check(ppo: PPO) -> None:
    """Check that the first update is on-policy, and warn about unusual options.

    Raises:
        RuntimeError: the first update would not be on-policy.
    """
    fresh_reference = ppo.reference
    if ppo.step_control.optimizer_step or (
        fresh_reference is not None and fresh_reference.is_given
    ):
        fresh_reference = None
    with explain_out_of_memory("the self-check", ppo.config):
        note = check_on_policy(
            few_prompts(ppo.parts),
            ppo.config,
            model=ppo.model,
            engine=ppo.engine,
            sampling=ppo.parts.sampling,
            fresh_reference=fresh_reference,
        )
    warnings = [*unused(ppo.config, ppo.parts.passed), *odd_options(ppo.config)]
    if note is not None:
        warnings.append(note)
    for sentence in [*warnings, *busy_cpu(ppo.parts.device)]:
        ppo.reporter.say(sentence, "yellow")


def few_prompts(parts: Parts) -> Prompts:
    """Return a few prompts, with the output of the vision tower for their images."""
    assert parts.prompts is not None
    return parts.images(parts.prompts.select(range(min(CHECKED_PROMPTS, len(parts.prompts)))))


def check_on_policy(
    prompts: Prompts,
    config: PPOConfig,
    *,
    model: ActorCritic,
    engine: RolloutEngine,
    sampling: Sampling,
    fresh_reference: ReferencePolicy | None,
) -> str | None:
    """Check the ratio of the first update, and its KL to a fresh reference.

    The sampler's logprobs must be the learner's (ratio 1), and the reference's too (KL 0).

    Args:
        fresh_reference: reference with the weights of the policy; None skips its check.

    Returns:
        A sentence on how far a quantized sampler is from the policy; None for other samplers.

    Raises:
        RuntimeError: names the check that fails, and by how much, or why nothing was generated.
    """
    try:
        with random_state_restored():
            rollout = engine.generate(prompts.token_ids, sampling.shortened(CHECKED_TOKENS))
    except (RolloutError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model may fail in any way with a cache
        raise RuntimeError(
            f"self-check: {type(engine).__name__} cannot generate with "
            f"{type(model.causal_lm).__name__}: {type(error).__name__}: {error}"
        ) from error
    batch = Batch.of(prompts.token_ids, rollout.tokens, model.device)
    logprobs = model.evaluate(batch, **config.softmax).logprobs
    tolerance = rounding_tolerance(model, batch) / min(1.0, config.temperature)
    # Sampler and learner pad differently, so they agree only up to rounding errors.
    sampled = torch.cat(_sampled_logprobs(rollout)).to(model.device)
    if rollout.logprobs is None and sampling.is_restricted:
        sampled = sampled.minimum(logprobs)  # top-k and top-p raise them by an unknown amount
    note = None
    mean = (sampled - logprobs).abs().mean().item()
    if engine.is_quantized and mean <= QUANTIZED_TOLERANCE:
        note = (
            f"the sampler is quantized: its logprobs differ by {mean:.2g} nats on "
            "average from those of the policy. The importance weights correct for it while "
            "mismatch/effective_sample_size stays near 1"
        )
    else:
        _compare("the sampler's logprobs", sampled, logprobs, tolerance)
    if fresh_reference is not None:
        ref_logprobs = fresh_reference.logprobs([batch], **config.softmax)
        _compare("the fresh reference's logprobs", ref_logprobs, logprobs, tolerance)
    return note


def _sampled_logprobs(rollout: Rollout) -> list[Tensor]:
    """Return the engine's logprobs under the whole softmax, or else under top-k and top-p."""
    sampled = rollout.logprobs if rollout.logprobs is not None else rollout.sampler_logprobs
    if sampled is None:
        raise RuntimeError(
            "self-check: the rollout engine returned no logprobs to compare with the policy's: its "
            "generate must fill Rollout.sampler_logprobs"
        )
    return sampled


def _compare(what: str, theirs: Tensor, ours: Tensor, tolerance: float) -> None:
    worst = (theirs - ours).abs().max().item() if ours.numel() else 0.0
    if not worst <= tolerance:
        raise RuntimeError(
            f"self-check: {what} differ from the policy's by up to {worst:.3g} nats (tolerance "
            f"{tolerance:.3g}), so the first update would not be on-policy. Check dropout, "
            "position ids under padding, attention in both directions over the prompt "
            "(PaliGemma), the logit transform, and the model of the reference."
        )


def odd_options(config: PPOConfig) -> list[str]:
    """Return warnings about options that are valid but probably mistakes."""
    sentences = []
    if config.warmup_steps > config.optimizer_steps:
        sentences.append(
            f"warmup_steps={config.warmup_steps}: the run has {config.optimizer_steps} optimizer "
            "steps and ends before its peak learning rate"
        )
    needs_values = config.advantage not in CRITIC_FREE and "advantage" not in config.user_functions
    if needs_values and not config.fits_value_head and not config.is_used("vf_coef"):
        sentences.append(
            f"vf_coef=0: the value function that advantage={config.advantage} uses is not trained; "
            "GRPO and RLOO need none: advantage=group, advantage=rloo"
        )
    if config.top_k > 0 or config.top_p < 1:
        sentences.append(
            "top_k and top_p exclude tokens, and no importance weight corrects for that: "
            "mismatch/excluded_mass is the excluded share of the policy's probability"
        )
    return sentences
