"""What signals ask for, and when it is looked at."""

from __future__ import annotations

import os
import signal

import pytest

from fastppo.run.signals import STOPPING, PhaseEndedError, listening, stopping_at_once
from fastppo.stopped import Stopped

pytestmark = pytest.mark.usefixtures("signals_are_heard")


def _send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", STOPPING)
def test_before_training_the_first_signal_stops(signum: signal.Signals) -> None:
    with pytest.raises(Stopped, match=f"^stopped by {signum.name}$") as stopped, stopping_at_once():
        _send(signum)
    assert stopped.value.exit_code == 128 + signum


@pytest.mark.parametrize("signum", STOPPING)
def test_while_training_the_first_is_remembered_and_the_second_is_the_kernels(
    signum: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {signum: signal.getsignal(signum) for signum in STOPPING}
    with listening() as request:
        request.end_phase()
        _send(signum)
        assert request.stop == signum
        for second in (signal.SIGINT, signal.SIGTERM):
            assert signal.getsignal(second) is signal.SIG_DFL
        # A terminal that closes sends it twice, the shell and then the kernel.
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with pytest.raises(PhaseEndedError):
            request.end_phase()
    assert {signum: signal.getsignal(signum) for signum in STOPPING} == before
    assert f"{signum.name}: stopping with a checkpoint" in capfd.readouterr().err


def test_a_checkpoint_is_asked_for_once() -> None:
    with listening() as request:
        assert not request.checkpoint_wanted()
        _send(signal.SIGUSR1)
        assert request.checkpoint_wanted()
        assert not request.checkpoint_wanted()
        assert request.stop is None


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping_at_once(), listening() as request:
            _send(signal.SIGHUP)
            assert request.stop is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
