"""Console output without errors: a closed terminal or a full disk must not end a run."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, except newline and tab."""


def printable(text: str) -> str:
    """Escape control characters, as in the reply of a server."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


class LastingStream:
    """A text stream without errors: it discards its output after a failed write."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._discarding():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._discarding():
            self._stream.flush()

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # The stream would repeat the failed write at exit.
            with suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


@contextmanager
def lasting_console() -> Iterator[None]:
    """Within the block no write to stdout or stderr raises."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and LastingStream(stream) for stream in before)
    try:
        yield
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        sys.stdout, sys.stderr = before
