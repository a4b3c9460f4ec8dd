"""Summary of a run, for `fastppo check` and at the start of `fastppo train`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastppo.data.prompts import Prompts
from fastppo.functional.scalars import counted
from fastppo.models.device import device_name
from fastppo.models.pretrained import model_config
from fastppo.ppo.algorithm import PPO
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.setup.algorithm_line import algorithm_line
from fastppo.ppo.setup.checks import odd_options
from fastppo.ppo.setup.dry_run import MADE_UP
from fastppo.ppo.setup.preflight import RunInputs, replaced_prompts
from fastppo.run.directory import holds_run
from fastppo.run.options import unused

EXCERPT = 300
"""Longest text in full, in characters."""


def show(config: PPOConfig, inputs: RunInputs, console: Console) -> None:
    """Print the run of `fastppo train`."""
    table = Table.grid(padding=(0, 2))
    for name, text in _lines(config, inputs):
        table.add_row(name, Text(text, overflow="fold"))
    console.print(table)


def _lines(config: PPOConfig, inputs: RunInputs) -> list[tuple[str, str]]:
    """Return (name, text) of each line."""
    architecture = ", ".join(model_config(config.model).architectures or ["unknown"])
    lines = [
        ("model", f"{config.model}, {architecture}"),
        ("prompts", _data(config.prompts, inputs.prompts, config.prompt_column)),
    ]
    if config.eval_prompts:
        held_out = _data(config.eval_prompts, inputs.held_out, config.prompt_column)
        lines.append(
            ("held out", f"{held_out}; every {counted(config.eval_interval, 'iteration')}")
        )
    weights = config.reward_weights or [1.0] * len(config.rewards)
    for spec, weight in zip(config.rewards, weights, strict=False):
        lines.append(("reward", spec if weight == 1 else f"{weight:g} × {spec}"))
    if config.reward_ensemble:
        lines.append(("ensemble", ", ".join(config.reward_ensemble)))
    lines += [("monitored", spec) for spec in config.monitor_rewards]
    if config.environment:
        lines.append(
            ("environment", f"{config.environment}, at most {counted(config.max_turns, 'turn')}")
        )
        ends = " or ".join(["a stop token", *map(repr, config.stop_strings)])
        lines.append(
            (
                "a turn",
                f"ends at {ends}; cut off at {counted(config.max_new_tokens, 'token')}, it ends "
                "the episode",
            )
        )
    if inputs.first_turn is not None:
        turn = inputs.first_turn
        lines += [
            ("an episode", f"begins with {counted(turn.tokens, 'token')}: {_excerpt(turn.text)}"),
            ("", f"{MADE_UP!r} is answered by {_excerpt(turn.answer) or 'the end'}"),
        ]
    lines += [("warning", sentence) for sentence in replaced_prompts(config, inputs)]
    asked = counted(config.prompts_per_iteration, "prompt")
    count = len(inputs.prompts or ())
    if 0 < count < config.prompts_per_iteration:
        asked = f"{counted(count, 'prompt')}, with repetition"
    responses = config.iterations * config.rollout_batch_size
    turns = config.max_turns if config.environment else 1
    longest = f"{turns} turns of {config.max_new_tokens}" if turns > 1 else config.max_new_tokens
    lines += [
        ("trained by", algorithm_line(config)),
        (
            "an iteration",
            f"{counted(config.rollout_batch_size, 'response')} of at most {longest} tokens to "
            f"{asked}; {counted(config.steps_per_iteration, 'optimizer step')}",
        ),
        (
            "the run",
            f"{counted(config.iterations, 'iteration')}, "
            f"{counted(config.optimizer_steps, 'optimizer step')}, "
            f"at most {responses * turns * config.max_new_tokens:,} generated tokens",
        ),
        ("written to", config.output_dir),
    ]
    if holds_run(config.output_dir) and not config.resume:
        lines.append(("", "it holds a run already: resume it, or choose another --output_dir"))
    lines += [("warning", sentence) for sentence in [*unused(config), *odd_options(config)]]
    default = PPOConfig().to_dict()
    shown = ("model", "prompts", "eval_prompts", "rewards", "output_dir")
    changed = [
        f"{name}={value}"
        for name, value in config.to_dict().items()
        if value != default[name] and name not in shown
    ]
    if changed:
        lines.append(("not by default", ", ".join(changed)))
    return lines


def _excerpt(text: str) -> str:
    """Return the repr of a text, without the middle of a long one; "" for an empty text."""
    if len(text) > EXCERPT:
        text = f"{text[: EXCERPT // 2]} … {text[-EXCERPT // 2 :]}"
    return repr(text) if text else ""


def _data(source: str, prompts: Prompts | None, column: str) -> str:
    """Describe a file of prompts by its rows and columns."""
    columns = ", ".join([column, *(prompts.columns if prompts else ())])
    return f"{source}, {counted(len(prompts or ()), 'row')} with {columns}"


def banner(ppo: PPO) -> list[str]:
    """Return the lines to print before the first iteration."""
    config = ppo.config
    parts = ppo.parts
    parameters = [*ppo.model.parameters()]
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    device = device_name(parts.device)
    if ppo.world.size > 1:
        device = f"{ppo.world.size} processes, each on {device}"
    name = config.model or type(ppo.model.causal_lm).__name__
    prompts = f"{len(parts.prompts or ())} of {config.prompts or 'those that were passed in'}"
    if parts.held_out is not None:
        prompts += f"; {len(parts.held_out)} held out, of {config.eval_prompts}"
    paid = [term.name for term in parts.scorer.terms]
    if parts.episode_runner.has_rewards:
        paid.append(f"environment {parts.episode_runner.name}")
    rewards = ", ".join(paid) or "none: the KL to the reference alone"
    if parts.scorer.monitors:
        rewards += "; monitored: " + ", ".join(term.name for term in parts.scorer.monitors)
    first = ppo.state.iteration + 1
    turns = parts.episode_runner.max_turns
    longest = f"{turns} turns of {config.max_new_tokens}" if turns > 1 else config.max_new_tokens
    left = f"iterations {first} to {config.iterations}"
    responses = counted(config.rollout_batch_size, "response")
    if first > config.iterations:
        left = f"all {config.iterations} iterations are done"
    return [
        f"device   {device}, precision {config.precision}",
        f"model    {name}: {count:,} parameters with the value function, {trained:,} trained",
        f"prompts  {prompts}",
        f"rewards  {rewards}",
        f"trains   by {algorithm_line(config)}",
        f"run      {left}, {responses} of at most {longest} tokens each",
        f"writes   {config.output_dir}",
    ]
