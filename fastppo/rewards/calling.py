"""Calls of users' code: rewards and environments are called from here and nowhere else.

Python cannot end a function that hangs. So a function is waited for without limit unless a limit is
given; then it is called in a thread, which is abandoned when the time is up.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

LONGEST_MESSAGE = 500
"""Characters that are shown of what a user's function raised."""

RAISED = (Exception, SystemExit, asyncio.CancelledError)
"""What a user's function may raise without ending the run by it: a script's exit() is no way to end
a run, nor is a task that was cancelled."""


class UserCodeError(RuntimeError):
    """A user's function raised, which is the cause, or was too late: a predicate that follows the
    function's name in a sentence."""


def _silent(sentence: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How long a run waits for users' functions, and where it says what they did."""

    timeout: float | None = None
    """Seconds that a call may take; None is no limit."""
    say: Callable[[str], None] = _silent
    """Shows a sentence to the user."""


def call(function: Callable[[], Any], timeout: float | None = None, attempts: int = 1) -> Any:
    """What a user's function returns.

    Args:
        timeout: seconds, None for no limit.
        attempts: calls, if each of them is too late.

    Raises:
        UserCodeError: it raised, or did not return in time.
    """
    try:
        if timeout is None:
            return function()
        for _ in range(attempts):
            future = in_thread(function, timeout)
            if future.done():
                return future.result()
    except RAISED as error:
        raise UserCodeError(_raised(error)) from error
    times = f", {attempts} times" if attempts > 1 else ""
    raise UserCodeError(f"did not return within {timeout:g} s{times}")


async def call_coroutine(function: Callable[[], Any], timeout: float | None = None) -> Any:
    """`call` of a function that may be a coroutine function, in an event loop."""
    try:
        returned = function()
        if not inspect.isawaitable(returned):
            return returned
        task = asyncio.ensure_future(returned)
        done, _ = await asyncio.wait([task], timeout=timeout)
        if done:
            return task.result()
        task.cancel()
    except RAISED as error:
        raise UserCodeError(_raised(error)) from error
    raise UserCodeError(f"did not return within {timeout:g} s")


def in_thread(function: Callable[[], Any], timeout: float) -> Future[Any]:
    """Calls the function in a thread and waits for it; the future is not done if it is too late."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=work, name="user code", daemon=True).start()
    concurrent.futures.wait([future], timeout)
    return future


class EventLoop:
    """An event loop in a thread of its own, so that it works where another one runs. It stays for
    the whole run: what environments hold, such as a connection, belongs to it."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._thread = ThreadPoolExecutor(1, "user code")
        weakref.finalize(self, _close, self._runner, self._thread)

    def run(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """What the coroutines return; all of them wait at once."""

        async def together() -> list[Any]:
            return await asyncio.gather(*coroutines)

        return self._thread.submit(lambda: self._runner.run(together())).result()


def _close(runner: asyncio.Runner, thread: ThreadPoolExecutor) -> None:
    thread.shutdown()
    runner.close()


def _raised(error: BaseException) -> str:
    text = f"raised {error!r}"
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]} …"
