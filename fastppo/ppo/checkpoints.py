"""The checkpoints of a PPO run: when one is due, what it holds, which one a run goes on from."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor, distributed

from fastppo.data.world import World
from fastppo.models.policy import ActorCritic
from fastppo.models.pretrained import written_whole
from fastppo.models.sharding import reshard
from fastppo.ppo.build import Parts
from fastppo.ppo.config import IDENTITY, PPOConfig
from fastppo.ppo.state import RunState
from fastppo.run import checkpoint, identity, manifest, shards
from fastppo.run.checkpoint import Best, CheckpointError

LOWEST = "min:"
"""Before a metric of `checkpoint_best` whose lowest value is the best."""


def export(model: ActorCritic, tokenizer: Any, directory: Path) -> None:
    """Writes a policy whose weights are whole, and its value function beside the directory."""
    value_function = directory.parent / "value_function.safetensors"
    with written_whole(directory) as unfinished:
        model.save_policy(unfinished)
        tokenizer.save_pretrained(unfinished)
        model.save_value_function(unfinished / value_function.name)
        (unfinished / value_function.name).replace(value_function)
    manifest.permit(directory, value_function)


class Checkpoints:
    """Writes and reads the checkpoints of one run.

    Args:
        parts: what the run trains and reads.
        say: takes a sentence for the user.
        saved: called where one is written, or with `checkpoint_async` begun.
        world: the ranks, each of which writes its shards; the first does the rest.
    """

    def __init__(
        self,
        config: PPOConfig,
        state: RunState,
        parts: Parts,
        say: Callable[[str], None],
        world: World | None = None,
        saved: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.state, self.say, self.saved = config, state, say, saved
        self.world = world or World()
        self._group: Any = None
        """Of the ranks, for a checkpoint that is written while the run goes on."""
        self.model, self.optimizer, self.reference = parts.model, parts.optimizer, parts.reference
        self.run_dir = Path(config.output_dir)
        self.run = identity.of_run(config, parts.fingerprints)
        self.newest: Path | None = None
        """The newest checkpoint that is known to be whole."""
        self._begun_at: int | None = None
        """The iteration of the last checkpoint that was begun."""
        self._time = time.monotonic()
        self._worth: list[float] = []
        """The metric of `checkpoint_best` in the iterations since the last checkpoint."""
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[Path] | None = None

    def after_iteration(self, metrics: Mapping[str, float], *, asked: bool = False) -> None:
        """Writes a checkpoint if one is due by iterations or minutes, or is asked for."""
        self._remember(metrics)
        interval, minutes = self.config.checkpoint_interval, self.config.checkpoint_minutes
        by_count = interval and self.state.iteration % interval == 0
        by_time = minutes and self.world.first(
            lambda: time.monotonic() - self._time >= 60 * minutes
        )
        if not (asked or by_count or by_time):
            return
        try:
            self.save()
            if asked:
                self.wait()
                self.say(f"checkpoint {self.newest}")
        except CheckpointError as error:
            if self.config.checkpoint_failure == "stop":
                raise
            self.say(f"{error}; going on without it (checkpoint_failure=continue)")
            self._time = time.monotonic()  # not again after the next iteration

    def save(self) -> Path:
        """Begins a checkpoint of the run as it is now, after the one before is on the disk.

        Raises:
            CheckpointError: it, or the one before, could not be written.
        """
        failed = None
        try:
            self.wait()
        except CheckpointError as error:  # what is saved now matters more
            failed = error
        number, threaded = self.state.iteration, self.config.checkpoint_async
        what = checkpoint.snapshot(
            self.model,
            self.optimizer,
            self.state.state_dict(),
            reference=self._reference_state(),
            copy=threaded,
            in_shards=self.world.size > 1,
        )
        options: dict[str, Any] = {
            "run": self.run,
            "keep": self.config.checkpoint_limit,
            "best": self._best(),
        }
        if self.world.size > 1:
            write = self._begin_shards(number, what, options)
        else:
            write = functools.partial(checkpoint.write, self.run_dir, number, what, **options)
        if threaded:
            self._thread = self._thread or ThreadPoolExecutor(1, "checkpoint")
            self._writing = self._thread.submit(write)
        else:
            (self.newest, *_) = self.world.share(write)
        self._begun_at, self._time, self._worth = number, time.monotonic(), []
        self.saved()
        if failed is not None:
            raise failed
        return self.run_dir / f"checkpoint-{number:06d}"

    def finish(self) -> None:
        """Writes a last checkpoint, unless there is one of this iteration, and waits for it."""
        try:
            self.wait()
        except CheckpointError as error:
            self.say(f"{error}; writing another")
        if self.state.iteration != self._begun_at:
            self.save()
        self.wait()

    def how_far(self) -> str:
        """What a run that was stopped says of itself."""
        done, end = self.state.iteration, self.config.iterations
        return f" after {done} of {end} iterations; `--resume true` goes on from {self.newest}"

    def wait(self) -> None:
        """Until a checkpoint that is being written is on the disk; raises what went wrong."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            (self.newest, *_) = self.world.share(writing.result)
        except CheckpointError:
            self._begun_at = None
            raise

    def close(self) -> None:
        """Ends the thread, after what it is writing."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def resume(self) -> bool:
        """Restores the newest whole checkpoint; whether there was one.

        Raises:
            DamagedError: there are checkpoints, and none is whole.
            ValueError: it is of another run or model, and `allow_config_change` is off.
        """
        found = self.world.first(self._newest)
        if found is None:
            self.say(f"no checkpoint in {self.run_dir}: starting from the beginning")
            return False
        for reason in found.reasons:
            self.say(f"passed over {reason}")
        allowed = self.config.allow_config_change
        before: dict[str, Any] = found.about["run"]
        for sentence in identity.check_same_run(found.path, before, self.run, IDENTITY, allowed):
            self.say(sentence)
        saved_state, saved_reference = checkpoint.load(found.path, self.model, self.optimizer)
        self.state.load_state_dict(saved_state)
        if self.reference is not None:
            self.reference.load_state_dict(saved_reference)
        self.world.first(lambda: self._tidy(found))
        self.newest, self._begun_at = found.path, self.state.iteration
        done = "" if self.state.iteration < self.config.iterations else ", whose run is at its end"
        self.say(f"resuming from {found.path}{done}")
        return True

    def _newest(self) -> manifest.Found | None:
        checkpoint.remove_leftovers(self.run_dir)
        return manifest.newest(checkpoint.checkpoints(self.run_dir))

    def _tidy(self, found: manifest.Found) -> None:
        """Sets aside what is damaged, and removes what is not to be kept."""
        for path in found.passed_over:
            self.say(f"{path.name} is set aside as {manifest.set_aside(path).name}")
        metric = self.config.checkpoint_best
        checkpoint.prune(self.run_dir, self.config.checkpoint_limit, metric, never=found.path)

    def _reference_state(self) -> dict[str, Tensor]:
        return self.reference.state_dict() if self.reference is not None else {}

    def _begin_shards(
        self, number: int, what: checkpoint.Snapshot, options: dict[str, Any]
    ) -> Callable[[], Path]:
        """Makes a copy of this rank's shards if a thread is to write; what is left to do."""
        world, run_dir = self.world, self.run_dir
        temporary = world.first(lambda: checkpoint.begin(run_dir, number))
        reshard(self.model)
        state = shards.state_of(self.model, self.optimizer, self._reference_state())
        writing: Future | None = None
        if self.config.checkpoint_async:
            self._group = self._group or distributed.new_group(backend="gloo")
            writing = shards.begin_writing(state, temporary, self._group)

        def write() -> Path:
            try:
                if writing is None:
                    shards.write(state, temporary)
                else:
                    shards.wait_for(writing)
            except OSError as error:
                raise checkpoint.failed(run_dir, number, error) from error
            final = run_dir / f"checkpoint-{number:06d}"
            return (
                checkpoint.finish(run_dir, number, temporary, what, **options)
                if world.is_main
                else final
            )

        return write

    def _remember(self, metrics: Mapping[str, float]) -> None:
        metric = self.config.checkpoint_best
        if metric is None:
            return
        value = metrics.get(metric.removeprefix(LOWEST))
        if value is not None and math.isfinite(value):
            self._worth.append(-value if metric.startswith(LOWEST) else value)

    def _best(self) -> Best | None:
        metric = self.config.checkpoint_best
        if metric is None:
            return None
        if not self._worth:
            self.say(f"checkpoint_best={metric}: no iteration since the last checkpoint had it")
            return Best(metric, None)
        return Best(metric, sum(self._worth) / len(self._worth))
