"""The loop of a run: everything around `PPOTrainer.iterate`.

Around all iterations: the lock of the run directory, signals, checkpoints, callbacks. Around each
iteration: prompts, records, evaluation, warnings.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import set_seed

from fastppo.data.prompts import Prompts
from fastppo.models.device import device_name
from fastppo.plugins.calling import PluginError
from fastppo.ppo.algorithm import PPO
from fastppo.ppo.checkpoints import Checkpoints
from fastppo.ppo.curriculum import Chosen, Curriculum
from fastppo.ppo.evaluation import Evaluation
from fastppo.ppo.metrics import LOGGED_SAMPLES, PhaseTimer, sample_records, status
from fastppo.ppo.setup.checks import self_check
from fastppo.ppo.setup.summary import banner
from fastppo.ppo.step_control import SkippedStepsError
from fastppo.rewards.reward import RewardError
from fastppo.rollout import RolloutError
from fastppo.run.callbacks import Callbacks
from fastppo.run.checkpoint import (
    CheckpointError,
    iteration_of,
    random_state,
    restore_random_state,
)
from fastppo.run.console import lasting_console
from fastppo.run.directory import check_no_run, run_lock
from fastppo.run.log import SharedLog, read_jsonl
from fastppo.run.progress import progress, show_messages
from fastppo.run.signals import PhaseEndedError, StopRequest, listening
from fastppo.stopped import Stopped


class Before(NamedTuple):
    """The run before an iteration, without weights and optimizer."""

    random_state: Any
    state: dict[str, Any]
    steps_taken: int
    """Optimizer steps so far. After another one, the weights have changed."""


ON_ALL_RANKS = (PhaseEndedError, RolloutError, RewardError)
"""Errors that every rank raises together, so that the ranks can write a checkpoint."""

WITH_RESUME = (RolloutError, RewardError, PluginError)
"""Errors whose message says how to resume."""

INTERRUPTIBLE = ("score", "experience")
"""Phases that a run can stop before, because the iteration has not changed anything yet."""


class TrainingRun:
    """One call of `PPOTrainer.train`.

    Args:
        ppo: the algorithm with the parts and the state of the run.
    """

    def __init__(
        self, ppo: PPO, evaluation: Evaluation, checkpoints: Checkpoints, callbacks: Callbacks
    ) -> None:
        self.ppo = ppo
        self.config = ppo.config
        self.state = ppo.state
        self.world = ppo.world
        self.parts = ppo.parts
        self.say = ppo.reporter.say
        self.evaluation = evaluation
        self.checkpoints = checkpoints
        self.callbacks = callbacks
        self.curriculum = Curriculum(len(ppo.parts.prompts or ()), ppo.config.solved_reward)
        self.run_dir = Path(ppo.config.output_dir)
        self.stop_request = StopRequest(self.world)
        self.out_of_prompts = ""
        """Why no prompts are left; empty while there are some."""
        self.evaluation_error: Exception | None = None
        """Error of the evaluation after the last update; the update is kept."""

    def run(self) -> dict[str, float]:
        """Run the iterations, write the policy, and return the last metrics.

        A callback may end the run before its first iteration. Then there are none.

        For the exceptions see `PPOTrainer.train`.
        """
        show_messages(self.ppo.reporter.console)  # the process may hold other trainers
        with self._surroundings():
            self._begin()
            log = self._open_log()
            with self._why_failed(log), self.world.with_timeout():
                metrics = self._iterations(log)
                stopped_by = self.stop_request.stop
                if stopped_by and self._is_short and not self.state.watch.stopped_by:
                    if self.state.iteration:
                        self.callbacks.run_ended()
                    raise Stopped(stopped_by, self.checkpoints.how_far())
                if self.state.iteration:
                    self._write_results()
        self.state.raise_if_stopped(self.run_dir)
        if self._is_short:
            self.say(
                f"ended after {self.state.iteration} of {self.config.iterations} iterations: "
                f"{self._why_ended()}"
            )
        if metrics or self.state.iteration == 0:
            return metrics
        return self.world.on_main_rank(lambda: read_jsonl(self.run_dir / "metrics.jsonl")[-1])

    def _write_results(self) -> None:
        """Write the policy, and the best policy if it is kept."""
        policy = self.run_dir / "policy"
        self.checkpoints.save_policy(self.ppo.tokenizer, policy)
        self.callbacks.policy_saved(policy)
        best = self.checkpoints.save_best(self.ppo.tokenizer, self.run_dir / "policy-best")
        if best is not None:
            self.callbacks.policy_saved(self.run_dir / "policy-best", iteration_of(best))
            self.say(f"policy-best is the policy of {best.name}")
        self.callbacks.run_ended()
        self.callbacks.tell("on_train_end")

    @property
    def _is_short(self) -> bool:
        """Whether iterations are left."""
        return bool(self.state.iteration < self.config.iterations)

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Lock the run directory, handle signals, and close everything at the end."""
        with ExitStack() as stack:
            stack.enter_context(lasting_console())
            stack.enter_context(self.world.with_timeout())
            stack.enter_context(run_lock(self.run_dir, self.world))
            self.stop_request = stack.enter_context(listening(self.world))
            for part in (self.callbacks, self.parts.episode_runner, self.ppo.engine):
                stack.enter_context(closing(part))
            yield

    def _begin(self) -> None:
        set_seed(self.config.seed)
        if self.config.resume:
            self.checkpoints.resume()
            self.ppo.engine.weights_changed(self.ppo.model)
        elif self.state.iteration == 0:
            self.world.on_main_rank(lambda: check_no_run(self.run_dir))
        for line in banner(self.ppo):
            self.say(line)
        self_check(self.ppo)

    def _open_log(self) -> SharedLog:
        log = SharedLog(
            self.world,
            self.run_dir,
            self.config,
            callbacks=self.callbacks,
            first=self.state.iteration,
            device=device_name(self.parts.device),
        )
        self.ppo.reporter.notes += log.notes
        return log

    @contextmanager
    def _why_failed(self, log: SharedLog) -> Iterator[None]:
        """Write an error in the block to the records and the report, and close the records."""
        try:
            yield
        except Exception as error:
            log.failed(error)
            if self.state.iteration:
                self.callbacks.run_ended(has_failed=True)
            if isinstance(error, WITH_RESUME) and self.checkpoints.newest:
                kind = next(kind for kind in WITH_RESUME if isinstance(error, kind))
                how_far = self.checkpoints.how_far(is_user_code=kind is not RolloutError)
                raise kind(f"{error}; stopped{how_far}") from error
            raise
        finally:
            log.close()

    def _iterations(self, log: SharedLog) -> dict[str, float]:
        """Iterate until the end, a threshold, a callback or a signal, and write a last checkpoint.

        Returns:
            The last metrics.
        """
        first = self.state.iteration
        end = self.config.iterations
        metrics: dict[str, float] = {}
        bar = progress("PPO", self.ppo.reporter.console, total=end, completed=first)
        with bar as show:
            self.callbacks.begin(first)
            while self.state.iteration < end and not self._is_over():
                self.callbacks.tell("on_step_begin")
                before = Before(
                    random_state(), self.state.state_dict(), self.ppo.optimizer.steps_taken
                )
                try:
                    metrics = self.iteration(log)
                except Exception as error:
                    if not self._ends_quietly(error, before, log):
                        raise
                    break
                show(completed=self.state.iteration, status=status(metrics))
                by_callback = self.callbacks.step_ended()
                by_signal = self.stop_request.checkpoint_wanted()
                self.checkpoints.after_iteration(metrics, requested=by_callback or by_signal)
                if self.evaluation_error is not None:
                    self.checkpoints.finish()
                    if self.stop_request.is_stopping() and self._is_short:
                        self.say(f"the evaluation failed: {self.evaluation_error}")
                        break
                    raise self.evaluation_error
        self.checkpoints.finish()
        if self._is_short:
            log.ended(self._why_ended())
        return metrics

    def _ends_quietly(self, error: Exception, before: Before, log: Any) -> bool:
        """Keep the work before a failed iteration, and return whether the run ends without error.

        An iteration that has not taken an optimizer step has changed nothing but the state and the
        random numbers, which are restored. In the middle of an update there is nothing to save; a
        resumed run starts at the last checkpoint.
        """
        if isinstance(error, SkippedStepsError):
            log.metrics(self.state.iteration, error.metrics, [f"stopped: {error}"])
        if self.ppo.optimizer.steps_taken != before.steps_taken or not self._is_shared(error):
            return False
        restore_random_state(before.random_state)
        self.state.load_state_dict(before.state)
        if isinstance(error, PhaseEndedError):
            self.out_of_prompts = str(error)
            return True
        if self.stop_request.is_stopping():
            return True  # Ctrl-C in a terminal also ends the processes of a reward
        # A run whose first rewards fail has nothing to keep.
        if self.state.iteration or isinstance(error, RolloutError):
            try:
                self.checkpoints.finish()
            except CheckpointError:
                if isinstance(error, ON_ALL_RANKS):
                    raise
                # The error of the iteration matters more.
        return False

    def _is_shared(self, error: Exception) -> bool:
        """Whether every rank has met an error, so that none waits for the others in vain."""
        return self.world.size == 1 or isinstance(error, ON_ALL_RANKS)

    def _why_ended(self) -> str:
        """Return why the run ended before its last iteration."""
        if self.state.watch.stopped_by:
            return "; ".join(self.state.watch.stopped_by)
        if self.stop_request.stop:
            return f"stopped by {signal.Signals(self.stop_request.stop).name}"
        return self.out_of_prompts or "a callback requested it"

    def _is_over(self) -> bool:
        crossed = bool(self.state.watch.stopped_by)
        return bool(self.stop_request.stop) or self.callbacks.stop or crossed

    def iteration(self, log: Any) -> dict[str, float]:
        """Run an iteration on the next prompts, write its records and return its metrics.

        Args:
            log: a `RunLog`, or an object with its `metrics` and `samples`.

        Raises:
            PhaseEndedError: the run stops, or no prompt is left; nothing has changed.
            RolloutError: the engine returned no responses.
            FloatingPointError: too many optimizer steps in a row were not finite.
        """
        coefficients = self.ppo.begin_iteration()
        chosen = self._choose(self.state.prompts_seen, self.config.prompts_per_iteration)
        prompts = self._prompts.select(chosen.rows)
        before = self.evaluation.before_update()
        if self.config.async_steps:
            self.parts.episode_runner.prepare(self._prompts_after(chosen), self.ppo.engine)

        def more_prompts(count: int) -> Prompts:
            nonlocal chosen
            following = self._choose(chosen.position, count)
            chosen = Chosen(chosen.rows + following.rows, following.position)
            return self._prompts.select(following.rows)

        timer = PhaseTimer(self.config, self._stop_before)
        iteration = self.ppo.iterate(prompts, coefficients, timer, more_prompts)
        metrics: dict[str, float] = before | iteration.metrics
        metrics |= self.curriculum.take(chosen, iteration.drawn.scores, self.state)
        if self.config.dynamic_sampling:
            metrics["prompts_drawn"] = len(chosen.rows) / self.config.samples_per_prompt
        requested = self.callbacks.take("should_evaluate")
        try:
            metrics |= self.evaluation.after_update(log, requested=requested)
        except Exception as error:
            if not self._is_shared(error):
                raise
            self.evaluation_error = error

        number = self.state.iteration
        log.metrics(number, metrics, self.ppo.reporter.watch(self.state, metrics))
        responses = iteration.responses
        texts = self.ppo.completions(responses.prompts, responses.rollout, LOGGED_SAMPLES)
        log.samples(number, sample_records(responses, iteration.experience, texts))
        self.state.iteration += 1
        return metrics

    @property
    def _prompts(self) -> Prompts:
        assert self.parts.prompts is not None
        return self.parts.prompts

    def _prompts_after(self, chosen: Chosen) -> Prompts:
        """Return the next iteration's prompts; none after the last."""
        if self.state.iteration + 1 == self.config.iterations:
            return self._prompts.select([])
        following = self._choose(chosen.position, self.config.prompts_per_iteration)
        return self._prompts.select(following.rows)

    def _choose(self, position: int, count: int) -> Chosen:
        """Choose the next `count` prompts from a position in the epochs on."""
        state = replace(self.state, prompts_seen=position)
        samples = self.config.samples_per_prompt
        return self.curriculum.at(state, count, self.config.seed, samples)

    def _stop_before(self, phase: str) -> None:
        if phase in INTERRUPTIBLE:
            self.stop_request.end_phase()
