"""Prompts and environments of other packages by address, `package:name?option=value&option=value`.

reasoning-gym:chain_sum?size=1000&seed=0    prompts; the reward is reasoning-gym:score_answer
textarena:GuessTheNumber-v0?size=200        prompts and environment
verifiers:my-env?difficulty=hard            prompts and environment
openenv:http://localhost:8000               environment
mcp:python server.py                        environment: the tools of a server
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import yaml

from fastppo.data import rows
from fastppo.data.chat import is_chat
from fastppo.data.rows import DataError, Rows


class Package(NamedTuple):
    """A package whose prompts, environments or rewards can be named by address."""

    module: str
    """Module of `fastppo.integrations` that adapts it."""
    requirement: str
    """Name for pip."""
    gives: tuple[str, ...]
    """The options that may name it: prompts, environment, reward."""


PACKAGES = {
    "mcp": Package("mcp", "mcp", ("environment",)),
    "openenv": Package("openenv", "openenv", ("environment",)),
    "reasoning-gym": Package("reasoning_gym", "reasoning-gym", ("prompts", "reward")),
    "textarena": Package("textarena", "textarena", ("prompts", "environment")),
    "verifiers": Package("verifiers", "verifiers", ("prompts", "environment")),
}


class Address(NamedTuple):
    """An address `name?option=value&…` in its parts."""

    name: str
    options: dict[str, Any]

    @classmethod
    def of(cls, text: str) -> Address:
        """Reads an address; values are numbers, booleans or texts, as in YAML."""
        name, _, query = text.partition("?")
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        options = {}
        for key, value in pairs:
            try:
                options[key] = yaml.safe_load(value)
            except yaml.YAMLError as error:
                raise ValueError(f"option {key}: YAML cannot read {value!r}") from error
        return cls(name, options)


def as_opening(text: str, prompt: Any) -> Any:
    """The first words of an environment, for a policy whose prompts are texts or chats as `prompt`
    is. Of a chat the system messages stay."""
    if not is_chat(prompt):
        return text
    system = [message for message in prompt if message["role"] == "system"]
    return [*system, {"role": "user", "content": text}]


def is_address(spec: str) -> bool:
    """Whether the text begins with the name of a package in `PACKAGES` and a colon."""
    return spec.partition(":")[0] in PACKAGES


def load_prompts(spec: str, split: str = "train") -> Rows:
    """The rows of a package's tasks, or, of what is no address, those of `load_rows`.

    Raises:
        DataError: the package is not installed or has another API, has no such tasks or refuses the
            options.
    """
    if not is_address(spec):
        return rows.load_rows(spec, split)
    tasks = _use(spec, "prompts", lambda adapter, target: adapter.load_prompts(Address.of(target)))
    if not tasks:
        raise DataError(f"prompts {spec}: there are no tasks")
    return tasks


def load_environment(spec: str) -> Callable[[], Any]:
    """What makes environments of a package, or a coroutine function that is an agent of
    `fastppo.environments.agents`.

    Raises:
        DataError: as `load_prompts`.
    """
    return _use(spec, "environment", lambda adapter, target: adapter.load_environment(target))


def load_reward(spec: str) -> Callable[..., Any]:
    """A reward function of a package.

    Raises:
        DataError: as `load_prompts`.
    """

    def load(adapter: ModuleType, target: str) -> Callable[..., Any]:
        if target not in adapter.REWARDS:
            known = ", ".join(adapter.REWARDS)
            raise DataError(f"reward {spec}: expected one of {known}, got {target!r}")
        return adapter.REWARDS[target]

    return _use(spec, "reward", load)


def _use(spec: str, what: str, load: Callable[[ModuleType, str], Any]) -> Any:
    scheme, _, target = spec.partition(":")
    package = PACKAGES[scheme]
    if what not in package.gives:
        raise DataError(f"{what} {spec}: {scheme} gives {' and '.join(package.gives)} alone")
    try:
        adapter = importlib.import_module(f"fastppo.environments.{package.module}")
    except ImportError as error:  # it is not installed, or has another API
        sentence = f'{what} {spec}: {error}: pip install "{package.requirement}"'
        raise DataError(sentence) from error
    try:
        return load(adapter, target)
    except DataError:
        raise
    except Exception as error:  # whatever the package raises at a name or option
        raise DataError(f"{what} {spec}: {type(error).__name__}: {error}") from error
