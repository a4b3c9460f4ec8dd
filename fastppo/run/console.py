"""Keep a run alive when its console breaks, by a closed terminal or a full disk."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Pattern of control characters, except newline and tab."""


def printable(text: str) -> str:
    """Escape control characters, for example in the reply of a server."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


class LastingStream:
    """Text stream that raises no errors: after a failed write it discards its output."""

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
            # At exit, the stream would repeat the failed write.
            with suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


@contextmanager
def lasting_console() -> Iterator[None]:
    """Let no write to stdout or stderr raise within the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and LastingStream(stream) for stream in before)
    try:
        yield
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        sys.stdout, sys.stderr = before
