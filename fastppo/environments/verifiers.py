"""Environments of verifiers 0.4 (`verifiers.v1`): tasksets with their harnesses.

prompts: verifiers:my-taskset?taskset.split=train&size=1000
environment: verifiers:my-taskset?agent.harness.id=null&agent.runtime.type=subprocess

The options are the keys of `[env]` in a verifiers config, and for prompts also `size`, the number
of tasks. An episode is the environment's own `run_episode`. Its harness calls the policy at a URL
(`fastppo.environments.agents`), and the reward is that of its trace.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

from fastppo.data.datasets import DataError, Rows
from fastppo.environments.agents import Agent
from fastppo.plugins.adapters import Adapter, Address


def load_prompts(target: str) -> Rows:
    """Return the environment's tasks as rows with a `prompt` and a column `task`."""
    from verifiers.v1.utils.loaders import load_environment as environment_of

    name, options = Address.of(target)
    size = options.pop("size", None)
    tasks = environment_of(_config(Address(name, options))).taskset
    if size is not None:
        tasks = tasks.take(size)
    if not tasks.bounded:
        raise DataError(f"the tasks of {name} have no end: add size=…")
    return [_row(task.data) for task in tasks]


def load_environment(target: str) -> Agent:
    """Return an agent that runs an episode."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.utils.loaders import load_environment as environment_of

    config = _config(Address.of(target))
    environment_of(config)  # raises for an invalid config before the first rollout

    async def run_episode(base_url: str, api_key: str, task: dict[str, Any]) -> float:
        environment = environment_of(config)
        kind = type(environment.taskset).task_type()
        data = kind.data_type().model_validate(task)
        key = f"FASTPPO_API_KEY_{secrets.token_hex(8)}"  # the client reads its key from a variable
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

    run_episode.__name__ = "verifiers"
    return Agent(run_episode)


def _config(address: Address) -> Any:
    """Build an environment's config from options such as `agent.harness.id`."""
    from pydantic import ValidationError
    from verifiers.v1.utils.loaders import resolve_env_config

    config: dict[str, Any] = {"taskset": {"id": address.name}}
    for name, value in address.options.items():
        *tables, key = name.split(".")
        table = config
        for part in tables:
            table = table.setdefault(part, {})
        table[key] = "null" if value is None else value  # YAML's null is the name of a harness
    try:
        return resolve_env_config(config)
    except ValidationError as error:
        hint = "options are the keys of [env]; those of its taskset are taskset.NAME"
        raise ValueError(f"{error}\n{hint}") from error


def _row(data: Any) -> dict[str, Any]:
    """Convert a task to a row."""
    prompt = [{"role": "user", "content": data.prompt_text or str(data.idx)}]
    if data.system_prompt is not None:
        prompt.insert(0, {"role": "system", "content": data.system_prompt})
    return {"prompt": prompt, "task": data.model_dump(mode="json")}


ADAPTER = Adapter(requirement="verifiers", prompts=load_prompts, environment=load_environment)
