"""Dry run of a config before any model is loaded: the rows are read, the parameters of rewards and
environment are compared with the columns, and each function that an option names is called once.
`fastppo check` does only this and prints what would be run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastppo.data.chat import check_chat_template
from fastppo.data.prompts import check_length, check_prompts
from fastppo.data.rows import Rows, column_names
from fastppo.environments.agents import Agent
from fastppo.environments.loading import load_environment
from fastppo.functional.scalars import counted
from fastppo.models.kinds import (
    check_room,
    count_tokens,
    has_chat_template,
    read_tokenizer,
)
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.prompt_numbers import column_numbers
from fastppo.ppo.setup.model_files import reward_models, shortest_context
from fastppo.rewards.addresses import load_prompts
from fastppo.rewards.calling import CallOptions
from fastppo.rewards.loading import make_terms, match_function
from fastppo.rewards.reading import (
    check_agent,
    check_methods,
    method_signatures,
    signature_of,
)
from fastppo.rewards.reward import RewardTerm, check_signature, try_reward


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """The rows of the prompts and of the held-out prompts."""

    prompts: Rows | None
    held_out: Rows | None


def read_rows(config: PPOConfig, prompts: Rows | None = None) -> PromptRows:
    """The rows that the config names.

    Args:
        prompts: rows that were handed over.

    Raises:
        DataError: they cannot be read.
    """
    if prompts is None and config.prompts:
        prompts = load_prompts(config.prompts, config.split)
    held_out = load_prompts(config.eval_prompts, config.split) if config.eval_prompts else None
    return PromptRows(prompts, held_out)


def check_terms(
    config: PPOConfig,
    rewards: Sequence[RewardTerm],
    environment: RewardTerm | None,
    rows: PromptRows,
) -> None:
    """Checks the prompts, and that rewards and environment can be called with their columns.

    Raises:
        DataError: a prompt cannot be used; a reward needs a column that is not there.
        ValueError: one has no room for what it is given.
    """
    sources = ((rows.prompts, config.prompts), (rows.held_out, config.eval_prompts))
    for prompts, source in sources:
        if prompts is None:
            continue
        check_prompts(prompts, config.prompt_column, source or "prompts")
        columns = column_names(prompts, config.prompt_column)
        for term in rewards:
            signature = signature_of(term.function)
            if signature is not None:
                check_signature(term.name, signature, source or "prompts", columns)
        if environment is None:
            continue
        if isinstance(environment.function, Agent):
            signature = signature_of(environment.function.play)
            if signature is not None:
                check_agent(signature, source or "prompts", columns)
        check_methods(method_signatures(environment.function), source or "prompts", columns)


def check_encoding(config: PPOConfig, rows: PromptRows) -> None:
    """Checks what encoding the prompts would refuse, as far as the files of the models say before
    one is loaded. Chats are not counted: only their template knows what is made of them.

    Raises:
        DataError: a prompt is longer than the context has room for, or a chat whose model, or
            whose reward model, has no chat template.
    """
    room = check_room(shortest_context(config), config.max_new_tokens)
    tokenizer = functools.cache(lambda: read_tokenizer(config.model))
    readers = {"": config.model}
    readers |= {f"reward {spec}: ": spec for spec in reward_models(config)}
    without_template = [who for who, name in readers.items() if not has_chat_template(name)]
    for prompts, source in ((rows.prompts, config.prompts), (rows.held_out, config.eval_prompts)):
        for number, row in enumerate(prompts or (), 1):
            prompt = row[config.prompt_column]
            where = f"{source}, row {number}"
            if not isinstance(prompt, str):
                for who in without_template:
                    check_chat_template(False, f"{who}{where}")
            elif len(prompt.encode()) > room:  # a token is at least a byte
                check_length(count_tokens(tokenizer(), prompt), room, where)


def try_terms(
    config: PPOConfig,
    rewards: Sequence[RewardTerm],
    rows: PromptRows,
    calls: CallOptions,
    failure_file: Path | None = None,
) -> None:
    """Calls each function that an option names once, on the first prompt with a made-up response.
    Models and URLs, and what was handed over in Python, are not called.

    Args:
        failure_file: where the sample is written that one fails on.

    Raises:
        RewardError: one raised, or returned what cannot be trained on.
    """
    for term in rewards:
        if rows.prompts and term.is_named_function:
            try_reward(
                term,
                rows.prompts[0],
                config.prompt_column,
                failure_file=failure_file,
                options=calls,
            )


def preflight(config: PPOConfig) -> PromptRows:
    """Reads the rows, and tries the rewards and the environment; no model is loaded.

    Raises:
        ValueError, RewardError: as `check_terms` and `try_terms`.
    """
    rows = read_rows(config)
    specs = (*config.rewards, *config.monitor_rewards)
    rewards = make_terms([spec for spec in specs if match_function(spec)])
    environment = load_environment(config.environment)
    config.have_effect_only("max_turns", where=environment, needs="environment")
    check_terms(config, rewards, environment, rows)
    check_encoding(config, rows)
    check_curriculum(config, rows)
    try_terms(config, rewards, rows, CallOptions(config.reward_timeout))
    return rows


def check_curriculum(config: PPOConfig, rows: PromptRows) -> None:
    """Raises ValueError where `prompt_order` or `prompt_weights` is a column that is not there, or
    has no numbers."""
    names = column_names(rows.prompts or (), config.prompt_column)
    for option in ("prompt_order", "prompt_weights"):
        spec = getattr(config, option)
        if rows.prompts is not None and spec and (spec in names or ":" not in spec):
            columns = {name: [row.get(name) for row in rows.prompts] for name in names}
            column_numbers(option, spec, columns)


def show(config: PPOConfig, rows: PromptRows, console: Console) -> None:
    """What would be run."""
    table = Table.grid(padding=(0, 2))
    for name, text in _lines(config, rows):
        table.add_row(name, Text(text, overflow="fold"))
    console.print(table)


def _lines(config: PPOConfig, rows: PromptRows) -> list[tuple[str, str]]:
    """(name, text) of each line."""
    lines = [
        ("model", f"{config.model}{_architecture(config.model)}"),
        ("prompts", _data(config.prompts, rows.prompts)),
    ]
    if config.eval_prompts:
        held_out = _data(config.eval_prompts, rows.held_out)
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
            ("environment", f"{config.environment}, {counted(config.max_turns, 'turn')} at most")
        )
    asked = counted(config.prompts_per_iteration, "prompt")
    if 0 < len(rows.prompts or ()) < config.prompts_per_iteration:
        asked = f"{counted(len(rows.prompts or ()), 'prompt')}, with repetition"
    responses = config.iterations * config.rollout_batch_size
    turns = config.max_turns if config.environment else 1
    longest = f"{turns} turns of {config.max_new_tokens}" if turns > 1 else config.max_new_tokens
    lines += [
        (
            "an iteration",
            f"{counted(config.rollout_batch_size, 'response')} of {longest} tokens at most to "
            f"{asked}; {counted(config.steps_per_iteration, 'optimiser step')}",
        ),
        (
            "the run",
            f"{counted(config.iterations, 'iteration')}, "
            f"{counted(config.optimizer_steps, 'optimiser step')}, "
            f"{responses * turns * config.max_new_tokens:,} tokens to draw at most",
        ),
        ("written to", config.output_dir),
    ]
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


def _architecture(name: str) -> str:
    """The architecture that the config.json of a directory names; "" of a hub name."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        config = json.loads((Path(name) / "config.json").read_bytes())
        return f", {config['architectures'][0]}"
    return ""


def _data(source: str, rows: Rows | None) -> str:
    """A file of prompts, and what is in it."""
    columns = list(dict.fromkeys(key for row in rows or () for key in row))
    return f"{source}, {counted(len(rows or ()), 'row')} with {', '.join(columns)}"
