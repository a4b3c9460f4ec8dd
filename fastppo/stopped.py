"""The exception that ends a program which a signal has stopped."""

from __future__ import annotations

import signal


class Stopped(KeyboardInterrupt):  # a stop that was asked for is no error
    """A signal stopped the program. The text says which, and how far the run had come."""

    def __init__(self, signum: int, how_far: str = "") -> None:
        self.signum = signum
        super().__init__(f"stopped by {signal.Signals(signum).name}{how_far}")

    @property
    def exit_code(self) -> int:
        """What a shell reports of a process that the signal killed."""
        return 128 + self.signum
