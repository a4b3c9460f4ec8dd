"""What a user's code might change of the process beside torch's settings: the working directory,
stdout and stderr. They are restored after each call.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any


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


def _working_directory() -> str:
    """Its path; empty if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
