"""`fastppo generate`: show completions of one or several policies with their rewards.

Use it to look at a few completions, not to evaluate at scale. Policies are loaded one after another
and sample with the same seed. Rewards and environments are those of `fastppo train`.
"""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastppo.data.chat import decode_completions
from fastppo.data.datasets import Rows
from fastppo.data.images import have_images
from fastppo.data.prompts import encode_prompts
from fastppo.environments.episodes import POLICY
from fastppo.environments.loading import load_environment
from fastppo.environments.turns import Turns
from fastppo.functional.scalars import counted
from fastppo.generate_options import GenerateConfig
from fastppo.models.device import choose_device
from fastppo.models.multimodal import is_multimodal
from fastppo.models.policy import LanguageModel
from fastppo.models.pretrained import (
    is_checkpoint,
    load_causal_lm,
    load_tokenizer,
    pad_token_id,
    stop_token_ids,
)
from fastppo.plugins.adapters import load_prompts
from fastppo.plugins.loading import Plugin
from fastppo.ppo.checkpoints import policy_of
from fastppo.rewards.loading import make_terms
from fastppo.rewards.reward import RewardTerm, Samples, Scored, score
from fastppo.rollout import FINISHED, OUT_OF_TURNS, TRUNCATED, RolloutEngine, Sampling
from fastppo.rollout.agreement import difference
from fastppo.rollout.engines import make_engine
from fastppo.rollout.one_turn import OneTurn
from fastppo.run.log import short_names

BATCH_SIZE = 32
"""Number of sequences per batch, in generation and in reward models."""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Pattern of control characters except tab and newline, and of marks of writing direction."""


@dataclass(slots=True)
class Completions:
    """Completions of one policy: `num_samples` consecutive ones per prompt."""

    name: str
    texts: list[str]
    token_ids: list[list[int]]
    """Tokens of each completion, with EOS and the environment's tokens."""
    finish_reasons: list[str]
    """Finish reason of each completion: `stop`, `length` or `turns`."""
    rewards: dict[str, Scored] = field(default_factory=dict)
    """Rewards of each completion by name; `environment` is the environment's."""
    turns: list[list[dict[str, Any]]] | None = None
    """Turns of each completion as in `Rollout.turns`; None without an environment."""


def generate(config: GenerateConfig) -> tuple[Rows, list[Completions]]:
    """Sample from each policy and score the completions.

    Returns:
        The rows of the prompts, and the completions of each policy.

    Raises:
        DataError: a prompt is invalid or too long for a policy's context.
        ValueError: there is no prompt, or a policy or reward cannot be loaded.
        RewardError: a reward or the environment fails.
    """
    if config.prompt is not None:
        rows: Rows = [{config.prompt_column: config.prompt}]
    elif config.prompts is not None:
        rows = load_prompts(config.prompts, config.split)[: config.num_prompts]
    else:
        raise ValueError("expected a prompt or a file of prompts, got neither")
    device = choose_device(config.device)
    environment = load_environment(config.environment)
    rewards = make_terms(config.rewards, device=device, batch_size=BATCH_SIZE)
    policies = [
        _complete(name, directory, rows, config=config, device=device, environment=environment)
        for name, directory in zip(short_names(config.models), config.models, strict=True)
    ]
    for term in rewards:
        for policy in policies:
            policy.rewards[term.name] = _score(term, rows, policy, config)
    return rows, policies


def _complete(
    name: str,
    directory: str,
    rows: Rows,
    *,
    config: GenerateConfig,
    device: torch.device,
    environment: Plugin | None,
) -> Completions:
    """Generate the completions of one policy, over several turns if `environment` is given."""
    policy, tokenizer = _load(directory, config, device)
    engine = _engine(policy, tokenizer)
    context = policy.context or 2**31
    if is_multimodal(policy.config) and have_images(rows, config.prompt_column):
        raise ValueError("prompts: fastppo generate reads no images; transformers' generate does")
    turns: OneTurn | Turns = OneTurn()
    if environment is not None:
        turns = Turns(environment.function, tokenizer, max_turns=config.max_turns, context=context)
    if config.max_new_tokens >= context:
        raise ValueError(
            f"max_new_tokens={config.max_new_tokens} leaves no room for a prompt in the context of "
            f"{name}, {context} tokens"
        )
    prompts = encode_prompts(
        rows,
        tokenizer,
        column=config.prompt_column,
        max_prompt_tokens=context - config.max_new_tokens,
        source=f"{name}: {config.prompts or 'prompt'}",
    )
    prompts = prompts.select([i for i in range(len(prompts)) for _ in range(config.num_samples)])
    torch.manual_seed(config.seed)
    sampling = Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature or 1.0,
        top_k=config.top_k,
        top_p=config.top_p,
        stop_token_ids=stop_token_ids(config.stop_token_ids, tokenizer, policy.causal_lm),
        stop_strings=tuple(config.stop_strings),
        greedy=config.temperature == 0,
    )
    with closing(turns):
        prompts, rollout = turns.run(prompts, engine, sampling)
    completions = Completions(
        name,
        decode_completions(tokenizer, prompts.token_ids, rollout.tokens),
        rollout.tokens,
        rollout.finish_reasons,
        turns=rollout.turns,
    )
    if rollout.rewards is not None and turns.has_rewards:
        completions.rewards["environment"] = Scored([sum(row) for row in rollout.rewards])
    return completions


