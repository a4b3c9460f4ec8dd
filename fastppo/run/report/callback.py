"""The report and the model cards of a run, written by a callback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from fastppo.run.report.card import write_card
from fastppo.run.report.report import write_report


class Report(TrainerCallback):
    """Write report.html at the end of a run, and README.md next to each policy.

    Raises:
        RuntimeError: a file could not be written.
    """

    def on_policy_saved(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        directory: Path,
        iterations: int | None = None,
        **_: Any,
    ) -> None:
        """Write the model card of a policy after this many iterations; None means all."""
        if state.is_world_process_zero:
            with _explaining("the model card"):
                write_card(Path(args.output_dir), directory, iterations=iterations)

    def on_run_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the report of the iterations so far."""
        if state.is_world_process_zero:
            with _explaining("the report"):
                write_report(args.output_dir)


@contextmanager
def _explaining(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"{what} could not be written: {error}") from error
