"""The identity of a run: its options, the fingerprints of its inputs, and package versions.

A checkpoint's manifest holds it, and a resumed run is compared with it. Differences are printed.
Other data or another objective make it another run, and are refused without
`resume: force`.
"""

from __future__ import annotations

import platform
from collections.abc import Container, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from fastppo.functional.scalars import describe
from fastppo.run.options import Options, has_effect

PACKAGES = ("fastppo", "torch", "transformers", "peft", "vllm")
"""Packages that compute the numbers of a run."""

NOT_COMPARED = ("resume", "output_dir")
"""Options of how a run is started."""


class Difference(NamedTuple):
    """A change of an option, a fingerprint or a version since the checkpoint."""

    name: str
    before: Any
    now: Any
    is_other_run: bool
    """Whether the run may not resume without `resume: force`."""

    def __str__(self) -> str:
        return f"{self.name} was {describe(self.before)} and is {describe(self.now)}"


def of_run(config: Options, fingerprints: Mapping[str, str]) -> dict[str, Any]:
    """Return the identity of a run, serializable as JSON.

    Args:
        fingerprints: of the model, the data and the rewards, by name.
    """
    return {
        "options": config.to_dict(),
        "fingerprints": dict(fingerprints),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed `PACKAGES`."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def essential_options(
    config: Options, names: Iterable[str], passed: Container[str] = ()
) -> list[str]:
    """Return those of the options that have an effect in this run, and so must be the same.

    An option without an effect may be deleted before a resume.

    Args:
        passed: options whose part is given in Python, and counts as on.
    """
    known = config.to_dict()
    return [name for name in names if name in known and has_effect(config, name, passed)]


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], essential: Iterable[str]
) -> list[Difference]:
    """Return the differences of two identities, the essential ones first.

    Every changed fingerprint is essential. An option of only one run, as after an upgrade, is not a
    difference.

    Args:
        essential: options that make it another run if they change.
    """
    essential = set(essential)
    differing = []
    for part in ("options", "fingerprints", "versions"):
        old, new = before[part], now[part]
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


def check_same_run(
    path: Path,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    essential: Iterable[str],
    allowed: bool,
) -> list[str]:
    """Return one sentence per difference from the run of the checkpoint `path`.

    Raises:
        ValueError: a difference makes it another run, and `allowed` is false.
    """
    differing = differences(before, now, essential)
    reasons = [str(difference) for difference in differing if difference.is_other_run]
    if reasons and not allowed:
        raise ValueError(
            f"{path} belongs to another run: {'; '.join(reasons)}. "
            "`--resume force` resumes it anyway"
        )
    return [f"since {path.name}: {difference}" for difference in differing]
