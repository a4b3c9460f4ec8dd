"""Environments of verifiers from 0.4 on (`verifiers.v1`): tasksets with their harnesses.

prompts: verifiers:my-taskset?taskset.split=train&size=1000
environment: verifiers:my-taskset?agent.harness.id=null&agent.runtime.type=subprocess

The options are the keys of `[env]` in a config of verifiers, but for `size`, of prompts: so many
tasks, the first. An episode is the environment's own `run_episode`: its harness asks the policy at
a URL (`fastppo.environments.agents`), and what it is paid is the reward of its trace.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.utils.loaders import load_environment as environment_of
from verifiers.v1.utils.loaders import resolve_env_config

from fastppo.data.rows import DataError, Rows
from fastppo.rewards.addresses import Address


def load_prompts(address: Address) -> Rows:
    """The environment's tasks: what the policy is asked, and the column `task` with the rest."""
    options = dict(address.options)
    size = options.pop("size", None)
    tasks = environment_of(_config(Address(address.name, options))).taskset
    if size is not None:
        tasks = tasks.take(size)
    if not tasks.bounded:
        raise DataError(f"the tasks of {address.name} have no end: add size=…")
    return [_row(task.data) for task in tasks]


def load_environment(target: str) -> Callable[..., Any]:
    """What plays an episode of the environment, an agent of `fastppo.environments.agents`."""
    config = _config(Address.of(target))
    environment_of(config)  # what it cannot be made of is known before a rollout

    async def play(base_url: str, api_key: str, task: dict[str, Any]) -> float:
        environment = environment_of(config)
        kind = type(environment.taskset).task_type()
        data = kind.data_type().model_validate(task)
        key = f"FASTPPO_API_KEY_{secrets.token_hex(8)}"  # a client reads its key from a variable
        client = EvalClientConfig(base_url=base_url, api_key_var=key)
        os.environ[key] = api_key
        try:
            async with environment.serving():
                episode = await environment.run_episode(
                    kind(data, config.taskset.task), ModelContext(model="policy", client=client)
                )
        finally:
            del os.environ[key]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
        return sum(trace.reward for trace in episode.traces if trace.agent.config.client == client)

    play.__name__ = "verifiers"
    return play


def _config(address: Address) -> Any:
    """An environment's config, of options `agent.harness.id` and the like."""
    config: dict[str, Any] = {"taskset": {"id": address.name}}
    for name, value in address.options.items():
        *tables, key = name.split(".")
        table = config
        for part in tables:
            table = table.setdefault(part, {})
        table[key] = "null" if value is None else value  # the name of a harness
    try:
        return resolve_env_config(config)
    except ValidationError as error:
        hint = "options are the keys of [env]; those of its taskset are taskset.NAME"
        raise ValueError(f"{error}\n{hint}") from error


def _row(data: Any) -> dict[str, Any]:
    """The row of a task, which has it in the form that a server of verifiers takes."""
    prompt = [{"role": "user", "content": data.prompt_text or str(data.idx)}]
    if data.system_prompt is not None:
        prompt.insert(0, {"role": "system", "content": data.system_prompt})
    return {"prompt": prompt, "task": data.model_dump(mode="json")}
