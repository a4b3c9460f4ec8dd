"""What a run logs is shown on its console."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from rich.console import Console

from fastppo.run.progress import PACKAGE_LOGGER, only_warnings, show_messages

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
