"""Adapters to the tasks of other packages, named by an address `name:target?option=value&…`.

    reasoning-gym:chain_sum?size=1000&seed=0    prompts; the reward is reasoning-gym:score_answer
    textarena:GuessTheNumber-v0?size=200        prompts and environment
    verifiers:my-env?difficulty=hard            prompts and environment
    openenv:http://localhost:8000               environment
    gym:package:Name                            prompts and environment
    mcp:python server.py                        environment: the tools of a server
    chat:agent.py:run                           environment: an agent

The name is that of an entry point of the group `fastppo.environments`, whose object is an
`Adapter`. FastPPO's own adapters are declared in its pyproject.toml like those of any other
package, and nothing imports them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import yaml

from fastppo.data import datasets
from fastppo.data.datasets import DataError, Rows
from fastppo.data.files import MissingPathError
from fastppo.plugins import entry_points
from fastppo.plugins.calling import UserCodeError, call, place_of

SCHEME = re.compile(r"([A-Za-z][\w-]*):")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What a package provides by address.

    Its module must be importable without the package. The functions take the target of the address,
    and raise DataError, or any error of the package, for a target that does not exist.
    """

    requirement: str = ""
    """Name for pip of a package that is not installed with the adapter."""
    prompts: Callable[[str], Rows] | None = None
    """Return the rows of a data set."""
    environment: Callable[[str], Any] | None = None
    """Return a class or function that creates environments, or an `EnvironmentMaker`."""
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Reward functions by target."""

    @property
    def provides(self) -> list[str]:
        """The options that an address may be given for."""
        parts = {
            "prompts": self.prompts,
            "environment": self.environment,
            "reward": self.rewards,
        }
        return [kind for kind, part in parts.items() if part]


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
    """Return whether a spec starts with the name of an adapter and a colon."""
    match = SCHEME.match(spec)
    return match is not None and match[1] in entry_points.names(entry_points.ENVIRONMENTS)


def load_prompts(spec: str, split: str = "train") -> Rows:
    """Load the rows of an address. Anything else goes to `load_rows`.

    Raises:
        DataError: they cannot be loaded, or there are none.
    """
    if not is_address(spec):
        return datasets.load_rows(spec, split)
    rows = _provided(spec, "prompts", lambda adapter, target: adapter.prompts(target))
    if not rows:
        raise DataError(f"prompts {spec}: there are no tasks")
    return rows


def load_environment(spec: str) -> Any:
    """Load what creates the environments of an address.

    Raises:
        DataError: it cannot be loaded.
    """
    return _provided(spec, "environment", lambda adapter, target: adapter.environment(target))


def load_reward(spec: str) -> Callable[..., Any]:
    """Load the reward function of an address.

    Raises:
        DataError: it cannot be loaded.
    """

    def chosen(adapter: Adapter, target: str) -> Callable[..., Any]:
        if target not in adapter.rewards:
            raise DataError(
                f"reward {spec}: expected one of {', '.join(adapter.rewards)}, got {target!r}"
            )
        return adapter.rewards[target]

    return _provided(spec, "reward", chosen)


def _provided(spec: str, kind: str, load: Callable[[Any, str], Any]) -> Any:
    """Load something from the adapter of an address.

    Args:
        kind: prompts, environment or reward.
        load: called with the adapter and the target.

    Raises:
        DataError: the adapter does not provide this kind, its package is missing, or the package
            does not accept the target.
    """
    name, _, target = spec.partition(":")
    adapter: Adapter = entry_points.load(entry_points.ENVIRONMENTS, name)
    if kind not in adapter.provides:
        raise DataError(f"{kind} {spec}: {name} provides only {' and '.join(adapter.provides)}")
    try:
        return call(lambda: load(adapter, target))
    except UserCodeError as error:
        cause = error.__cause__
        if isinstance(cause, (DataError, MissingPathError)):
            raise cause from cause.__cause__
        kind_of_error = "" if isinstance(cause, ValueError) else f"{type(cause).__name__}: "
        reason = f"{kind_of_error}{cause}{place_of(cause)}"
        if isinstance(cause, ImportError):
            reason += entry_points.install_hint(cause, adapter.requirement)
        raise DataError(f"{kind} {spec}: {reason}") from cause
