"""Environments with Gymnasium's interface: `reset` returns two values, `step` five.

prompts: gym:gem:game:GuessTheNumber-v0?size=200&seed=0    # `size` episodes, with consecutive seeds
environment: gym:gem:game:GuessTheNumber-v0?max_turns=8    # options of the environment

`gym:package:Name` is the class or function `Name` of a package, or else `package.make("Name")`, or
else, once the package is imported, `gymnasium.make("Name")`. `gym:file.py:Name` is one in a file.

The policy reads the observation: a text as it is, anything else as JSON; with the option
`render_mode=ansi` it reads the environment's rendering as text instead. With the prompt option
`chat=true` it is a user message, otherwise a line of a text. The first observation replaces the
prompt, except its system messages. It follows the rules, from the prompt option `rules=…` or a
column `rules`: a system message or a line.

A turn is the action: its text, for a discrete action space the first whole number in it, for a
space of arrays, tuples or dicts the JSON in it. An invalid action is answered with `{"error": …}`
and does not reach the environment. The reward is the environment's. Both `terminated` and
`truncated` end an episode, and are its outcome unless `info` says whether it was a success.

For other texts and actions, a file of your own makes the environment:

    def environment():
        return Gym(gymnasium.make("MiniGrid-Empty-5x5-v0"), action=…, observation=…)
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fastppo.data.chat import is_chat
from fastppo.data.datasets import DataError, Rows
from fastppo.environments.maker import success_in
from fastppo.environments.pool import as_opening
from fastppo.functional.scalars import describe
from fastppo.plugins.adapters import Adapter, Address, seeded_prompts
from fastppo.plugins.loading import load_plugin
from fastppo.rollout import FAILURE, SUCCESS

NONE_REGISTERED = (
    "registers none when it is imported; a function in a file can make one: gym:file.py:function"
)
"""End of a message."""


def load_prompts(target: str) -> Rows:
    """Return one row per episode, with its seed and the rules.

    Raises:
        DataError: an option is unknown or has a wrong type.
    """
    name, options = Address.of(target)
    rules = options.pop("rules", "")
    if not isinstance(rules, str):
        raise DataError(f"rules must be a text, got {describe(rules)}")
    rows = seeded_prompts(Address(name, options))
    return [row | {"rules": rules} for row in rows] if rules else rows


def load_environment(target: str) -> Callable[[], Gym]:
    """Return a function that creates environments."""
    address = Address.of(target)
    create = _creator(address.name)

    def make() -> Gym:
        return Gym(create(**address.options))

    make.__name__ = address.name.rpartition(":")[2]  # names the environment in messages
    make().close()  # raises for an unknown name before the first rollout
    return make


def _creator(address_name: str) -> Callable[..., Any]:
    """Return what creates an environment from its options.

    Raises:
        DataError: the name is not `package:Name` or `file.py:Name`.
    """
    where, _, name = address_name.partition(":")
    if not name:
        raise DataError(f"expected gym:package:Name or gym:file.py:Name, got gym:{address_name}")
    if where.endswith(".py"):
        return load_plugin(address_name, "environment").function
    package = importlib.import_module(where)
    if callable(getattr(package, name, None)):
        return getattr(package, name)
    if callable(getattr(package, "make", None)):
        return functools.partial(package.make, name)
    return functools.partial(_make_registered, where, name)


def _make_registered(package: str, name: str, **options: Any) -> Any:
    """Create an environment that the import of a package has registered.

    Raises:
        DataError: there is none of this name; the message lists those of the package.
    """
    import gymnasium

    try:
        return gymnasium.make(name, **options)
    except gymnasium.error.UnregisteredEnv as error:
        registered = [
            spec.id
            for spec in gymnasium.registry.values()
            if str(spec.entry_point).startswith((f"{package}.", f"{package}:"))
        ]
        others = f"registers {', '.join(registered)}" if registered else NONE_REGISTERED
        raise DataError(
            f"gym:{package} has no class or function {name!r}, and {error} {package} {others}"
        ) from error


class Gym:
    """An environment with Gymnasium's interface, as one of FastPPO's.

    Args:
        environment: has `reset(seed=…)`, which returns (observation, info), and `step(action)`,
            which returns (observation, reward, terminated, truncated, info).
        action: converts the policy's text to an action; raises ValueError if it is invalid.
        observation: converts an observation to a text.
    """

    def __init__(
        self,
        environment: Any,
        action: Callable[[str], Any] | None = None,
        observation: Callable[[Any], str] | None = None,
    ) -> None:
        self.environment = environment
        space = getattr(environment, "action_space", None)
        self.action = action or functools.partial(read_action, space)
        self.observation = observation or self._observe

    def reset(self, prompt: Any, seed: int | None = None, rules: str = "") -> Any:
        """Start an episode and return its first observation, after the rules."""
        self.is_chat = is_chat(prompt)
        returned = self.environment.reset() if seed is None else self.environment.reset(seed=seed)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ValueError(f"reset returned {describe(returned)}; expected (observation, info)")
        text = self.observation(returned[0])
        if not self.is_chat:
            return f"{rules}\n{text}\n" if rules else f"{text}\n"
        opening = as_opening(text, prompt)
        return [{"role": "system", "content": rules}, *opening] if rules else opening

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Take the action of a turn."""
        try:
            action = self.action(text)
        except ValueError as error:
            answer = json.dumps({"error": str(error)}, ensure_ascii=False)
            return self._line(answer), 0.0, False, {"invalid": True}
        returned = self.environment.step(action)
        if not isinstance(returned, tuple) or len(returned) != 5:
            raise ValueError(
                f"step returned {describe(returned)}; expected (observation, reward, terminated, "
                "truncated, info)"
            )
        observation, reward, terminated, truncated, info = returned
        is_done = bool(terminated) or bool(truncated)
        told: dict[str, Any] = {"invalid": False}
        if is_done:
            told["outcome"] = _outcome(info, is_terminated=bool(terminated))
        return self._line(self.observation(observation)), float(reward), is_done, told

    def close(self) -> None:
        """Close the environment if it has a method for it."""
        close = getattr(self.environment, "close", None)
        if close is not None:
            close()

    def _observe(self, observation: Any) -> str:
        if getattr(self.environment, "render_mode", None) == "ansi":
            return str(self.environment.render())
        return as_text(observation)

    def _line(self, text: str) -> str:
        return text if self.is_chat else f"\n{text}\n"


