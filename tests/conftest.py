"""What every test runs under: seeded draws, unwritten memory that shows, Triton anywhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

if TYPE_CHECKING:  # it imports transformers, for which the variable below must stand
    from command_line import Folder, Run

# No test depends on the clock, and each draws the same examples in every run.
hypothesis.settings.register_profile("fastppo", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("fastppo")

# The tensors here are small: on a busy machine a second thread costs far more than it gives.
torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated, so it must stand before the first import of
    # triton. Without a GPU the kernels run in Triton's interpreter: slow, and the same arithmetic.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`allocate`, with NaN (or the largest integer) in memory that would hold anything."""

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
    """An output that a kernel forgets to write is NaN, not yesterday's right answer.

    torch can do this by itself, but only with deterministic algorithms switched on, and then a test
    of determinism would test torch's replacements in place of what users run.
    """
    with torch.device("meta"):
        torch.empty(0)  # torch remembers which functions a device context is for: its own
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
    """What a run of `fastppo train` needs, in a folder."""
    from command_line import Folder

    return Folder(tmp_path)


@pytest.fixture
def run(folder: Folder, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `fastppo train` there: its exit code, and what it said."""
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
    """Each test draws the same numbers whether it runs alone, in a suite, or in another order."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked `gpu` is skipped where there is none, and what is `slow` unless it is asked
    for."""
    if "slow" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: pytest -m slow"))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
