"""Signals: what a run does when it is asked to stop, or to write a checkpoint.

SIGTERM, SIGINT and SIGHUP ask a run to stop. While it trains, the first of them lets it finish the
phase at hand and write a checkpoint; a SIGTERM or SIGINT after it ends the process at once, as if
nobody had listened. At any other time there is nothing to save, and the first one stops it. SIGUSR1
asks for a checkpoint and stops nothing. A signal that the process was started to ignore (`nohup`)
stays ignored.
"""

from __future__ import annotations

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

AT_A_SECOND_SIGNAL = {
    signal.SIGINT: signal.SIG_DFL,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_IGN,  # a terminal that closes sends it twice: shell, then kernel
}
"""What becomes of a signal while a run is about to stop."""

Handler = Callable[[int, Any], None]

_REPLACED: dict[signal.Signals, Any] = {}
"""The handlers in whose place this module's are, of the process as it was before."""


class PhaseEndedError(Exception):
    """An iteration ends before its update, because the run is to stop."""


class StopRequest:
    """What signals have asked a run for since it began to listen: to stop, or for a checkpoint.

    Args:
        world: the ranks of the run. What one of them has heard, all know after `end_phase` and
            `checkpoint_wanted`, and not before.
    """

    def __init__(self, world: World | None = None) -> None:
        if world is None:
            # It imports torch, and a command listens for signals before that.
            from fastppo.data.world import World

            world = World()
        self.world = world
        self.stop: int | None = None
        """The signal that asked the run to stop; None if there was none."""
        self._heard: int | None = None
        self._save = False
        self.handlers: Mapping[signal.Signals, Handler] = {}
        """By which it listens, until the first signal that asks it to stop."""

    def listen(self) -> None:
        """Installs its handlers where users' code has put others in their place."""
        if self._heard is None:
            for signum, handler in self.handlers.items():
                if signal.getsignal(signum) is not handler:
                    signal.signal(signum, handler)

    def hear(self, signum: int) -> None:
        """A signal asks this process to stop."""
        self._heard = signum
        if self.world.size == 1:
            self.stop = signum

    def hear_save(self) -> None:
        """A signal asks this process for a checkpoint."""
        self._save = True

    def _agree(self) -> None:
        if self.world.size > 1:
            heard = self.world.gather((self._heard, self._save))
            self.stop = next((signum for signum, _ in heard if signum is not None), self.stop)
            self._save = any(save for _, save in heard)

    def end_phase(self) -> None:
        """Raises `PhaseEndedError` if the run is to stop: nothing of this iteration is kept."""
        self.listen()
        self._agree()
        if self.stop is not None:
            raise PhaseEndedError

    def checkpoint_wanted(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        self._agree()
        wanted = self._save
        self._save = False
        return wanted


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Raises `Stopped` at the first signal in the block: there is nothing to save yet."""
    heard: list[int] = []

    def stop(signum: int, frame: Any) -> None:
        heard.append(signum)
        raise Stopped(signum)

    def nothing_to_save(signum: int, frame: Any) -> None:
        pass

    with _handled(dict.fromkeys(STOPPING, stop) | {signal.SIGUSR1: nothing_to_save}):
        try:
            yield
        except Exception as error:  # of a library that the signal has interrupted
            if not heard:
                raise
            raise Stopped(heard[0]) from error


@contextmanager
def listening(world: World | None = None) -> Iterator[StopRequest]:
    """Collects the requests of signals while the block runs, which acts on them when it can."""
    request = StopRequest(world)

    def stop(signum: int, frame: Any) -> None:
        request.hear(signum)
        for stopping in STOPPING:  # by the kernel, which waits for no Python code
            if signal.getsignal(stopping) is stop:
                signal.signal(stopping, AT_A_SECOND_SIGNAL[stopping])
        # Past Python's streams, which the handler may have interrupted in the middle of a line.
        line = f"{signal.Signals(signum).name}: stopping with a checkpoint after the phase at hand"
        with suppress(OSError):  # of a terminal that is gone, often by the same signal
            os.write(2, f"{line}; a second one ends the run at once\n".encode())

    def save(signum: int, frame: Any) -> None:
        request.hear_save()

    with _handled(dict.fromkeys(STOPPING, stop) | {signal.SIGUSR1: save}) as request.handlers:
        yield request


@contextmanager
def _handled(
    handlers: Mapping[signal.Signals, Handler],
) -> Iterator[Mapping[signal.Signals, Handler]]:
    """Installs the handlers for the block, then the former ones. Other threads can have none.

    Returns:
        Mapping: those that are installed.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for signum, handler in handlers.items():
            if signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, handler)
    outermost = before.keys() - _REPLACED.keys()
    _REPLACED.update({signum: before[signum] for signum in outermost})
    try:
        yield {signum: handlers[signum] for signum in before}
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for signum in outermost:
            _REPLACED.pop(signum, None)


# A process that a reward forks is no run: a pool ends its workers by SIGTERM, and would wait for
# ever for one whose handler only notes it. Signals that come before its own handlers are back wait.


def _block_replaced() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _REPLACED)


def _unblock_replaced() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _REPLACED)


def _put_back_in_child() -> None:
    for signum, handler in _REPLACED.items():
        signal.signal(signum, handler)
    _unblock_replaced()
    _REPLACED.clear()


os.register_at_fork(
    before=_block_replaced,
    after_in_parent=_unblock_replaced,
    after_in_child=_put_back_in_child,
)