def _outcome(info: Any, *, is_terminated: bool) -> str:
    """Return the outcome of an episode: success or failure if the environment tells them apart."""
    success = success_in(info)
    if success is not None:
        return SUCCESS if success else FAILURE
    return "terminated" if is_terminated else "truncated"


def read_action(space: Any, text: str) -> Any:
    """Convert a turn to an action.

    Args:
        space: the action space.

    Returns:
        for a discrete space the first whole number; for a space of arrays, tuples or dicts the JSON
        list or object; for any other space the text.

    Raises:
        ValueError: the text has no such action.
    """
    if isinstance(space, (Mapping, Sequence)) or getattr(space, "shape", None):
        return _read_json(space, text)
    count = getattr(space, "n", None)
    if count is None:
        return text.strip()
    first = int(getattr(space, "start", 0))
    last = first + int(count) - 1
    found = re.search(r"-?\d+" if first < 0 else r"\d+", text)
    if found is None or not first <= int(found[0]) <= last:
        raise ValueError(f"expected an action from {first} to {last}")
    return int(found[0])


def _read_json(space: Any, text: str) -> Any:
    found = re.search(r"\{.*\}" if isinstance(space, Mapping) else r"\[.*\]", text, re.DOTALL)
    try:
        action = _from_json(space, json.loads(found[0] if found else ""))
        if space.contains(action):
            return action
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        pass  # no JSON, or not of this space
    raise ValueError(f"expected JSON of {space}")


def _from_json(space: Any, value: Any) -> Any:
    if isinstance(space, Mapping):
        return {name: _from_json(space[name], value[name]) for name in space}
    if isinstance(space, Sequence):
        return tuple(_from_json(one, item) for one, item in zip(space, value, strict=True))
    if getattr(space, "shape", None):
        return np.asarray(value, dtype=space.dtype)
    return value


def as_text(observation: Any) -> str:
    """Return a text as it is, and anything else as JSON."""
    if isinstance(observation, str):
        return observation
    return json.dumps(observation, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.floating, np.ndarray)) and value.dtype.kind == "f":
        value = value.astype(str).astype(float)  # 0.1 in fp32, not 0.10000000149011612
    return value.tolist() if hasattr(value, "tolist") else str(value)


ADAPTER = Adapter(requirement="gymnasium", prompts=load_prompts, environment=load_environment)
