"""Handle signals: stop a run with a checkpoint, or write a checkpoint.

While a run trains, the first SIGTERM, SIGINT or SIGHUP ends it after the current phase, with a
checkpoint. A second SIGTERM or SIGINT ends the process at once. Before the training starts there is
nothing to save, so the first signal ends the process. SIGUSR1 requests a checkpoint. A signal
ignored at the start, as under `nohup`, stays ignored.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from fastppo.stopped import Stopped

if TYPE_CHECKING:
    from fastppo.data.world import World

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Handler = Callable[[int, Any], None]


class PhaseEndedError(Exception):
    """Raised to end an iteration before its update, because the run stops."""


class StopRequest:
    """Requests by signals to stop or to write a checkpoint.

    Args:
        world: the ranks of the run. They agree on requests in `end_phase`, `is_stopping` and
            `checkpoint_wanted`, and nowhere else.
    """

    def __init__(self, world: World | None = None) -> None:
        if world is None:
            # It imports torch, and commands handle signals before that.
            from fastppo.data.world import World

            world = World()
        self.world = world
        self.stop: int | None = None
        """Signal that stops the run, or None."""
        self._heard: int | None = None
        self._save = False

    def hear(self, signum: int) -> None:
        """Request a stop of the run."""
        self._heard = signum
        if self.world.size == 1:
            self.stop = signum

    def hear_save(self) -> None:
        """Request a checkpoint."""
        self._save = True

    def _agree(self) -> None:
        if self.world.size > 1:
            heard = self.world.gather((self._heard, self._save))
            self.stop = next((signum for signum, _ in heard if signum is not None), self.stop)
            self._save = any(save for _, save in heard)

    def is_stopping(self) -> bool:
        """Return whether the run stops."""
        self._agree()
        return self.stop is not None

    def end_phase(self) -> None:
        """Raise `PhaseEndedError` if the run stops. The iteration is discarded."""
        if self.is_stopping():
            raise PhaseEndedError

    def checkpoint_wanted(self) -> bool:
        """Return whether a checkpoint was requested since the last call."""
        self._agree()
        wanted = self._save
        self._save = False
        return wanted


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Raise `Stopped` at the first signal in the block, which has no results to save yet."""

    process = os.getpid()

    def stop(signum: int, frame: Any) -> None:
        if os.getpid() != process:
            _end_worker(signum)
            return
        for worker in multiprocessing.active_children():  # Python waits for them at its end
            worker.terminate()
        raise Stopped(signum)

    def nothing_to_save(signum: int, frame: Any) -> None:
        pass

    with _handled(dict.fromkeys(STOPPING, stop) | {signal.SIGUSR1: nothing_to_save}):
        yield


@contextmanager
def listening(world: World | None = None) -> Iterator[StopRequest]:
    """Yield a `StopRequest` that signals update during the block."""
    request = StopRequest(world)
    process = os.getpid()

    def stop(signum: int, frame: Any) -> None:
        if os.getpid() != process:
            _end_worker(signum)
            return
        request.hear(signum)
        # A second one ends the process without waiting for Python code. SIGHUP is excluded, because
        # a closing terminal sends it twice: from the shell and from the kernel.
        for again in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(again) is stop:
                signal.signal(again, signal.SIG_DFL)
        # print is not reentrant, and this handler may have interrupted it.
        line = f"{signal.Signals(signum).name}: stopping with a checkpoint after the current phase"
        if request.world.size > 1:
            line += " if the other ranks are alive"
        with suppress(OSError):  # the terminal may be gone
            os.write(2, f"{line}; a second signal ends the run at once\n".encode())

    def save(signum: int, frame: Any) -> None:
        request.hear_save()

    with _handled(dict.fromkeys(STOPPING, stop) | {signal.SIGUSR1: save}):
        yield request


def _end_worker(signum: int) -> None:
    """End this process, which a reward forked, except at the first SIGINT.

    A terminal sends Ctrl-C to all processes, and the run needs the reward's workers to finish the
    current phase.
    """
    signal.signal(signum, signal.SIG_DFL)
    if signum != signal.SIGINT:
        os.kill(os.getpid(), signum)


@contextmanager
def _handled(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Install handlers for the block. Python allows them in the main thread only."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for signum, handler in handlers.items():
            if signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
