"""Callbacks with the interface of transformers' `Trainer`.

    class Printer(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            print(state.global_step, logs["reward"])

A step is an iteration, and `state.global_step` counts the finished ones. The events are
`on_train_begin`, `on_step_begin`, `on_evaluate` (`metrics`), `on_log` (`logs`), `on_step_end`,
`on_save` and `on_train_end`, and three of our own: `on_samples` (`samples`, as in samples.jsonl),
`on_policy_saved` (`directory`, and `iterations` of an earlier policy) and `on_run_end`, which also
comes when a signal or an error ends the run.
Metrics have the names of metrics.jsonl, with `eval_` for `eval/`, as in transformers. `args` holds
the options of the run. `control.should_training_stop` ends the run after the iteration,
`should_save` writes a checkpoint after it, and `should_evaluate` evaluates in the next iteration.
Checkpoints do not contain the state of callbacks. The callbacks of `DEFAULT` belong to every run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fastppo.data.world import World
from fastppo.functional.scalars import describe
from fastppo.plugins import entry_points
from fastppo.plugins.calling import UserCodeError, call, place_of
from fastppo.run.options import Options
from fastppo.run.trackers import PROJECT

FLAGS = ("should_training_stop", "should_save", "should_evaluate")

DEFAULT = ("report",)
"""Entry points of the group `fastppo.callbacks` that every run has."""


class Arguments:
    """`args` of a callback: the options of the run, and the defaults of `TrainingArguments`."""

    def __init__(self, config: Options, world: World | None = None, **more: Any) -> None:
        self._config = config
        self._world = world or World()
        defaults = {
            field.name: None if field.default is MISSING else field.default
            for field in fields(TrainingArguments)
            if field.init and not hasattr(config, field.name)
        }
        self.__dict__.update(defaults | config.to_dict() | more)

    def to_dict(self) -> dict[str, Any]:
        """Return the options of the run."""
        return self._config.to_dict()

    def to_json_string(self) -> str:
        """Return the options as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return the options, as text where TensorBoard needs it."""
        return {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in self.to_dict().items()
        }

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._world.size

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return self._world.rank

    @property
    def should_log(self) -> bool:
        """Whether this process writes the log."""
        return self._world.is_main

    @property
    def should_save(self) -> bool:
        """Whether this process writes files."""
        return self._world.is_main


class Callbacks:
    """The callbacks of a run, on every rank. A request on one rank holds for all ranks.

    Args:
        callbacks: objects or classes.
        config: the options.
        parts: further keywords of every event: model, processing_class, optimizer.

    Raises:
        ValueError: one of them is not a `TrainerCallback`.
        TypeError: `callbacks` is not a list.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        config: Any,
        world: World | None = None,
        **parts: Any,
    ) -> None:
        if not isinstance(callbacks, list | tuple):
            raise TypeError(f"callbacks must be a list, got {describe(callbacks)}")
        self.world = world or World()
        self.parts = parts
        default = [entry_points.load(entry_points.CALLBACKS, name) for name in DEFAULT]
        self.callbacks = [self._instance(callback) for callback in [*default, *callbacks]]
        self.args = Arguments(config, self.world, project=PROJECT)
        self.control = TrainerControl()
        self.state = TrainerState(max_steps=config.iterations)
        self.state.is_local_process_zero = self.world.is_main
        self.state.is_world_process_zero = self.world.is_main

    @property
    def stop(self) -> bool:
        """Whether a callback ends the run."""
        return self.control.should_training_stop

    def take(self, flag: str) -> bool:
        """Return whether a callback has set a flag, and clear it."""
        wanted = getattr(self.control, flag)
        setattr(self.control, flag, False)
        return wanted

    def begin(self, done: int) -> None:
        """Start the run after `done` iterations."""
        self.control = TrainerControl()
        self.state.global_step = done
        self.tell("on_train_begin")

    def logged(self, number: int, metrics: dict[str, float]) -> None:
        """Report the metrics of an iteration."""
        self.state.global_step = number + 1
        logs = {
            f"eval_{name.removeprefix('eval/')}" if name.startswith("eval/") else name: value
            for name, value in metrics.items()
        }
        evaluated = {name: value for name, value in logs.items() if name.startswith("eval_")}
        if evaluated:
            self.tell("on_evaluate", metrics=evaluated)
        self.state.log_history.append({**logs, "step": number + 1})
        self.tell("on_log", logs=logs)

    def step_ended(self) -> bool:
        """Report the end of an iteration and return whether a callback requests a checkpoint."""
        self.tell("on_step_end")
        return self.take("should_save")

    def saved(self) -> None:
        """Report a checkpoint."""
        self.tell("on_save")

    def policy_saved(self, directory: Path, iterations: int | None = None) -> None:
        """Report a policy that transformers can load.

        Args:
            iterations: number of iterations of the policy; None for all of the run.
        """
        self.tell("on_policy_saved", directory=directory, iterations=iterations)

    def run_ended(self, *, has_failed: bool = False) -> None:
        """Report the end of a run.

        Args:
            has_failed: an error ended the run. It may be local to this rank, so do not synchronize,
                and no error of a callback replaces it.
        """
        if not has_failed:
            self.tell("on_run_end")
            return
        with suppress(Exception):
            self._notify("on_run_end", {})

    def tell(self, event: str, **more: Any) -> None:
        """Call the method of this name of every callback that has one."""

        def notify() -> list[bool]:
            self._notify(event, more)
            return [getattr(self.control, flag) for flag in FLAGS]

        rank_flags = self.world.gather_results(notify)
        for i, flag in enumerate(FLAGS):
            setattr(self.control, flag, any(flags[i] for flags in rank_flags))

    def _notify(self, event: str, more: dict[str, Any]) -> None:
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                given = {**self.parts, **more}
                bound = partial(method, self.args, self.state, self.control, **given)
                self.control = self._call(type(callback).__name__, bound) or self.control

    def _instance(self, callback: Any) -> TrainerCallback:
        """The callback itself, or an instance of it if it is a class."""
        if isinstance(callback, type):
            callback = self._call(callback.__name__, callback)
        if not isinstance(callback, TrainerCallback):
            raise ValueError(
                f"callbacks: expected a transformers.TrainerCallback, got {type(callback).__name__}"
            )
        return callback

    def _call(self, name: str, function: Callable[[], Any]) -> Any:
        """Call a callback. Its exceptions are raised as they are, and `exit()` is an error."""
        try:
            return call(function)
        except UserCodeError as error:
            cause = error.__cause__
            if isinstance(cause, Exception):
                raise cause from cause.__cause__
            raise RuntimeError(f"callback {name} {error}{place_of(cause)}") from cause

    def close(self) -> None:
        """Call `close` of the callbacks that have it, also after an error."""
        for callback in self.callbacks:
            close = getattr(callback, "close", None)
            if close is not None:
                self._call(type(callback).__name__, close)
