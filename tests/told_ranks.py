"""A run of several processes whose callbacks write down, in a file for each, what they hear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import distributed
from transformers import TrainerCallback

from runs import make_trainer


class StopsOnTheSecond(TrainerCallback):
    """Asks for the end after the first iteration, on the second rank alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _note(self, event: str, state: Any) -> None:
        with (self.folder / f"heard-{distributed.get_rank()}.txt").open("a") as file:
            file.write(f"{event} {state.global_step} {state.is_world_process_zero}\n")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("begin", state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("end", state)
        control.should_training_stop = distributed.get_rank() == 1

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("over", state)


def train(folder: str) -> int:
    """The iterations that are done of five."""
    trainer = make_trainer(Path(folder), iterations=5, callbacks=[StopsOnTheSecond(Path(folder))])
    trainer.train()
    return trainer.state.iteration
