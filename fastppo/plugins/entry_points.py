"""Optional parts of FastPPO and of other packages, found by entry point.

A package declares a part in its pyproject.toml, and FastPPO finds it by its name:

    [project.entry-points."fastppo.environments"]
    chess = "my_package.chess:ADAPTER"

The groups are `ENVIRONMENTS` (an `Adapter`), `TRACKERS` (a `Tracker`) and `CALLBACKS` (a
`TrainerCallback`). Nothing is imported before it is used.
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

ENVIRONMENTS = "fastppo.environments"
TRACKERS = "fastppo.trackers"
CALLBACKS = "fastppo.callbacks"

PACKAGE = "fastppo"


def names(group: str) -> list[str]:
    """Return the names of the entry points of a group.

    Raises:
        ImportError: the metadata of FastPPO's installation is older than its code.
    """
    return sorted(_found(group))


def load(group: str, name: str) -> Any:
    """Import the entry point of this name.

    Raises:
        KeyError: there is none.
        ImportError: a package that it needs is missing.
    """
    return _found(group)[name].load()


def _found(group: str) -> dict[str, metadata.EntryPoint]:
    found = {point.name: point for point in metadata.entry_points(group=group)}
    if not any(point.dist is not None and point.dist.name == PACKAGE for point in found.values()):
        raise ImportError(
            f"the installation of FastPPO does not declare its {group}, so it is older than the "
            "code that runs: install it again, such as with `pip install -e .`"
        )
    return found


def install_hint(error: ImportError, requirement: str) -> str:
    """Return the pip command, as the end of a message, if the error is due to this requirement."""
    package = re.split(r"[^\w-]", requirement)[0].replace("-", "_")
    is_missing = bool(package) and (error.name or "").partition(".")[0] == package
    return f': pip install "{requirement}"' if is_missing else ""
