"""How long a run waits for a reward, and what it does with one that fails.

Python cannot end a function that hangs. So a function is waited for without limit unless a limit is
asked for, and meanwhile a line says what the run waits for; under a limit it is called in a thread,
which is left to itself when the time is up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

HEARTBEAT = 60.0
"""Seconds between two lines that say what a run waits for."""


def _nobody(sentence: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Patience:
    """What a run bears with."""

    timeout: float | None = None
    """Seconds that a function may take; None is no limit."""
    retries: int = 0
    """Further calls of one that was too late."""
    drop: bool = False
    """Whether samples without a score are dropped; otherwise the run stops."""
    say: Callable[[str], None] = _nobody
    """Takes a sentence for the user."""

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """What the function returns.

        Raises:
            TimeoutError: it took too long each time.
        """
        with heartbeat(f"waiting for reward {name!r}", self.say):
            if self.timeout is None:
                return function()
            for _ in range(self.retries + 1):
                found = in_thread(name, function, self.timeout)
                if found is not None:
                    return found()
        times = f", {self.retries + 1} times" if self.retries else ""
        raise TimeoutError(f"did not return within {self.timeout:g} s{times}")


def in_thread(name: str, function: Callable[[], Any], timeout: float) -> Callable[[], Any] | None:
    """A function that returns or raises what `function` does; None if it is too late."""
    outcome: list[Callable[[], Any]] = []

    def work() -> None:
        try:
            value = function()
        except BaseException as error:  # raised where it is waited for
            raised = error

            def fail() -> Any:
                raise raised

            outcome.append(fail)
        else:
            outcome.append(lambda: value)

    thread = threading.Thread(target=work, name=f"reward {name}", daemon=True)
    thread.start()
    thread.join(timeout)
    return outcome[0] if outcome else None


@contextmanager
def heartbeat(sentence: str, say: Callable[[str], None]) -> Iterator[None]:
    """Says the sentence, and for how long, every `HEARTBEAT` seconds that the block takes."""
    done, start = threading.Event(), time.monotonic()

    def beat() -> None:
        while not done.wait(HEARTBEAT):
            say(f"{sentence} for {time.monotonic() - start:.0f} s")

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
