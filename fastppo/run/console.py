"""Keeps a run alive when its console fails: the reader of a pipe ended, the terminal was closed, or
the disk is full.

Within `lasting_console` a stdout or stderr that cannot be written to is dropped without an error,
and the records of the run say so.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

STREAMS = ("stdout", "stderr")


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, except newline and tab."""


def printable(text: str) -> str:
    """The text with its control characters escaped: a server's answer may hold some."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


class LastingStream:
    """A text stream that discards everything after the first write that fails."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream = stream
        self._name = name
        self.notes: list[str] = []
        """A sentence once it is given up, which the records take."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._give_up(error)
        return len(text)

    def close(self) -> None:
        """Does nothing: a closed stream would lose later messages, or end the run."""
        self.flush()

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.notes.append(f"{self._name} could not be written ({error.strerror}) and is given up")
        self._discard()

    def _discard(self) -> None:
        # The stream keeps what it could not write, and would fail again at the program's end.
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


class NamedStream(LastingStream):
    """A text stream whose first write that fails is an error with its name."""

    def _give_up(self, error: OSError) -> None:
        self._discard()
        raise RuntimeError(f"{self._name} could not be written: {error.strerror}") from error


@contextmanager
def lasting_console(kind: type[LastingStream] = LastingStream) -> Iterator[None]:
    """Within it no write to stdout or stderr fails; or, of `NamedStream`, fails without a name."""
    before = {name: getattr(sys, name) for name in STREAMS}
    for name, stream in before.items():
        if stream is not None and not isinstance(stream, LastingStream):
            setattr(sys, name, kind(stream, name))
    try:
        yield
    finally:
        within = [getattr(sys, name) for name in STREAMS]
        for name, stream in before.items():
            setattr(sys, name, stream)
        for stream in filter(None, within):
            stream.flush()


def console_notes() -> list[str]:
    """Sentences about the streams that were dropped since the last call."""
    notes = []
    for name in STREAMS:
        stream = getattr(sys, name)
        # While rich shows a bar, it stands before the stream.
        stream = getattr(stream, "rich_proxied_file", stream)
        if isinstance(stream, LastingStream):
            notes += stream.notes
            stream.notes = []
    return notes
