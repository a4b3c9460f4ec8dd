"""Tasks of other packages, named by an address `package:name?option=value&option=value`.

reasoning-gym:chain_sum?size=1000&seed=0    prompts; the reward is reasoning-gym:score_answer
textarena:GuessTheNumber-v0?size=200        prompts and environment
verifiers:my-env?difficulty=hard            prompts and environment
openenv:http://localhost:8000               environment
gym:package:Name                            prompts and environment
mcp:python server.py                        environment: the tools of a server

`load` gives a package's adapter module, in `fastppo.environments`, to the loaders of prompts,
environments and rewards.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import yaml

from fastppo.data import datasets
from fastppo.data.datasets import DataError, Rows


class Package(NamedTuple):
    """A package with an adapter in `fastppo.environments`."""

    module: str
    requirement: str
    """Name for pip."""
    provides: tuple[str, ...]
    """Any of prompts, environment and reward."""


PACKAGES = {
    "gym": Package("gym", "gymnasium", ("prompts", "environment")),
    "mcp": Package("mcp", "mcp", ("environment",)),
    "openenv": Package("openenv", "openenv", ("environment",)),
    "reasoning-gym": Package("reasoning_gym", "reasoning-gym", ("prompts", "reward")),
    "textarena": Package("textarena", "textarena", ("prompts", "environment")),
    "verifiers": Package("verifiers", "verifiers", ("prompts", "environment")),
}


class Address(NamedTuple):
    """Name and options of `name?option=value&…`."""

    name: str
    options: dict[str, Any]

    @classmethod
    def of(cls, text: str) -> Address:
        """Parse an address. Values are YAML scalars."""
        name, _, query = text.partition("?")
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        options = {}
        for key, value in pairs:
            try:
                options[key] = yaml.safe_load(value)
            except yaml.YAMLError as error:
                raise ValueError(f"option {key}: YAML cannot read {value!r}") from error
        return cls(name, options)


def seeded_prompts(address: Address) -> Rows:
    """Return a row per episode of an environment, which has the episode's seed.

    The address has the options size, seed of the first episode, and chat (a message, not a text).

    Raises:
        DataError: it has other options.
    """
    options = {"size": 1000, "seed": 0, "chat": False} | address.options
    size, seed, chat = (options.pop(name) for name in ("size", "seed", "chat"))
    if options:
        raise DataError(f"expected the options size, seed and chat, got {', '.join(options)}")
    prompt = [{"role": "user", "content": address.name}] if chat else address.name
    return [{"prompt": prompt, "seed": seed + episode} for episode in range(size)]


def is_address(spec: str) -> bool:
    """Return whether a spec starts with a name in `PACKAGES` and a colon."""
    return spec.partition(":")[0] in PACKAGES


def load(spec: str, kind: str, load_from: Callable[[ModuleType, str], Any]) -> Any:
    """Load something from the adapter of an address's package.

    Args:
        kind: prompts, environment or reward.
        load_from: called with the adapter module and the address without its package.

    Raises:
        DataError: the package is not installed or has an unsupported version, or refuses the name
            or the options.
    """
    scheme, _, target = spec.partition(":")
    package = PACKAGES[scheme]
    if kind not in package.provides:
        raise DataError(f"{kind} {spec}: {scheme} only provides {' and '.join(package.provides)}")
    try:
        adapter = importlib.import_module(f"fastppo.environments.{package.module}")
    except ImportError as error:
        sentence = f'{kind} {spec}: {error}: pip install "{package.requirement}"'
        raise DataError(sentence) from error
    try:
        return load_from(adapter, target)
    except DataError:
        raise
    except Exception as error:  # each package raises its own
        raise DataError(f"{kind} {spec}: {type(error).__name__}: {error}") from error


def load_prompts(spec: str, split: str = "train") -> Rows:
    """Load a package's tasks as rows. Anything else than an address goes to `load_rows`.

    Raises:
        DataError: as from `load`, or there are no tasks.
    """
    if not is_address(spec):
        return datasets.load_rows(spec, split)
    tasks = load(spec, "prompts", lambda adapter, target: adapter.load_prompts(Address.of(target)))
    if not tasks:
        raise DataError(f"prompts {spec}: there are no tasks")
    return tasks
