"""Optional parts of FastPPO and of other packages, found by entry point.

A package declares a part in its pyproject.toml, and FastPPO finds it by its name:

    [project.entry-points."fastppo.environments"]
    chess = "my_package.chess:ADAPTER"

The groups for other packages are `ENVIRONMENTS` (an `Adapter`) and `TRACKERS` (a `Tracker`).
`CALLBACKS` holds FastPPO's default callbacks, such as the report; pass your own in Python, with
`PPOTrainer(callbacks=[…])`. Nothing is imported before it is used.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENVIRONMENTS = "fastppo.environments"
TRACKERS = "fastppo.trackers"
CALLBACKS = "fastppo.callbacks"

PACKAGE = "fastppo"


def names(group: str) -> list[str]:
    """Return the names of the entry points of a group."""
    return sorted(_found(group))


def load(group: str, name: str) -> Any:
    """Import the entry point of this name.

    Raises:
        KeyError: there is none.
        ImportError: a package that it needs is missing.
    """
    return _found(group)[name].load()


def _found(group: str) -> dict[str, EntryPoint]:
    from importlib import metadata  # takes longer to import than the rest of a command's help

    installed = {point.name: point for point in metadata.entry_points(group=group)}
    checkout = {
        name: metadata.EntryPoint(name, value, group)
        for name, value in _of_checkout().get(group, {}).items()
    }
    return installed | checkout


@functools.cache
def _of_checkout() -> dict[str, dict[str, str]]:
    """Return the entry points of the checkout that runs, by group and name.

    A checkout may run without being installed, or its metadata may be older than its code. An
    installed wheel has no pyproject.toml beside the package.
    """
    file = Path(__file__).parents[2] / "pyproject.toml"
    if not file.exists():
        return {}
    import tomllib

    project = tomllib.loads(file.read_text("utf-8")).get("project", {})
    return project.get("entry-points", {}) if project.get("name") == PACKAGE else {}


def install_hint(error: ImportError, requirement: str) -> str:
    """Return the pip command, as the end of a message, if the error is due to this requirement."""
    package = re.split(r"[^\w-]", requirement)[0].replace("-", "_")
    is_missing = bool(package) and (error.name or "").partition(".")[0] == package
    return f': pip install "{requirement}"' if is_missing else ""
