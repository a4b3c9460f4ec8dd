"""What the tests of PPO run under."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take longer than the runs here; tests/run/report/test_report.py looks at them."""
    monkeypatch.setattr("fastppo.run.report.callback.write_report", lambda run_dir: None)
