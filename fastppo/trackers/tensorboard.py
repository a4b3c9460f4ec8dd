"""TensorBoard events in the directory of the run. They are always written."""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.tensorboard import SummaryWriter

from fastppo.run.options import Options
from fastppo.run.trackers import TrackedRun, Tracker


class TensorBoard(Tracker):
    """Write scalars under the names of metrics.jsonl, and warnings as texts."""

    def __init__(self, run: TrackedRun, config: Options, *, first: int = 0) -> None:
        self._writer = SummaryWriter(run.directory / "tensorboard", purge_step=first)

    def metrics(self, number: int, metrics: dict[str, float], warnings: Sequence[str]) -> None:
        """Write the scalars of a record."""
        if warnings:
            self._writer.add_text("warnings", "\n\n".join(warnings), number)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
