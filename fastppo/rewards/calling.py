"""Calls of users' code: rewards, environments, agents, tools, functions of the prompts and
callbacks of PPO are called from here and nowhere else.

Called elsewhere are callbacks of the supervised stages, by transformers' `Trainer`, and a rollout
engine that is handed over, which is a part of the trainer: its random numbers are the run's. No
option names either; who hands one over has a program around it, and an exit is that program's.

Whatever a function raises becomes an error of one sentence, so neither a script's `exit()` nor a
cancelled task ends the run. Torch's random state and settings are restored after each call. Where a
function forks, only the original process returns from the call. Python cannot end a function that
hangs: without a timeout the run waits for it, with one the call is made in a thread that is
abandoned when the time is up.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import inspect
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastppo.rewards.settings import Settings
from fastppo.stopped import Stopped

LONGEST_MESSAGE = 500
"""Characters that are shown of what a user's function raised."""

NOT_OF_USERS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(importlib.__file__).parent}{os.sep}",
    "<frozen ",
)
"""What the names of files begin with that are no user's: this package's, and Python's own that
import one."""

FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)\n +(.+)')
"""As Python writes one in a traceback."""

ANSWERS_WITHIN = 1.0
"""Seconds in which an event loop that nothing blocks has answered."""


class UserCodeError(Exception):  # a RuntimeError with a StopIteration as its cause is Python's own
    """A user's function raised, which is the cause, or was too late: a predicate that follows the
    function's name in a sentence."""


def _silent(sentence: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The time limit of users' functions, and where sentences about them are shown."""

    timeout: float | None = None
    """Seconds that a call may take; None is no limit."""
    say: Callable[[str], None] = _silent
    """Shows a sentence to the user."""
    said: set[str] = field(default_factory=set)
    """Sentences that are shown once."""

    @contextlib.contextmanager
    def restoring(self, name: str) -> Iterator[None]:
        """Within it users' code is called; afterwards torch's random state and its settings are
        what they were. What had changed is said once.

        Args:
            name: of what is called, `reward 'count'`.
        """
        before: list[Any] = [Settings.now()]
        if sys.modules.get("torch"):  # `fastppo check` calls users' code without it
            from fastppo.rewards.torch_settings import TorchSettings

            before.append(TorchSettings.now())
        try:
            yield
        finally:
            changed = [what for settings in before for what in settings.restore()]
            for what in changed:
                sentence = f"{name} changed {what}, which is put back after each call"
                if sentence not in self.said:
                    self.said.add(sentence)
                    self.say(sentence)


def call(function: Callable[[], Any], timeout: float | None = None, attempts: int = 1) -> Any:
    """What a user's function returns.

    Args:
        timeout: seconds, None for no limit.
        attempts: calls, if each of them is too late.

    Raises:
        UserCodeError: it raised, or did not return in time.
    """
    if timeout is None:
        return _called(function)
    for _ in range(attempts):
        future = call_in_thread(function)
        concurrent.futures.wait([future], timeout)
        if future.done():
            return future.result()
    times = f", {attempts} times" if attempts > 1 else ""
    raise UserCodeError(f"did not return within {timeout:g} s{times}")


def _called(function: Callable[[], Any]) -> Any:
    with _errors(), _one_process():
        return function()


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Whatever is raised within, whose text may raise itself, is a `UserCodeError`."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and _is_of_a_signal(error):
            raise
        raise UserCodeError(f"raised {_text_of(error)}") from error


def _is_of_a_signal(error: KeyboardInterrupt) -> bool:
    """Whether a handler raised it, and no user's code. A run that listens has no such handler."""
    in_main = threading.current_thread() is threading.main_thread()
    by_keyboard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return in_main and (isinstance(error, Stopped) or by_keyboard)


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """A process that the block has forked ends with it, and trains nothing."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(1)


def call_in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Calls the function in a thread of its own. The future has what it returns, or a
    `UserCodeError`."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # nobody can cancel it

    def work() -> None:
        try:
            future.set_result(_called(function))
        except UserCodeError as error:  # raised where the result is asked for
            future.set_exception(error)

    # A daemon, for one that never returns would keep the program from its end.
    threading.Thread(target=work, name="user code", daemon=True).start()
    return future


class EventLoop:
    """An event loop in a thread of its own, so that it works where another one runs. It stays for
    the whole run: what environments hold, such as a connection, belongs to it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon, for one that a coroutine blocks would keep the program from its end.
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(
        self, functions: Sequence[Callable[[], Any]], timeout: float | None = None
    ) -> list[Any]:
        """What functions return that may be coroutine functions; all of them wait at once.

        Returns:
            list: what each returned, or a `UserCodeError` if it raised or was too late.
        """
        futures = [
            asyncio.run_coroutine_threadsafe(await_call(function), self._loop)
            for function in functions
        ]
        concurrent.futures.wait(futures, timeout)
        results: list[Any] = []
        for future in futures:
            if not future.done():
                future.cancel()
                results.append(UserCodeError(f"did not return within {timeout:g} s"))
            elif future.cancelled():
                results.append(UserCodeError("cancelled its own task"))
            else:
                error = future.exception()
                results.append(future.result() if error is None else error)
        return results

    def answers(self) -> bool:
        """Whether nothing blocks the loop."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(done.set)
        return done.wait(ANSWERS_WITHIN)

    def close(self) -> None:
        """Ends the loop, and what still waits in it. One that is blocked, or with a coroutine that
        takes no end, is left to the end of the program."""
        if not self.answers():
            return
        ending = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        concurrent.futures.wait([ending], ANSWERS_WITHIN)
        if not ending.done():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWERS_WITHIN)
        if not self._thread.is_alive():
            self._loop.close()


async def await_call(function: Callable[[], Any]) -> Any:
    """What a user's function returns that may be a coroutine function, to a coroutine.

    Raises:
        UserCodeError: it raised.
    """
    try:
        with _errors(), _one_process():
            returned = function()
            return await returned if inspect.isawaitable(returned) else returned
    except UserCodeError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # nobody waits for it any more
            raise asyncio.CancelledError from None
        raise


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def place_of(error: BaseException | None) -> str:
    """Where a user's function raised, which ends a sentence: file, line, name and code of the last
    frame in the first file that is a user's or a library's. Nothing where there is none."""
    if error is None:
        return ""
    frames = [
        frame
        for frame in [*traceback.extract_tb(error.__traceback__), *_frames_of_worker(error)]
        if not frame.filename.startswith(NOT_OF_USERS)
    ]
    if not frames:
        return ""
    # Below may be a library's frames, which say little of what it was asked.
    frame = [f for f in frames if f.filename == frames[0].filename][-1]
    code = f": {frame.line}" if frame.line else ""
    return f" ({frame.filename}, line {frame.lineno}, in {frame.name}{code})"


def _frames_of_worker(error: BaseException) -> list[traceback.FrameSummary]:
    """Frames of what a worker of a pool raised, whose traceback is in the text of the cause."""
    text = getattr(error.__cause__, "tb", None)
    if not isinstance(text, str):
        return []
    return [
        traceback.FrameSummary(file, int(line), name, lookup_line=False, line=code)
        for file, line, name, code in FRAME.findall(text)
    ]


def traceback_of(error: BaseException | None) -> str:
    """The traceback of what a user's function raised; nothing where it raised nothing."""
    return "" if error is None else "".join(traceback.format_exception(error))


def _text_of(error: BaseException) -> str:
    """What a user's function raised, shortened; its text may raise itself."""
    try:
        text = repr(error)
    except Exception:  # of whatever its class does
        text = type(error).__name__
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]} …"
