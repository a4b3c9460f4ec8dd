"""Call users' code, and explain its errors by the user's file and line.

Rewards, environments, agents, tools, adapters and callbacks are called by `call`. Every exception,
`SystemExit` included, becomes a `UserCodeError`, and torch's random state is restored after each
call. Python cannot stop a function that hangs, so with a time limit the function runs in a daemon
thread and is abandoned when the time is up.

Objectives, advantages and optimizers are part of the trainer's own computation: they share its
random state and have no time limit. `explaining` wraps them. Rollout engines, too, share the
trainer's random state, so that a resumed run samples the same responses.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import functools
import inspect
import os
import sysconfig
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST_MESSAGE = 500
"""Characters of an exception's text that a message shows."""

PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"

SHUTDOWN_TIMEOUT = 1.0
"""Seconds to wait for coroutines that are cancelled."""


class UserCodeError(Exception):  # Python turns a RuntimeError from a StopIteration into its own
    """A user's function raised or exceeded its time limit.

    The text is a predicate that follows the function's name. The cause is the user's exception.
    """


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options for calls of users' functions."""

    timeout: float | None = None
    """Time limit per call in seconds. None means no limit."""


_SHARES_RANDOM_STATE: ContextVar[bool] = ContextVar("shares_random_state", default=False)
"""Whether another thread draws from torch's generators, so that their state must not be reset."""


def shares_random_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of a thread, so that `call` in it leaves torch's random state alone."""

    @functools.wraps(function)
    def sharing(*arguments: Any, **keywords: Any) -> Any:
        token = _SHARES_RANDOM_STATE.set(True)
        try:
            return function(*arguments, **keywords)
        finally:
            _SHARES_RANDOM_STATE.reset(token)

    return sharing


@contextlib.contextmanager
def _restoring_random_state() -> Iterator[None]:
    """Restore torch's random state at the end of the block."""
    import torch  # options are parsed without it

    if _SHARES_RANDOM_STATE.get():
        yield
        return

    uses_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    with torch.random.fork_rng([torch.cuda.current_device()] if uses_gpu else []):
        yield


def call(function: Callable[[], Any], timeout: float | None = None, attempts: int = 1) -> Any:
    """Return what a user's function returns.

    Args:
        timeout: seconds per call; None means no limit.
        attempts: calls before a function that exceeds its time limit is given up.

    Raises:
        UserCodeError: the function raised or exceeded its time limit.
    """
    with _restoring_random_state():
        if timeout is None:
            with _as_user_code_error():
                return function()
        for _ in range(attempts):
            future = call_in_thread(function)
            concurrent.futures.wait([future], timeout)
            if future.done():
                return future.result()
    times = f", {attempts} times" if attempts > 1 else ""
    raise UserCodeError(f"did not return within {timeout:g} s{times}")


@contextlib.contextmanager
def _as_user_code_error() -> Iterator[None]:
    """Convert every exception except Ctrl-C to `UserCodeError`."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = repr(error)
        if len(text) > LONGEST_MESSAGE:
            text = f"{text[:LONGEST_MESSAGE]} …"
        raise UserCodeError(f"raised {text}") from error


def call_in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Call a function in a daemon thread, which does not delay the end of the program."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            with _as_user_code_error():
                future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="user code", daemon=True).start()
    return future


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, in a thread if this one has a running loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


class EventLoop:
    """An event loop in a daemon thread, for environments with coroutine methods.

    It lives as long as the environments, because their connections belong to it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(
        self, functions: Sequence[Callable[[], Any]], timeout: float | None = None
    ) -> list[Any]:
        """Call functions or coroutine functions concurrently.

        Returns:
            list: each function's result, or a `UserCodeError` if it failed.
        """
        with _restoring_random_state():
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
            else:
                results.append(future.exception() or future.result())
        return results

    def close(self) -> None:
        """Cancel the running coroutines and stop the loop."""
        ending = asyncio.run_coroutine_threadsafe(_cancel_other_tasks(), self._loop)
        concurrent.futures.wait([ending], SHUTDOWN_TIMEOUT)
        if ending.done():  # otherwise a coroutine blocks the loop, which ends with the program
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def await_call(function: Callable[[], Any]) -> Any:
    """Call a function or coroutine function from a coroutine.

    Raises:
        UserCodeError: the function raised.
    """
    try:
        with _as_user_code_error():
            returned = function()
            return await returned if inspect.isawaitable(returned) else returned
    except UserCodeError as error:
        # Before Python 3.13, a TaskGroup that failed leaves its task with a request to cancel it.
        was_cancelled = isinstance(error.__cause__, asyncio.CancelledError)
        task = asyncio.current_task()
        if was_cancelled and task is not None and task.cancelling():
            raise asyncio.CancelledError from None  # by this module, so nobody reads the result
        raise


class PluginError(RuntimeError):
    """A function of the trainer's computation raised, such as an objective or an advantage."""


def explaining(
    name: str,
    function: Callable[..., Any],
    is_passed: Callable[[Exception], bool] = lambda error: False,
) -> Callable[..., Any]:
    """Wrap a function of the trainer's computation, so that its exceptions name the user's line.

    Args:
        name: what the function is, at the start of the message.
        is_passed: tells the exceptions that the trainer handles, which are raised as they are.

    Returns:
        The function, which raises PluginError.
    """

    @functools.wraps(function)
    def explained(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except Exception as error:
            if is_passed(error):
                raise
            raise PluginError(f"{name} raised {error!r}{place_of(error)}") from error

    return explained


async def _cancel_other_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def keywords_for(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the columns that a function has parameters for."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built-in functions without a signature
        return {}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return copy.deepcopy({k: v for k, v in columns.items() if takes_all or k in parameters})


def place_of(error: BaseException | None) -> str:
    """Return the user's line that raised, as the end of a message; "" if there is none.

    Of the traceback's first file outside this package, take the innermost frame. Frames below it
    are a library's.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__ if error else None)
        if not _is_internal(frame.filename)
    ]
    if not frames:
        return ""
    frame = [f for f in frames if f.filename == frames[0].filename][-1]
    code = f": {frame.line}" if frame.line else ""
    return f" ({frame.filename}, line {frame.lineno}, in {frame.name}{code})"


def _is_internal(file: str) -> bool:
    """Whether a file belongs to this package or to Python itself."""
    if "site-packages" in file.removeprefix(PACKAGE):
        return False
    return file.startswith((PACKAGE, STANDARD_LIBRARY, "<frozen "))


def traceback_of(error: BaseException | None) -> str:
    """Format an exception's traceback; "" for None."""
    return "" if error is None else "".join(traceback.format_exception(error))
