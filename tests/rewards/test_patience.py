"""How long a reward is waited for."""

from __future__ import annotations

import threading
import time

import pytest

from fastppo.rewards import patience
from fastppo.rewards.patience import Patience, heartbeat


def test_a_function_in_time_gives_its_value_and_its_error() -> None:
    for limits in (Patience(), Patience(timeout=60)):
        assert limits.call("r", lambda: 7) == 7
        with pytest.raises(KeyError), heartbeat("waiting", print):
            limits.call("r", lambda: {}["absent"])
        with pytest.raises(SystemExit):
            limits.call("r", lambda: exit(0))


def test_a_function_that_hangs_is_called_again_and_then_given_up() -> None:
    calls, release = [], threading.Event()

    def hangs() -> None:
        calls.append(1)
        release.wait()

    with pytest.raises(TimeoutError, match=r"did not return within 0\.01 s, 3 times"):
        Patience(timeout=0.01, retries=2).call("r", hangs)
    assert len(calls) == 3
    release.set()


def test_a_second_call_that_is_in_time_is_taken() -> None:
    calls, release = [], threading.Event()

    def hangs_once() -> str:
        calls.append(1)
        if len(calls) == 1:
            release.wait()
        return "done"

    assert Patience(timeout=0.5, retries=1).call("r", hangs_once) == "done"
    release.set()


def test_while_it_waits_a_line_says_what_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "HEARTBEAT", 0.001)
    said: list[str] = []
    beaten = threading.Event()

    def say(sentence: str) -> None:
        said.append(sentence)
        beaten.set()

    Patience(say=say).call("judge", beaten.wait)
    assert said[0].startswith("waiting for reward 'judge' for ")
    count = len(said)
    time.sleep(0.01)
    assert len(said) == count, "it ends with the call"
