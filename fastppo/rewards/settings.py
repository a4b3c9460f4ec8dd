"""What a user's code might change of the process beside torch's settings: the working directory,
stdout and stderr. They are restored after each call.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

CONSOLES = (1, 2)
"""Descriptors of stdout and stderr. The next file that is opened takes the number of a closed one,
and would be given what is printed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The state of the process that users' code shares with the training."""

    folder: str
    streams: tuple[Any, Any]
    """stdout and stderr."""

    @classmethod
    def now(cls) -> Settings:
        return cls(folder=_working_directory(), streams=(sys.stdout, sys.stderr))

    def restore(self) -> list[str]:
        """Puts back what has changed since; its names."""
        after = Settings.now()
        changed = []
        if self.folder and self.folder != after.folder:
            changed.append("the working directory")
            os.chdir(self.folder)
        if self.streams != after.streams:
            changed.append("sys.stdout or sys.stderr")
            sys.stdout = self.streams[0]
            sys.stderr = self.streams[1]
        return changed


def copy_consoles() -> dict[int, int]:
    """Copies of the descriptors of stdout and stderr, which `restore_consoles` closes."""
    copies = {}
    for console in CONSOLES:
        with suppress(OSError):  # the process was started without it
            copies[console] = os.dup(console)
    return copies


def restore_consoles(copies: dict[int, int]) -> list[str]:
    """Puts back what was closed or redirected since it was copied; its names."""
    changed = []
    for console, copy in copies.items():
        with suppress(OSError):  # the copy was closed too
            if not _is_open(console) or not os.path.sameopenfile(console, copy):
                changed.append(f"file descriptor {console}")
            os.dup2(copy, console)
            os.close(copy)
    return changed


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _working_directory() -> str:
    """Its path; empty if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
