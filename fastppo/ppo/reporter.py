"""Messages to the user: progress, and one warning of each kind."""

from __future__ import annotations

from rich.console import Console

from fastppo.ppo.state import RunState
from fastppo.run.progress import say
from fastppo.run.watch import advice, kind_of


class Reporter:
    """Shows messages on the console of the first process.

    Args:
        console: where messages are shown; see `console_of_first`.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.notes: list[str] = []
        """Sentences to show with the next metrics."""
        self._warned: set[str] = set()
        """Kinds of warnings that were shown."""

    def say(self, message: str, style: str = "") -> None:
        """Show a message."""
        say(self.console, message, style)

    def warn(self, warning: str, where: str = "") -> None:
        """Show a warning and the page that helps, once for each kind of warning.

        Args:
            where: start of the message, such as the iteration.
        """
        kind = kind_of(warning)
        if kind not in self._warned:
            self._warned.add(kind)
            self.say(f"{where}{warning}{advice(warning)}", "yellow")

    def watch(self, state: RunState, metrics: dict[str, float]) -> list[str]:
        """Compare an iteration's metrics with the thresholds and show the warnings.

        Returns:
            The warnings, and last the reasons why the run stops.
        """
        warnings = self.notes + state.watch(metrics)
        self.notes = []
        for warning in warnings:
            self.warn(warning, f"iteration {state.iteration + 1}: ")
        return warnings + [f"stopped: {reason}" for reason in state.watch.stopped_by]
