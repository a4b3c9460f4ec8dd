"""Trainer callbacks of a stage: records, checkpoints on request, progress."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from fastppo.data.world import World
from fastppo.models.device import device_name
from fastppo.run.log import SharedLog, read_jsonl
from fastppo.run.signals import StopRequest
from fastppo.stages.options import SupervisedConfig


class Records(TrainerCallback):
    """Write Trainer's logs to the run directory, indexed by optimizer step.

    Raises:
        FloatingPointError: the loss is not finite.
    """

    def __init__(self, config: SupervisedConfig, world: World | None = None) -> None:
        self.config = config
        self.world = world or World()
        self._log: SharedLog | None = None
        self._written: set[tuple[int, frozenset[str]]] = set()
        """(step, names) of each record: after a resume Trainer repeats the last ones."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run_dir = Path(self.config.output_dir)
        self._log = SharedLog(
            self.world,
            run_dir,
            self.config,
            index="step",
            first=state.global_step + 1 if state.global_step else 0,
            device=device_name(args.device),
        )
        for record in self.world.on_main_rank(lambda: read_jsonl(run_dir / "metrics.jsonl")):
            self._written.add((record.pop("step"), frozenset(record)))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "train_runtime" in logs:
            return  # Trainer's summary
        assert self._log is not None
        numbers = {name: float(value) for name, value in logs.items()}
        key = (state.global_step, frozenset(numbers))
        if key not in self._written:
            self._written.add(key)
            self._log.metrics(state.global_step, numbers)
        if not math.isfinite(numbers.get("loss", 0.0)):
            raise FloatingPointError(
                f"the loss is {numbers['loss']} at step {state.global_step}; lower learning_rate"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._log is not None
        self._log.close()


class Interruptions(TrainerCallback):
    """Write a checkpoint, or stop after the current step, on request of a signal."""

    def __init__(self, request: StopRequest) -> None:
        self.request = request

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.request.checkpoint_wanted() or self.request.stop:
            control.should_save = True
        if self.request.stop:
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.request.stop and not float(state.epoch).is_integer():
            control.should_evaluate = False  # no evaluation after an incomplete epoch


class ProgressBar(TrainerCallback):
    """Show Trainer's progress with `show`, the value of `fastppo.run.progress.progress`."""

    def __init__(self, show: Callable[..., None]) -> None:
        self.show = show

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.show(completed=state.global_step, total=state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.show(status=f"loss {float(logs['loss']):.3f}")
