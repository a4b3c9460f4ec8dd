"""What a run logs is shown on its console."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from fastppo.activity import begin_count, count, during
from fastppo.run.progress import (
    LINE_SECONDS,
    PACKAGE_LOGGER,
    PHASE_SECONDS,
    only_warnings,
    progress,
    show_messages,
)

YELLOW = "\x1b[33m"


@pytest.fixture(autouse=True)
def unchanged_logger() -> Iterator[None]:
    """Restore the handlers and the level of the logger, which belong to the process."""
    handlers, level = PACKAGE_LOGGER.handlers[:], PACKAGE_LOGGER.level
    yield
    PACKAGE_LOGGER.handlers[:] = handlers
    PACKAGE_LOGGER.setLevel(level)


def _shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_message_is_one_line_without_markup_and_warnings_are_yellow() -> None:
    console = Console(
        file=io.StringIO(),
        width=40,
        force_terminal=True,
        color_system="standard",
        legacy_windows=False,
    )
    show_messages(console)
    logger = logging.getLogger("fastppo.some.module")
    path = "runs/" + "long/" * 20 + "[bold]100%[/bold]"
    logger.info(f"resuming from {path}")
    assert _shown(console) == f"resuming from {path}\n"
    logger.warning("a [warning]")
    assert _shown(console).endswith(f"{path}\n{YELLOW}a [warning]\x1b[0m\n")


def test_messages_go_to_the_console_of_the_last_call_alone() -> None:
    consoles = [Console(file=io.StringIO()) for _ in range(2)]
    other = logging.NullHandler()
    PACKAGE_LOGGER.addHandler(other)
    for console in consoles:
        show_messages(console)
        logging.getLogger("fastppo.module").info("hello")
    assert [_shown(console) for console in consoles] == ["hello\n", "hello\n"]
    assert other in PACKAGE_LOGGER.handlers, "a handler of the user is kept"


def test_a_dry_run_shows_warnings_alone() -> None:
    console = Console(file=io.StringIO())
    show_messages(console)
    logger = logging.getLogger("fastppo.module")
    with only_warnings():
        logger.info("hidden")
        logger.warning("a warning")
    logger.info("shown again")
    assert _shown(console) == "a warning\nshown again\n"


def test_a_long_phase_is_printed_in_a_log_file() -> None:
    """A thread looks once a second, so the clock is far ahead, and the test waits for the line."""
    now = [0.0]
    console = Console(file=io.StringIO(), width=80, get_time=lambda: now[0])
    with progress("PPO", console, total=40) as show:
        show(completed=1, status="reward 0.5")
        now[0] += LINE_SECONDS
        with during("generating"):
            begin_count(64)
            count(41)
            now[0] += PHASE_SECONDS + 0.25
            deadline = time.monotonic() + 60
            while "generating" not in _shown(console) and time.monotonic() < deadline:
                time.sleep(0.01)
    first, phase = _shown(console).splitlines()
    assert first.startswith("PPO 1/40  reward 0.5  0 s")
    assert phase == "PPO 2/40  generating, 41 of 64 done, 30 s"


def test_a_terminal_shows_the_phase_below_the_bar() -> None:
    now = [0.0]
    console = Console(file=io.StringIO(), width=80, force_terminal=True, get_time=lambda: now[0])
    with progress("PPO", console, total=40), during("scoring"):
        now[0] += 5
    assert "scoring" not in _shown(console)
    with progress("PPO", console, total=40) as show, during("scoring"):
        now[0] += 5
        show(completed=1, status="", refresh=True)
        assert "scoring, 5 s" in _shown(console)
