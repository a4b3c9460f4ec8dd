"""Load environments by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastppo.data import fingerprint
from fastppo.environments.maker import EnvironmentMaker
from fastppo.environments.tools import Tools, is_tool_class
from fastppo.plugins import adapters
from fastppo.plugins.loading import Plugin, load_plugin


def load_environment(spec: str | Callable[[], Any]) -> Plugin | None:
    """Load what makes environments, an `EnvironmentMaker`, with its fingerprint.

    Args:
        spec: `file.py:Name`, `package.module:Name`, an address such as `chat:file.py:name`, or a
            callable. "" gives None.

    Raises:
        ValueError: it does not exist, or is a class whose methods cannot be tools.
    """
    if not spec:
        return None
    if isinstance(spec, str) and adapters.is_address(spec):
        plugin = Plugin("environment", adapters.load_environment(spec), fingerprint.of_text(spec))
    else:
        plugin = load_plugin(spec, "environment")
    try:
        maker = as_maker(plugin.function)
    except (ValueError, TypeError) as error:
        raise ValueError(f"environment {spec}: {error}") from error
    return Plugin("environment", maker, maker.fingerprint or plugin.fingerprint)


def as_maker(make: Callable[..., Any]) -> EnvironmentMaker:
    """Return an `EnvironmentMaker`, wrapping a user's class or function.

    Raises:
        ValueError: a method of a class cannot be a tool.
    """
    if isinstance(make, EnvironmentMaker):
        return make
    return Tools(make) if is_tool_class(make) else EnvironmentMaker(make)
