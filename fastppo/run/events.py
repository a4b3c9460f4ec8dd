"""TensorBoard's events of a run: each part, from a start or a resume on, has a file of its own.

torch's `SummaryWriter` writes in a thread, which ends with a traceback where its directory is gone
or its disk is full. Here an iteration's events are appended at once, as its line of metrics.jsonl.
"""

from __future__ import annotations

import io
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastppo.data.files import append

NAME = re.compile(r"(events\.out\.tfevents\.)(\d+)(\..+)")
"""TensorBoard's name of a file: begun at this second."""


class EventFile:
    """The events of a part of a run.

    Args:
        directory: of all parts.
        first: the number of the first point to come; TensorBoard drops older ones from there on.
    """

    def __init__(self, directory: Path, first: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        _put_in_the_past(directory)
        began = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self.path = directory / f"events.out.tfevents.{began}"
        self._append(
            Event(file_version="brain.Event:2"),
            Event(step=first, session_log=SessionLog(status=SessionLog.START)),
        )

    def add(self, number: int, metrics: Mapping[str, float], warnings: Sequence[str] = ()) -> None:
        """Appends the points of an iteration, and its warnings as a text.

        Raises:
            RuntimeError: they could not be written.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from torch.utils.tensorboard.summary import scalar, text

        summaries = [scalar(name, value) for name, value in metrics.items()]
        if warnings:
            summaries.append(text("warnings", "\n\n".join(warnings)))
        self._append(*(Event(step=number, summary=summary) for summary in summaries))

    def _append(self, *events: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        data = io.BytesIO()
        records = RecordWriter(data)
        for event in events:
            event.wall_time = time.time()
            records.write(event.SerializeToString())
        append(self.path, data.getvalue(), make_directory=True)


def _put_in_the_past(directory: Path) -> None:
    """TensorBoard reads files by the time in their names, and would take those from before the
    clock was set back for the newest, whose beginning drops the points of all others."""
    now = int(time.time())
    named = [(path, NAME.match(path.name)) for path in sorted(directory.glob("events*"))]
    late = [(path, match) for path, match in named if match and int(match[2]) >= now]
    for age, (path, match) in enumerate(reversed(late), 1):
        path.rename(path.with_name(f"{match[1]}{now - age:010d}{match[3]}"))
