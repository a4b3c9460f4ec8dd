"""Setup of all tests: seeds, NaN in uninitialized memory, Triton without a GPU."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

if TYPE_CHECKING:  # this imports transformers, which must follow the variable below
    from command_line import Folder, Run

# No deadlines, and the same examples in every run.
hypothesis.settings.register_profile("fastppo", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("fastppo")

# The tensors are small: a second thread slows them down.
torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated, so it must be set before importing triton. Its
    # interpreter is slow but computes the same.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `allocate` to fill memory with NaN, or the largest integer."""

    def allocate_and_fill(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = allocate(*args, **kwargs)
        if x.device.type == "meta":
            return x
        if x.is_floating_point() or x.is_complex():
            return x.detach().fill_(float("nan")).requires_grad_(x.requires_grad)
        return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)

    return allocate_and_fill


@pytest.fixture(scope="session", autouse=True)
def _unwritten_memory_is_nan() -> Iterator[None]:
    """An output not written by a kernel is NaN, instead of an earlier correct result.

    torch has this only together with deterministic algorithms, which users do not run.
    """
    with torch.device("meta"):
        torch.empty(0)  # makes torch cache its functions before they are replaced
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, _poisoned(getattr(torch, name)))
        for name in ("new_empty", "new_empty_strided"):
            patch.setattr(torch.Tensor, name, _poisoned(getattr(torch.Tensor, name)))
        yield


@pytest.fixture
def default_signals() -> Iterator[None]:
    """The default handlers of SIGINT and SIGHUP.

    A background job of a shell inherits an ignored SIGINT, and `nohup` an ignored SIGHUP. A run
    keeps ignoring them.
    """
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, hangup)
    signal.signal(signal.SIGINT, interrupt)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A folder with the inputs of `fastppo train`."""
    from command_line import Folder

    return Folder(tmp_path)


@pytest.fixture
def run(folder: Folder, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs `fastppo train` and returns its exit code and output."""
    from fastppo import cli

    def run(**options: object) -> tuple[int, str]:
        capsys.readouterr()
        code = cli.main(folder.flags(**{"iterations": 1} | options))
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return code, said

    return run


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test has the same random numbers in any order."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip `gpu` tests without a GPU, and `slow` tests unless requested."""
    if "slow" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: pytest -m slow"))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were skipped for each reason, instead of a line per test."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"SKIPPED [{count}] {reason}")