def _load(
    directory: str, config: GenerateConfig, device: torch.device
) -> tuple[LanguageModel, Any]:
    """Return (policy, tokenizer). A checkpoint keeps the dtype of its run."""
    if is_checkpoint(directory):
        return policy_of(Path(directory), str(device))
    model = load_causal_lm(directory, dtype=getattr(torch, config.param_dtype), device=device)
    return LanguageModel(model), load_tokenizer(directory)


def _engine(policy: LanguageModel, tokenizer: Any) -> RolloutEngine:
    """Return the engine that `fastppo train` would use.

    Raises:
        ValueError: FastPPO does not know the model, or no engine computes what the model computes.
    """
    policy.check_heads()
    pad = pad_token_id(tokenizer, policy.causal_lm)
    engine, note = make_engine("decoder", policy, tokenizer, pad, batch_size=BATCH_SIZE)
    if note is not None and difference(engine, policy) is not None:
        raise ValueError(note)
    return engine


def _score(term: RewardTerm, rows: Rows, policy: Completions, config: GenerateConfig) -> Scored:
    repeated = [row for row in rows for _ in range(config.num_samples)]
    names = dict.fromkeys(key for row in rows for key in row if key != config.prompt_column)
    columns = {name: [row.get(name) for row in repeated] for name in names}
    prompts = [row[config.prompt_column] for row in repeated]
    return score(term, Samples(prompts, policy.texts, columns, policy.token_ids))


# --------------------------------------------------------------------------------------- the table


def show(rows: Rows, policies: list[Completions], config: GenerateConfig, console: Console) -> None:
    """Print a table of the completions and a table of their means."""
    table = Table(show_lines=True)
    if not config.environment:  # the first turn is the prompt
        table.add_column("prompt", overflow="fold", ratio=2)
    for policy in policies:
        table.add_column(Text(policy.name), overflow="fold", ratio=3)
    for i, row in enumerate(rows):
        for k in range(config.num_samples):
            index = i * config.num_samples + k
            cells = [_cell(policy, index) for policy in policies]
            if not config.environment:
                prompt = _prompt_text(row[config.prompt_column]) if k == 0 else Text("")
                cells.insert(0, prompt)
            table.add_row(*cells)
    console.print(table)

    title = counted(len(policies[0].texts), "completion")
    means = Table(title=title + " each" * (len(policies) > 1), title_justify="left")
    means.add_column("mean")
    for policy in policies:
        means.add_column(Text(policy.name), justify="right", overflow="fold")
    count = len(policies[0].texts)
    for name in policies[0].rewards:
        rewards = [policy.rewards[name].mean for policy in policies]
        means.add_row(Text(name), *("–" if mean is None else f"{mean:.3f}" for mean in rewards))
    tokens = [sum(map(len, policy.token_ids)) for policy in policies]
    length = "tokens, including the environment's" if config.environment else "tokens"
    means.add_row(length, *(f"{total / count:.1f}" for total in tokens))
    if config.environment:
        turns = [
            sum(turn["role"] == POLICY for episode in policy.turns or [] for turn in episode)
            for policy in policies
        ]
        means.add_row("turns", *(f"{total / count:.1f}" for total in turns))
    ended = [policy.finish_reasons.count(FINISHED) for policy in policies]
    means.add_row(
        "ended" if config.environment else "ended by EOS",
        *(f"{number / count:.0%}" for number in ended),
    )
    console.print(means)


def _prompt_text(prompt: Any) -> Text:
    if isinstance(prompt, str):
        return _printable(prompt)
    return _printable("\n".join(f"{message['role']}: {message['content']}" for message in prompt))


def _printable(text: str) -> Text:
    """Escape the control characters of a text."""
    return Text(CONTROL.sub(lambda control: repr(control[0])[1:-1], text))


ENDS = {TRUNCATED: " (cut off)", OUT_OF_TURNS: " (out of turns)"}
"""Labels of unfinished completions, by finish reason."""


def _cell(policy: Completions, index: int) -> Text:
    """Format a completion or its turns, its finish reason and its rewards."""
    if policy.turns is None:
        completion = policy.texts[index].strip()
        text = _printable(completion) if completion else Text("(empty)", style="dim italic")
    else:
        text = Text("\n").join(map(_turn, policy.turns[index]))
    text.append(ENDS.get(policy.finish_reasons[index], ""), style="dim italic")
    numbers = "  ".join(
        f"{name} {values[index]:.3f}"
        for name, values in policy.rewards.items()
        if values.or_none[index] is not None
    )
    if numbers:
        text.append(f"\n{numbers}", style="dim")
    return text


def _turn(turn: dict[str, Any]) -> Text:
    """Format the role, text and reward of a turn."""
    style = "bold green" if turn["role"] == POLICY else "bold"
    text = Text.assemble((f"{turn['role']}  ", style), _printable(str(turn["text"]).strip()))
    if "reward" in turn:
        text.append(f"  {turn['reward']:+.3f}", style="dim")
    return text
