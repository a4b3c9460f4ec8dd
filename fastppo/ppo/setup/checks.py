"""Checks before a run: that the first update will be on-policy, and that no option looks like a
mistake."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastppo.data.batch import Batch
from fastppo.data.prompts import Prompts
from fastppo.models.device import busy_cpu
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.reference_policy import ReferencePolicy
from fastppo.ppo.evaluation import random_state_restored
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.out_of_memory import explain_out_of_memory
from fastppo.rollout import Rollout, RolloutEngine, Sampling

CHECKED_PROMPTS = 4
CHECKED_TOKENS = 8
"""Tokens of each response: enough for a wrong position or cache to show."""

FULL_TOLERANCE = 1e-3
"""Nats, where products are formed in fp32: rounding of 2⁻²³ a step, summed over the layers."""
LEAST_TOLERANCE = 0.1
"""Nats, under bf16, where logits are small: the rounding of the layers below the head."""
LOGIT_STEPS = 4 * 2**-8
"""Share of the largest logit, under bf16: a logit is rounded to 2⁻⁹ of itself, and the hidden
states that it is made of have been several times. Logits of 16 to 32 are an eighth apart."""


def self_check(trainer: Any) -> None:
    """Check that the first update is on-policy, and warn about options that are probably mistakes.

    Raises:
        RuntimeError: the first update would not be on-policy.
    """
    fresh_reference = trainer.reference
    if trainer.state.optimizer_step or (fresh_reference is not None and fresh_reference.is_given):
        fresh_reference = None
    with explain_out_of_memory("the self-check", trainer.config):
        check_on_policy(
            trainer.prompts,
            trainer.config,
            model=trainer.model,
            engine=trainer.engine,
            sampling=trainer.sampling,
            fresh_reference=fresh_reference,
        )
    for sentence in [*odd_options(trainer.config), *busy_cpu(trainer.device)]:
        trainer.say(sentence, "yellow")


def check_on_policy(
    prompts: Prompts,
    config: PPOConfig,
    *,
    model: ActorCritic,
    engine: RolloutEngine,
    sampling: Sampling,
    fresh_reference: ReferencePolicy | None,
) -> None:
    """Before the first step: the sampler's logprobs are the learner's, and KL to a fresh reference
    is 0. Otherwise the ratio of the first update would not be 1.

    Args:
        fresh_reference: a reference that is the policy as it is now; None where there is none.

    Raises:
        RuntimeError: says which of the two fails, and by how much.
    """
    few = prompts.select(range(min(CHECKED_PROMPTS, len(prompts))))
    with random_state_restored():
        rollout = engine.generate(few.token_ids, sampling.shortened(CHECKED_TOKENS))
    batch = Batch.of(few.token_ids, rollout.tokens, model.device)
    logprobs = model.evaluate(batch, **config.softmax).logprobs
    tolerance = rounding_tolerance(model, batch) / min(1.0, config.temperature)
    # Sampler and learner run the same weights with other paddings, so they agree to rounding.
    sampled = torch.cat(_sampled_logprobs(rollout)).to(model.device)
    if rollout.logprobs is None and sampling.is_restricted:
        sampled = sampled.minimum(logprobs)  # the restriction raises them by an unknown amount
    _compare("the sampler's logprobs", sampled, logprobs, tolerance)
    if fresh_reference is not None:
        ref_logprobs = fresh_reference.logprobs([batch], **config.softmax)
        _compare("the fresh reference's logprobs", ref_logprobs, logprobs, tolerance)


def _sampled_logprobs(rollout: Rollout) -> list[Tensor]:
    """The engine's logprobs under the whole softmax, or else under what it drew from."""
    sampled = rollout.logprobs if rollout.logprobs is not None else rollout.sampler_logprobs
    if sampled is None:
        raise RuntimeError(
            "self-check: the rollout engine gives no sampler_logprobs, so nothing says whether it "
            "samples from the policy"
        )
    return sampled


@torch.no_grad()
def rounding_tolerance(model: LanguageModel, batch: Batch) -> float:
    """Nats at temperature 1 by which two ways to the logprobs of a batch may differ."""
    if model.is_full_precision:
        return FULL_TOLERANCE
    with model.autocast():
        logits = model.head.logits(model.hidden(batch.layout())).abs()
    largest = logits[logits.isfinite()].amax().item() if logits.numel() else 0.0
    return max(LEAST_TOLERANCE, LOGIT_STEPS * largest)


def _compare(what: str, theirs: Tensor, ours: Tensor, tolerance: float) -> None:
    worst = (theirs - ours).abs().max().item() if ours.numel() else 0.0
    if not worst <= tolerance:
        raise RuntimeError(
            f"self-check: {what} differ from the policy's by up to {worst:.3g} nats (tolerance "
            f"{tolerance:.3g}), so the first update would not be on-policy. Look for dropout, "
            f"position ids under padding, a logit transform, or another model as the reference."
        )


def odd_options(config: PPOConfig) -> list[str]:
    """Sentences on options that are legal but probably unintended."""
    sentences = []
    if config.warmup_steps > config.optimizer_steps:
        sentences.append(
            f"warmup_steps={config.warmup_steps}: the run has {config.optimizer_steps} optimiser "
            "steps and ends before its peak learning rate"
        )
    if config.top_k > 0 or config.top_p < 1:
        sentences.append(
            "top_k and top_p keep tokens from being drawn, and no importance weight brings them "
            "back: mismatch/excluded_mass is the share of the policy's probability that is never "
            "seen"
        )
    return sentences
