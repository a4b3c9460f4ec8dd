"""Servers of OpenEnv as environments.

environment: openenv:http://localhost:8000

Each response of a batch has a session of its own. A turn of the policy is an action: the text of
its one required field, if that is a string (`?action=field` names another), else the action as
JSON. What the policy reads is the observation's one text field (`?observation=field`), or all of
its fields as JSON. What is no action is answered with why. For typed clients and other forms, make
the environment in a file:

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
from typing import Any

from openenv.core import EnvClient, GenericEnvClient

from fastppo.data.rows import DataError
from fastppo.rewards.addresses import Address, as_opening

CONNECTIONS = 3
"""Attempts to begin an episode on a server that cannot be reached or has no session free."""
PAUSE = 2.0
"""Seconds before the second attempt; twice as long before each further one."""
SCHEMA_TIMEOUT = 10.0
"""Seconds to wait for a server's schema."""
REFUSED = "(code: VALIDATION_ERROR)"
"""How the client's error ends where the server's action has other fields or types."""
FULL = "(code: CAPACITY_REACHED)"
"""How it ends where no session is free."""
NOTHING = '""'
"""What the policy reads of an empty text, which has no tokens of its own."""
SAID_APART = ("done", "reward", "metadata")
"""Fields of an observation that are not for the policy to read."""


def load_environment(target: str) -> Callable[[], OpenEnv]:
    """What makes sessions of the server at an address.

    Raises:
        DataError: the server does not answer, or the schema leaves open what the action is.
    """
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
    """A session of an OpenEnv server, by any of its clients.

    Args:
        client: of the server; each environment needs one of its own.
        action: from the policy's text to an action; raises ValueError for a text that is none.
        observation: from an observation to a text or chat messages.
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
        """Begins an episode; what the policy reads first, or None for the prompt where the server
        says nothing. A server that is not there yet is tried again."""
        options = {} if seed is None else {"seed": seed}
        for attempt in range(CONNECTIONS):
            try:
                result = await self.client.reset(**options)
                said = self.observation(result.observation) or None
                return as_opening(said, prompt) if isinstance(said, str) else said
            except (OSError, RuntimeError, asyncio.TimeoutError) as error:  # noqa: UP041 - 3.10's own
                await self.client.disconnect()
                if attempt + 1 == CONNECTIONS:
                    if FULL in str(error):
                        limit = "its max_concurrent_envs must be rollout_batch_size at least"
                        raise RuntimeError(f"{error}: {limit}") from error
                    raise
                await asyncio.sleep(PAUSE * 2**attempt)
        raise AssertionError

    async def step(self, text: str) -> tuple[Any, float, bool]:
        """The policy's turn. A connection that is lost takes the episode with it; a text that is no
        action does not."""
        try:
            action = self.action(text)
        except (ValueError, RecursionError) as error:  # the second of JSON that nests too deep
            return _refusal(error)
        try:
            result = await self.client.step(action)
        except RuntimeError as error:
            if REFUSED not in str(error):
                raise
            return _refusal(error)
        said = self.observation(result.observation)
        reward = float(result.reward or 0.0)
        return NOTHING if said == "" else said, reward, bool(result.done)

    async def state(self) -> Any:
        """The server's state of the episode."""
        return await self.client.state()

    async def close(self) -> None:
        """Ends the session."""
        await self.client.close()


def _schema(url: str) -> dict[str, Any]:
    address = f"{url.rstrip('/')}/schema"
    try:
        with urllib.request.urlopen(address, timeout=SCHEMA_TIMEOUT) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise DataError(f"no OpenEnv server answers at {address}: {error}") from error


def _text_field(schema: dict[str, Any]) -> str | None:
    """The one required field, if it is a text; None where an action has more to it."""
    required = [name for name in schema.get("required", ()) if name != "metadata"]
    if len(required) == 1 and schema["properties"][required[0]].get("type") == "string":
        return required[0]
    return None


def _as_action(text: str) -> dict[str, Any]:
    """An action that the policy wrote as JSON."""
    action = json.loads(text)
    if not isinstance(action, dict):
        raise ValueError(f"expected a JSON object, got {text}")
    return action


def _refusal(error: Exception) -> tuple[str, float, bool]:
    """The answer to a text that is no action."""
    return json.dumps({"error": f"no action: {error}"}, ensure_ascii=False), 0.0, False


def _read(observation: dict[str, Any], field: str | None) -> Any:
    """An observation as the policy reads it."""
    if field is not None:
        return observation[field]
    parts = {name: value for name, value in observation.items() if name not in SAID_APART}
    texts = [value for value in parts.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else json.dumps(parts, ensure_ascii=False)
