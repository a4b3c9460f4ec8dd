"""Calls of users' functions: errors and time limits."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fastppo.plugins.calling import UserCodeError, call


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ValueError("x" * 100_000)])
def test_any_exception_becomes_a_short_message(error: BaseException) -> None:
    def raises() -> None:
        raise error

    with pytest.raises(UserCodeError, match=f"raised {type(error).__name__}") as caught:
        call(raises)
    assert len(str(caught.value)) < 600


def test_a_function_that_hangs_is_called_again_and_then_given_up() -> None:
    calls: list[int] = []
    release = threading.Event()

    def hangs_twice() -> str:
        calls.append(1)
        if len(calls) <= 2:
            release.wait()
        return "done"

    with pytest.raises(UserCodeError, match=r"did not return within 0\.01 s, 2 times"):
        call(hangs_twice, 0.01, attempts=2)
    assert call(hangs_twice, 30.0, attempts=2) == "done"
    assert len(calls) == 3
    release.set()
