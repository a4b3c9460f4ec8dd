"""The exception of a program stopped by a signal."""

from __future__ import annotations

import signal


class Stopped(KeyboardInterrupt):
    """A signal stopped the program. The message has the signal and the progress of the run."""

    def __init__(self, signum: int, how_far: str = "") -> None:
        self.signum = signum
        super().__init__(f"stopped by {signal.Signals(signum).name}{how_far}")

    @property
    def exit_code(self) -> int:
        """Exit code of a process killed by the signal, as in a shell."""
        return 128 + self.signum
