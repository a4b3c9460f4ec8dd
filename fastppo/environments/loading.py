"""Load environments by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastppo.data import addresses, fingerprint
from fastppo.environments.agents import SCHEME, Agent
from fastppo.environments.tools import Tools, is_tool_class
from fastppo.rewards.loading import load_callable
from fastppo.rewards.reward import RewardTerm


def load_environment(spec: str | Callable[[], Any]) -> RewardTerm | None:
    """Load what creates environments, with its fingerprint.

    Args:
        spec: `file.py:Name`, `package.module:Name`, an agent `chat:file.py:name`, an address of
            another package, or a callable. "" gives None.

    Raises:
        ValueError: it does not exist.
    """
    if not spec:
        return None
    if isinstance(spec, str) and spec.startswith(SCHEME):
        return _load_agent(spec)
    if isinstance(spec, str) and addresses.is_address(spec):
        make: Any = addresses.load(
            spec, "environment", lambda adapter, target: adapter.load_environment(target)
        )
        if inspect.iscoroutinefunction(make):
            make = Agent(make)
        term = RewardTerm("environment", make, fingerprint=fingerprint.of_text(spec))
    else:
        term = load_callable(spec, "environment")
    if not is_tool_class(term.function):
        return term
    try:
        tools: Any = Tools(term.function)
    except (ValueError, TypeError) as error:
        raise ValueError(f"environment {spec}: {error}") from error
    return replace(term, function=tools)


def _load_agent(spec: str) -> RewardTerm:
    name, options = addresses.Address.of(spec.removeprefix(SCHEME))
    term = load_callable(name, "agent")
    try:
        agent: Any = Agent(term.function, **options)
    except (TypeError, ImportError) as error:
        raise ValueError(f"environment {spec}: {error}") from error
    return replace(term, name="environment", function=agent)
