"""What is checked before a run, before a step on given responses, and when a step is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from fastppo.data.batch import Batch
from fastppo.data.prompts import Prompts
from fastppo.models.policy import ActorCritic
from fastppo.models.reference_policy import ReferencePolicy
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.experience import Experience
from fastppo.ppo.state import RunState
from fastppo.rollout import FINISHED, TRUNCATED, RolloutEngine, Sampling
from fastppo.run.watch import non_finite_gradients, save_batch

CHECKED_PROMPTS = 4
CHECKED_TOKENS = 8
"""Of each response: enough for a wrong position or cache to show."""


@contextmanager
def random_state_restored(device: torch.device) -> Iterator[None]:
    """Random draws inside leave no trace outside."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def check_on_policy(
    model: ActorCritic,
    reference: ReferencePolicy | None,
    engine: RolloutEngine,
    prompts: Prompts,
    sampling: Sampling,
    config: PPOConfig,
    *,
    reference_is_fresh: bool,
) -> None:
    """Before the first step: the sampler's logprobs are the learner's, and KL to a fresh reference
    is 0. Otherwise the ratio of the first update would not be 1.

    Raises:
        RuntimeError: says which of the two fails, and by how much.
    """
    few = prompts.select(range(min(CHECKED_PROMPTS, len(prompts))))
    with random_state_restored(model.device):
        rollout = engine.generate(few.token_ids, sampling.shortened(CHECKED_TOKENS))
    batch = Batch.of(few.token_ids, rollout.tokens, model.device)
    how = config.softmax
    logprobs = model.evaluate(batch, **how).logprobs
    # Sampler and learner run the same weights with other paddings, so they agree to the
    # rounding of the compute dtype summed over the layers: 2⁻²³ or 2⁻⁸ a step.
    full = model.compute_dtype is None and config.param_dtype == "float32"
    tolerance = 1e-3 if full else 0.1
    sampled = torch.cat(rollout.logprobs).to(model.device)
    _compare("the sampler's logprobs", sampled, logprobs, tolerance)
    if reference is not None and reference_is_fresh and not reference.is_given:
        ref_logprobs = reference.logprobs([batch], **how)
        _compare("the fresh reference's logprobs", ref_logprobs, logprobs, tolerance)


def _compare(what: str, theirs: Tensor, ours: Tensor, tolerance: float) -> None:
    worst = (theirs - ours).abs().max().item() if ours.numel() else 0.0
    if not worst <= tolerance:
        raise RuntimeError(
            f"self-check: {what} differ from the policy's by up to {worst:.3g} nats (tolerance "
            f"{tolerance:g}), so the first update would not be on-policy. Look for dropout, "
            f"position ids under padding, a logit transform, or another model as the reference."
        )


def odd_options(config: PPOConfig) -> list[str]:
    """Sentences on options that can be run and hardly are meant."""
    if config.warmup_steps <= config.optimizer_steps:
        return []
    return [
        f"warmup_steps={config.warmup_steps}: the run has {config.optimizer_steps} optimiser steps "
        "and ends before its peak learning rate"
    ]


def check_responses(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    finish_reasons: Sequence[str],
    vocabulary: int,
    context: int | None,
) -> None:
    """Raises ValueError where responses do not fit their prompts, the context or the vocabulary."""
    if not prompts or len(prompts) != len(responses):
        raise ValueError(
            f"expected as many responses as prompts, at least one, got {len(prompts)} prompts and "
            f"{len(responses)} responses"
        )
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not response:
            raise ValueError(f"response {row} is empty")
        if context is not None and len(prompt) + len(response) > context:
            raise ValueError(
                f"prompt and response {row} have {len(prompt) + len(response)} tokens; the "
                f"model's context has {context}"
            )
        if prompt and not 0 <= min(*prompt, *response) <= max(*prompt, *response) < vocabulary:
            raise ValueError(f"prompt or response {row} has tokens outside [0, {vocabulary})")
    if len(finish_reasons) != len(prompts) or {*finish_reasons} - {FINISHED, TRUNCATED}:
        raise ValueError(
            f"finish_reasons must be {len(prompts)} of {FINISHED} or {TRUNCATED}, "
            f"got {finish_reasons}"
        )


def check_scores(scores: Sequence[float] | Tensor, count: int) -> Tensor:
    """[count] fp32 on the CPU; raises ValueError where there are not as many, or one is not
    finite."""
    total = torch.as_tensor(scores, dtype=torch.float32, device="cpu")
    if total.shape != (count,):
        raise ValueError(f"scores must be [{count}], got {list(total.shape)}")
    if not total.isfinite().all():
        raise ValueError(f"scores must be finite, got {total.tolist()}")
    return total


def skip_step(
    model: ActorCritic,
    minibatch: Experience,
    state: RunState,
    numbers: dict[str, float],
    config: PPOConfig,
) -> str:
    """Counts an optimiser step that is not taken and saves its batch; a sentence about it.

    Args:
        numbers: loss and norms of the gradient, of which one at least is not finite.

    Raises:
        FloatingPointError: too many in a row.
    """
    state.skipped_steps += 1
    state.skipped_in_a_row += 1
    wrong = [name for name, value in numbers.items() if not math.isfinite(value)]
    values = ", ".join(f"{name} {numbers[name]}" for name in wrong)
    saved = save_batch(
        Path(config.output_dir) / "skipped" / f"step-{state.optimizer_step:06d}.safetensors",
        minibatch.tensors(),
        iteration=state.iteration,
        step=state.optimizer_step,
        non_finite="loss" if "loss" in wrong else "grad_norm",
        parameters=non_finite_gradients(model),
    )
    if state.skipped_in_a_row >= config.max_skipped_steps:
        raise FloatingPointError(
            f"{state.skipped_in_a_row} optimiser steps in a row had a non-finite loss or "
            f"gradient, the last one {values} with the batch in {saved}; lower the learning rate, "
            f"or look for inf in the rewards or logits"
        )
    return f"optimiser step {state.optimizer_step}: {values}; skipped, batch in {saved}"
