"""Checks that a command's inputs exist and fit together, from names, first rows and definitions
alone, before torch is imported and before anything is loaded, downloaded or run. What only loading
can tell (that weights are complete, that prompts fit the context) is checked later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastppo.data.rows import (
    JSONL,
    DataError,
    check_prompt_column,
    check_source,
    column_names,
    read_jsonl,
)
from fastppo.data.shards import shards_of
from fastppo.environments.agents import SCHEME
from fastppo.functional import scalars
from fastppo.models.kinds import check_causal_lm, check_reward_model
from fastppo.models.names import (
    check_device_name,
    check_model_name,
    context_of,
    is_checkpoint,
    read_config,
)
from fastppo.ppo.setup.model_files import check_model_files
from fastppo.ppo.setup.processes import check_context, check_processes
from fastppo.rewards.addresses import is_address
from fastppo.rewards.loading import FUNCTION, URL, match_function
from fastppo.rewards.reading import (
    check_agent,
    check_methods,
    find_definition,
    read_methods,
    read_signature,
)
from fastppo.rewards.reward import check_signature
from fastppo.run.directory import check_no_run


def check_train(config: Any) -> None:
    """Of `fastppo train`; every check here raises ValueError with the option's name."""
    check_prompts(config)
    if config.ptx_data:
        check_source(config.ptx_data)
    for option in ("prompt_order", "prompt_weights"):
        spec = getattr(config, option)
        match = FUNCTION.match(spec)
        if match is not None and match["where"].endswith(".py"):
            find_definition(match["where"], match["name"], option)
    if not config.resume:
        check_no_run(config.output_dir)
    check_packages(config)
    check_device_name(config.device)
    check_models(config)  # late: a name may be asked of the hub
    check_model_files(config)


def check_packages(config: Any) -> None:
    """Raises ImportError for a package that an option needs and that is not installed."""
    needed = {
        "rollout=vllm needs vllm": config.rollout == "vllm",
        "lora_rank > 0 needs peft": config.lora_rank > 0,
        f"quantization={config.quantization} needs bitsandbytes": config.quantization != "none",
        "report_to=wandb needs wandb": "wandb" in config.report_to,
    }
    for sentence, is_needed in needed.items():
        package = sentence.rpartition(" ")[2]
        if is_needed and package not in sys.modules and find_spec(package) is None:
            extra = '-e ".[vllm]"' if package == "vllm" else package
            raise ImportError(f"{sentence}: pip install {extra}")


def check_plan(
    config: Any, *, memory: float | None = None, prompt_tokens: int = 1, processes: int = 1
) -> None:
    """Of `fastppo plan`, which reads the configs of models."""
    scalars.at_least("prompt_tokens", prompt_tokens, 1)
    scalars.at_least("processes", processes, 1)
    if memory is not None:
        scalars.at_least("memory", memory, 0, strictly=True)
    if processes == 1 and config.shard_size not in (None, 1):
        raise ValueError(
            f"shard_size={config.shard_size} shares the weights among several processes: give "
            "their number, --processes"
        )
    shards_of(processes, config.shard_size)
    check_processes(config, processes)
    check_models(config)
    check_context(prompt_tokens, config.max_new_tokens, context_of(config.model))


def check_models(config: Any) -> None:
    """The models of PPO."""
    check_model_name(config.model)
    if config.reference_model:
        check_model_name(config.reference_model, "reference_model")
    if config.critic_model and not config.critic_model.endswith(".safetensors"):
        check_model_name(config.critic_model, "critic_model")


def check_sft(config: Any) -> None:
    """Of `fastppo sft`."""
    check_stage(config)
    check_causal_lm(read_config(config.model), config.model)


def check_stage(config: Any) -> None:
    """Of `fastppo reward`, whose model may be a classifier."""
    check_model_name(config.model)
    check_source(config.data)
    if config.eval_data:
        check_source(config.eval_data)


def check_generate(config: Any) -> None:
    """Of `fastppo generate`."""
    for name in config.models:
        if not is_checkpoint(name):
            check_model_name(name)
            check_causal_lm(read_config(name), name)
    sources = [config.prompts] if config.prompts and not is_address(config.prompts) else []
    check_rewards(config.rewards, sources, config.prompt_column)
    check_environment(config.environment, sources, config.prompt_column)


def check_export(arguments: Sequence[str], *, checkpoint: str, **flags: str) -> None:
    """Of `fastppo export`."""
    if not Path(checkpoint).is_dir():
        raise ValueError(f"{checkpoint} is no checkpoint: expected RUN/checkpoint-NUMBER")


def check_report(arguments: Sequence[str], *, run: str, **flags: str) -> None:
    """Of `fastppo report`."""
    if not Path(run).is_dir():
        raise ValueError(f"{run}: there is no such directory; expected that of a run")


def check_prompts(config: Any) -> None:
    """The prompts, their columns, and the rewards and the environment that read them."""
    sources = [
        source
        for source in (config.prompts, config.eval_prompts)
        if source and not is_address(source)
    ]
    rewards = (*config.rewards, *config.monitor_rewards, *config.reward_ensemble)
    check_rewards(rewards, sources, config.prompt_column)
    check_environment(config.environment, sources, config.prompt_column)


def check_environment(spec: str, sources: Sequence[str], column: str) -> None:
    """An environment or an agent by name, and the prompts whose columns it is given.

    Args:
        column: of the prompt.
    """
    match = FUNCTION.match(spec.removeprefix(SCHEME).partition("?")[0])
    if match is None or not match["where"].endswith(".py"):
        return
    is_agent = spec.startswith(SCHEME)
    kind = "agent" if is_agent else "environment"
    definition = find_definition(match["where"], match["name"], kind)
    signature = read_signature(definition) if is_agent else None
    for source in sources:
        if signature is not None:
            on_columns(source, column, partial(check_agent, signature, source))
        on_columns(source, column, partial(check_methods, read_methods(definition), source))


def check_rewards(specs: Sequence[str], sources: Sequence[str], column: str) -> None:
    """Rewards by name, and the prompts whose columns they are given.

    Args:
        column: of the prompt.
    """
    for source in sources:
        check_source(source)
        on_columns(source, column, lambda columns: None)
    for spec in specs:
        match = match_function(spec)
        if match is None:
            if not URL.match(spec):
                check_model_name(spec, "reward")
                check_reward_model(read_config(spec), spec)
        elif match["where"].endswith(".py"):
            name = match["name"]
            signature = read_signature(find_definition(match["where"], name, "reward"))
            if signature is not None:
                for source in sources:
                    on_columns(source, column, partial(check_signature, name, signature, source))


def on_columns(source: str, column: str, check: Callable[[Sequence[str]], None]) -> None:
    """Calls a check with the columns of a JSONL file, beside that of the prompt: those of its first
    row and, where these do not do, of all.

    Raises:
        DataError: there is no row, or it has no prompt. What the check raises passes through.
    """
    path = Path(source)
    if path.suffix not in JSONL:
        return
    first = next(read_jsonl(path), None)
    if first is None:
        raise DataError(f"{source}: the dataset is empty")
    check_prompt_column(first, column, source)
    try:
        check(column_names([first], column))
    except ValueError:
        check(column_names(read_jsonl(path), column))
