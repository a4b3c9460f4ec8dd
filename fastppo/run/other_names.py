"""The answer to an option that has another project's name."""

from __future__ import annotations

from collections.abc import Container

from fastppo.other_names import OPTIONS, WITHOUT


def other_projects_option(name: str, known: Container[str]) -> list[str] | None:
    """Return our names of another project's option, or None for an unknown name.

    `other_projects_option("cliprange", …)` is ["clip_ratio"]. The list is empty for an option
    without a counterpart. Sections in front of a dot (`actor.optim.lr`) are ignored.

    Args:
        known: names of the options that the command has.
    """
    name = name.rpartition(".")[2]
    ours = [option for option in OPTIONS.get(name, ()) if option in known]
    return ours if ours or name in WITHOUT else None
