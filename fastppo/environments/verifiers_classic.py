"""Environments of verifiers (its classic API, `load_environment`, up to version 0.3).

prompts: verifiers:my-env?difficulty=hard
environment: verifiers:my-env?difficulty=hard

An episode is the environment's own `rollout`, which asks the policy at a URL
(`fastppo.environments.agents`), with the prompts, stop conditions and rubric of `vf-eval`. A
response that the trainer cuts off, at its tokens or turns, is not scored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.utils.env_utils import load_environment as load_by_name

from fastppo.data.rows import Rows
from fastppo.rewards.addresses import Address


@functools.cache
def _loaded(target: str) -> Any:
    """The environment of an address; the prompts and all episodes share it."""
    address = Address.of(target)
    return load_by_name(address.name, **address.options)


def load_prompts(address: Address) -> Rows:
    """The environment's dataset; `prompt` is messages."""
    return load_by_name(address.name, **address.options).get_dataset().to_list()


def load_environment(target: str) -> Callable[..., Any]:
    """What plays an episode of the environment, an agent of `fastppo.environments.agents`."""
    environment = _loaded(target)

    async def play(base_url: str, api_key: str, prompt: Any, **columns: Any) -> float:
        given = {name: value for name, value in columns.items() if value is not None}
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as policy:
            state = await environment.rollout(
                {"prompt": prompt, **given}, client=Policy(policy), model="policy", sampling_args={}
            )
        if state["error"] is not None:
            raise RuntimeError(repr(state["error"].__cause__ or state["error"]))
        if any(step["is_truncated"] for step in state["trajectory"]):
            return 0.0
        await environment.rubric.score_rollout(state)
        return float(state["reward"])

    return play


class Policy(OpenAIChatCompletionsClient):
    """The policy, which is shown no tools."""

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **more: Any
    ) -> Any:
        return await super().get_response(prompt, model, sampling_args, None, **more)
