"""OpenEnv servers as environments.

environment: openenv:http://localhost:8000

Each response of a batch has its own session. A turn of the policy is an action: the text of the
action's one required field if that is a string (`?action=field` names another), otherwise the
action as JSON. The policy reads the observation's one text field (`?observation=field`), or all
fields as JSON. An invalid action is answered with the error. For typed clients and other formats,
create the environment in a file:

    from fastppo.environments.openenv import OpenEnv
    from my_env import MyAction, MyEnv

    def environment():
        client = MyEnv(base_url="http://localhost:8000")
        return OpenEnv(client, action=MyAction.parse, observation=lambda seen: seen.board)
"""

from __future__ import annotations

import asyncio
import functools
import json
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastppo.data.datasets import DataError
from fastppo.environments.maker import success_in
from fastppo.environments.pool import as_opening
from fastppo.plugins.adapters import Adapter, Address

if TYPE_CHECKING:
    from openenv.core import EnvClient

CONNECTIONS = 3
"""Attempts to start an episode on a server that is unreachable or has no free session."""
PAUSE = 2.0
"""Seconds before the second attempt. The pause doubles with each attempt."""
SCHEMA_TIMEOUT = 10.0
"""Seconds to wait for a server's schema."""
INVALID_ACTION = "(code: VALIDATION_ERROR)"
"""End of the client's error for an action with wrong fields or types."""
NO_FREE_SESSION = "(code: CAPACITY_REACHED)"
"""End of the client's error at the server's limit of sessions."""
EMPTY = '""'
"""Observation for an empty text, which has no tokens."""
NOT_OBSERVED = ("done", "reward", "metadata")
"""Fields of an observation that the policy does not read."""


def load_environment(target: str) -> Callable[[], OpenEnv]:
    """Return a function that creates sessions of a server.

    Raises:
        DataError: the server does not answer, or there are unknown options.
    """
    from openenv.core import GenericEnvClient

    url, options = Address.of(target)
    unknown = options.keys() - {"action", "observation"}
    if unknown:
        raise DataError(f"expected the options action and observation, got {', '.join(unknown)}")
    action = options.get("action") or _text_field(_schema(url)["action"])
    observation = options.get("observation")

    def make() -> OpenEnv:
        return OpenEnv(
            GenericEnvClient(base_url=url),
            action=_as_action if action is None else lambda text: {action: text},
            observation=functools.partial(_read, field=observation),
        )

    make.__name__ = "openenv"
    return make


class OpenEnv:
    """A session of an OpenEnv server.

    Args:
        client: client of the server. Each environment needs its own.
        action: converts the policy's text to an action. Raises ValueError for an invalid text.
        observation: converts an observation to a text or chat messages.
    """

    def __init__(
        self,
        client: EnvClient[Any, Any, Any],
        *,
        action: Callable[[str], Any],
        observation: Callable[[Any], Any],
    ) -> None:
        self.client = client
        self.action = action
        self.observation = observation

    async def reset(self, prompt: Any, seed: int | None = None) -> Any:
        """Start an episode, with retries while the server is unreachable.

        Returns:
            the first observation, or None for the prompt if the server returns no text.
        """
        options = {} if seed is None else {"seed": seed}
        for attempt in range(CONNECTIONS):
            try:
                result = await self.client.reset(**options)
                text = self.observation(result.observation) or None
                return as_opening(text, prompt) if isinstance(text, str) else text
            except (OSError, RuntimeError, asyncio.TimeoutError) as error:  # noqa: UP041 - 3.10's own
                await self.client.disconnect()
                if attempt + 1 == CONNECTIONS:
                    if NO_FREE_SESSION in str(error):
                        limit = "its max_concurrent_envs must be at least rollout_batch_size"
                        raise RuntimeError(f"{error}: {limit}") from error
                    raise
                await asyncio.sleep(PAUSE * 2**attempt)
        raise AssertionError

    async def step(self, text: str) -> tuple[Any, float, bool, dict[str, Any]]:
        """Send the policy's turn. A lost connection raises; an invalid action does not."""
        try:
            action = self.action(text)
        except (ValueError, RecursionError) as error:  # of JSON that is nested too deep
            return _error_answer(error)
        try:
            result = await self.client.step(action)
        except RuntimeError as error:
            if INVALID_ACTION not in str(error):
                raise
            return _error_answer(error)
        observation = self.observation(result.observation)
        reward = float(result.reward or 0.0)
        shown = EMPTY if observation == "" else observation
        info: dict[str, Any] = {"invalid": False}
        success = success_in(getattr(result, "metadata", None))  # older results have none
        if result.done and success is not None:
            info["success"] = success
        return shown, reward, bool(result.done), info

    async def state(self) -> Any:
        """Return the server's state of the episode."""
        return await self.client.state()

    async def close(self) -> None:
        """End the session."""
        await self.client.close()


def _schema(url: str) -> dict[str, Any]:
    address = f"{url.rstrip('/')}/schema"
    try:
        with urllib.request.urlopen(address, timeout=SCHEMA_TIMEOUT) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise DataError(f"no OpenEnv server answers at {address}: {error}") from error


def _text_field(schema: dict[str, Any]) -> str | None:
    """Return the one required field if it is a string, else None."""
    required = [name for name in schema.get("required", ()) if name != "metadata"]
    if len(required) == 1 and schema["properties"][required[0]].get("type") == "string":
        return required[0]
    return None


def _as_action(text: str) -> dict[str, Any]:
    """Parse an action written as JSON."""
    action = json.loads(text)
    if not isinstance(action, dict):
        raise ValueError(f"expected a JSON object, got {text}")
    return action


def _error_answer(error: Exception) -> tuple[str, float, bool, dict[str, Any]]:
    """Answer an invalid action with its error."""
    answer = json.dumps({"error": f"no action: {error}"}, ensure_ascii=False)
    return answer, 0.0, False, {"invalid": True}


def _read(observation: dict[str, Any], field: str | None) -> Any:
    """Convert an observation to the policy's text."""
    if field is not None:
        return observation[field]
    parts = {name: value for name, value in observation.items() if name not in NOT_OBSERVED}
    texts = [value for value in parts.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else json.dumps(parts, ensure_ascii=False)


ADAPTER = Adapter(requirement="openenv", environment=load_environment)
