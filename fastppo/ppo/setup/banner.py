"""The lines that a run prints before its first iteration: model, data, device and run directory."""

from __future__ import annotations

from typing import Any

from fastppo.functional.scalars import counted
from fastppo.models.device import device_name


def banner(trainer: Any) -> list[str]:
    """Lines for the console.

    Args:
        trainer: a `PPOTrainer`.
    """
    config = trainer.config
    parameters = [*trainer.model.parameters()]
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    device = device_name(trainer.device)
    if trainer.world.size > 1:
        device = f"{trainer.world.size} processes, each on {device}"
    name = config.model or type(trainer.model.causal_lm).__name__
    prompts = f"{len(trainer.prompts)} of {config.prompts or 'those that were passed in'}"
    if trainer.evaluation.prompts is not None:
        prompts += f"; {len(trainer.evaluation.prompts)} held out, of {config.eval_prompts}"
    paid = [term.name for term in trainer.scorer.terms]
    if trainer.episode_runner.has_rewards:
        paid.append(f"environment {trainer.episode_runner.name}")
    rewards = ", ".join(paid)
    if trainer.scorer.monitors:
        rewards += "; watched: " + ", ".join(term.name for term in trainer.scorer.monitors)
    first = trainer.state.iteration + 1
    turns = trainer.episode_runner.max_turns
    longest = f"{turns} turns of {config.max_new_tokens}" if turns > 1 else config.max_new_tokens
    left = f"iterations {first} to {config.iterations}"
    responses = counted(config.rollout_batch_size, "response")
    if first > config.iterations:
        left = f"all {config.iterations} iterations are done"
    return [
        f"device   {device}, precision {config.precision}",
        f"model    {name}: {count:,} parameters with its values, {trained:,} trained",
        f"prompts  {prompts}",
        f"rewards  {rewards}",
        f"run      {left}, {responses} of at most {longest} tokens each",
        f"writes   {config.output_dir}",
    ]
