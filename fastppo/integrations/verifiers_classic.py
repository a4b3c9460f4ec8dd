"""Environments of verifiers (its classic API, `load_environment`, up to version 0.3).

prompts: verifiers:my-env?difficulty=hard
environment: verifiers:my-env?difficulty=hard

An episode is the environment's own `rollout`, with the policy in place of its model: its
prompts, tools, stop conditions and rubric are what they are in `vf-eval`. The rubric's reward is
paid at the last turn. A response that the trainer cuts off, at its tokens or turns, is not scored.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.types import Response, ResponseMessage
from verifiers.utils.env_utils import load_environment as load_by_name

from fastppo.data.rows import Rows
from fastppo.integrations.addresses import Address


@functools.cache
def _loaded(target: str) -> Any:
    """The environment of an address; the prompts and all episodes share it."""
    address = Address.of(target)
    return load_by_name(address.name, **address.options)


def load_prompts(address: Address) -> Rows:
    """The environment's dataset; `prompt` is messages."""
    return load_by_name(address.name, **address.options).get_dataset().to_list()


def load_environment(target: str) -> Callable[[], Episodes]:
    """What makes episodes of the environment."""
    return functools.partial(Episodes, _loaded(target))


class Policy(OpenAIChatCompletionsClient):
    """The policy as a model's client: a request for a response waits until the trainer has one."""

    def __init__(self) -> None:
        super().__init__(None)
        self.requests: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        self.responses: asyncio.Queue[str] = asyncio.Queue()

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> Response:
        """The policy's turn after the messages of `prompt`."""
        messages, _ = await self.to_native_prompt(prompt)
        self.requests.put_nowait(messages)
        message = ResponseMessage(
            content=await self.responses.get(), finish_reason="stop", is_truncated=False
        )
        return Response(id="fastppo", created=int(time.time()), model=model, message=message)


class Episodes:
    """Rollouts of an environment of verifiers, one after the other.

    Args:
        environment: of `verifiers.load_environment`.
    """

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.policy: Policy
        self.rollout: asyncio.Task[Any]
        self.messages: list[dict[str, Any]] = []

    async def reset(self, prompt: Any, **columns: Any) -> Any:
        """Begins a rollout of the row; the messages that the policy reads first."""
        await self.close()
        self.policy = Policy()
        given = {name: value for name, value in columns.items() if value is not None}
        self.rollout = asyncio.create_task(
            self.environment.rollout(
                {"prompt": prompt, **given}, client=self.policy, model="fastppo", sampling_args={}
            )
        )
        messages = await self._next_request()
        if messages is None:
            raise RuntimeError(f"the rollout ended before a turn: {self._failure()}")
        self.messages = messages
        return messages

    async def step(self, text: str) -> tuple[Any, float, bool]:
        """The policy's turn: (the environment's messages, 0, False), or at the end of the rollout
        ("", the rubric's reward, True)."""
        self.policy.responses.put_nowait(text)
        messages = await self._next_request()
        if messages is not None:
            known = len(self.messages) + 1  # with the policy's turn
            self.messages = messages
            return messages[known:], 0.0, False
        state = self.rollout.result()
        if state["error"] is not None:
            raise RuntimeError(self._failure())
        await self.environment.rubric.score_rollout(state)
        return "", float(state["reward"]), True

    async def close(self) -> None:
        """Ends a rollout that still waits for a turn."""
        if hasattr(self, "rollout") and not self.rollout.done():
            self.rollout.cancel()
            await asyncio.gather(self.rollout, return_exceptions=True)

    async def _next_request(self) -> list[dict[str, Any]] | None:
        """The conversation of the next turn; None where the rollout is over."""
        request = asyncio.create_task(self.policy.requests.get())
        await asyncio.wait({request, self.rollout}, return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            return request.result()
        request.cancel()
        return None

    def _failure(self) -> str:
        """Why the rollout ended."""
        error = self.rollout.result()["error"]
        return repr(error.__cause__ or error)
