"""How users' functions are called, and how long a run waits for them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fastppo.rewards.calling import UserCodeError, call, call_coroutine


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

    def hangs() -> None:
        calls.append(1)
        release.wait()

    with pytest.raises(UserCodeError, match=r"did not return within 0\.01 s, 3 times"):
        call(hangs, 0.01, attempts=3)
    assert len(calls) == 3
    release.set()


def test_a_second_call_that_is_in_time_counts() -> None:
    calls: list[int] = []
    release = threading.Event()

    def hangs_once() -> str:
        calls.append(1)
        if len(calls) == 1:
            release.wait()
        return "done"

    assert call(hangs_once, 0.5, attempts=2) == "done"
    release.set()


def test_a_coroutine_that_hangs_is_cancelled() -> None:
    async def hangs() -> None:
        await asyncio.sleep(60)

    with pytest.raises(UserCodeError, match=r"did not return within 0\.01 s"):
        asyncio.run(call_coroutine(hangs, 0.01))
