"""The identity of a run: its options, the fingerprints of what it reads, the versions it runs on.

A checkpoint's manifest holds it, and a resumed run is compared with it. A difference is shown; one
that makes it another run (other data, another objective) is refused unless `allow_config_change`
is on.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from fastppo.functional.scalars import describe
from fastppo.run.options import Options

PACKAGES = ("fastppo", "torch", "transformers", "peft", "vllm")
"""Packages whose versions a checkpoint holds: the numbers of a run come from them."""

NOT_COMPARED = ("resume", "allow_config_change", "output_dir")
"""Options that say how a run was started, not what it does."""


class Difference(NamedTuple):
    """An option, a content or a version that is not what it was at the checkpoint."""

    name: str
    before: Any
    now: Any
    is_other_run: bool
    """Whether it makes the run another one, which may not go on from there."""

    def __str__(self) -> str:
        return f"{self.name} was {describe(self.before)} and is {describe(self.now)}"


def of_run(config: Options, fingerprints: Mapping[str, str]) -> dict[str, Any]:
    """The identity of a run, as JSON has it.

    Args:
        fingerprints: of the model, the data, the rewards, by name.
    """
    return {
        "options": config.to_dict(),
        "fingerprints": dict(fingerprints),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Python's, and those of the packages that are installed."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], essential: Iterable[str]
) -> list[Difference]:
    """What differs between two identities; what makes it another run comes first.

    Args:
        essential: the options whose difference makes it another run, as every fingerprint's does.
    """
    essential = set(essential)
    differing = []
    for part in ("options", "fingerprints", "versions"):
        old = _part(before, part)
        new = now[part]
        # Files that only one of the runs reads are a difference; an option of a newer version is
        # none.
        names = [name for name in new if name in old]
        if part == "fingerprints":
            names = list({**old, **new})
        for name in names:
            if name in NOT_COMPARED or old.get(name) == new.get(name):
                continue
            matters = part == "fingerprints" or (part == "options" and name in essential)
            label = f"the content of {name}" if part == "fingerprints" else name
            differing.append(Difference(label, old.get(name), new.get(name), matters))
    return sorted(differing, key=lambda difference: not difference.is_other_run)


def _part(identity: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of an identity; nothing where a manifest has something else in its place."""
    part = identity.get(name)
    return part if isinstance(part, dict) else {}


def check_same_run(
    path: Path,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    essential: Iterable[str],
    allowed: bool,
) -> list[str]:
    """Sentences on what differs from the run that wrote the checkpoint `path`.

    Raises:
        ValueError: a difference makes it another run, and none is allowed.
    """
    differing = differences(before, now, essential)
    reasons = [str(difference) for difference in differing if difference.is_other_run]
    if reasons and not allowed:
        raise ValueError(
            f"{path} belongs to another run: {'; '.join(reasons)}. "
            "`--allow_config_change true` resumes it anyway"
        )
    return [f"since {path.name}: {change}" for change in differing]
