"""Signals that stop a run or ask for a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import pytest
from processes import FORKSERVER

from fastppo.run.signals import STOPPING, PhaseEndedError, listening, stopping_at_once
from fastppo.stopped import Stopped

pytestmark = pytest.mark.usefixtures("default_signals")


def _send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", STOPPING)
def test_before_training_the_first_signal_stops(signum: signal.Signals) -> None:
    with pytest.raises(Stopped, match=f"^stopped by {signum.name}$") as stopped, stopping_at_once():
        _send(signum)
    assert stopped.value.exit_code == 128 + signum


@pytest.mark.parametrize("signum", STOPPING)
def test_while_training_the_first_signal_is_noted_and_a_second_ends_the_process(
    signum: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {signum: signal.getsignal(signum) for signum in STOPPING}
    with listening() as request:
        request.end_phase()
        _send(signum)
        _send(signal.SIGHUP)  # a closing terminal sends it twice
        for second in (signal.SIGINT, signal.SIGTERM):
            assert signal.getsignal(second) is signal.SIG_DFL
        with pytest.raises(PhaseEndedError):
            request.end_phase()
    assert {signum: signal.getsignal(signum) for signum in STOPPING} == before
    assert signum.name in capfd.readouterr().err


def test_a_forked_process_ends_at_the_first_signal() -> None:
    """Pools end their workers by SIGTERM."""
    with listening() as request:
        child = os.fork()
        if child == 0:
            _send(signal.SIGTERM)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM
        assert request.stop is None


@pytest.mark.parametrize("handling", [listening, stopping_at_once])
def test_a_forked_process_works_on_after_the_first_ctrl_c(handling: Any) -> None:
    """A terminal sends Ctrl-C to all processes, and the run still needs a reward's workers, even
    those of a pool that was made before the training."""
    with handling():
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                _send(signal.SIGINT)
                os.write(writer, b"works on")
                _send(signal.SIGINT)
            os._exit(0)
        os.close(writer)
        assert os.read(reader, 8) == b"works on"
        assert os.waitpid(child, 0)[1] == signal.SIGINT


def test_before_training_the_first_signal_ends_the_workers() -> None:
    """Python would wait for the workers at its end."""
    worker = FORKSERVER.Process(target=time.sleep, args=(1000,), daemon=True)
    worker.start()
    with pytest.raises(Stopped), stopping_at_once():
        _send(signal.SIGINT)
    worker.join(60)
    assert worker.exitcode == -signal.SIGTERM


def test_a_checkpoint_is_requested_once() -> None:
    with listening() as request:
        assert not request.checkpoint_wanted()
        _send(signal.SIGUSR1)
        assert request.checkpoint_wanted()
        assert not request.checkpoint_wanted()
        assert request.stop is None


def test_an_ignored_signal_stays_ignored() -> None:
    """Signals are ignored under `nohup` and in a shell's background jobs."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping_at_once(), listening() as request:
            _send(signal.SIGHUP)
            assert request.stop is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
