"""How users' functions are called, and how long a run waits for them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fastppo.rewards.calling import UserCodeError, call


def test_a_function_in_time_returns_its_value_and_raises_its_error() -> None:
    for timeout in (None, 60.0):
        assert call(lambda: 7, timeout) == 7
        with pytest.raises(UserCodeError, match=r"^raised KeyError\('absent'\)$") as caught:
            call(lambda: {}["absent"], timeout)
        assert isinstance(caught.value.__cause__, KeyError)
        with pytest.raises(UserCodeError, match=r"^raised SystemExit\(0\)$"):
            call(lambda: exit(0), timeout)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ValueError("x" * 100_000)])
def test_whatever_is_raised_is_one_sentence(error: BaseException) -> None:
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
