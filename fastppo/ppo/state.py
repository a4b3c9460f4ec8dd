"""The state of a run besides weights and optimizer.

Schedules, learning rate and the position in the prompts follow from the counters and the options.
A checkpoint stores `state_dict()`, and a run that loads it continues exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastppo.functional.scalars import counted
from fastppo.ppo.coefficients import CoefficientControl
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.options.run import WARNINGS
from fastppo.ppo.step_control import StepControl
from fastppo.rewards.processing import RunningScale
from fastppo.run.watch import ABSENT_AFTER, Watch, parse_threshold

COUNTERS = ("iteration", "prompts_seen", "ptx_seen")


class RunStoppedError(RuntimeError):
    """A metric crossed a threshold of `stop_if`. Checkpoint, policy and report are written."""


@dataclass(slots=True)
class RunState:
    """Counters and controllers of a run."""

    coefficient_control: CoefficientControl
    step_control: StepControl
    watch: Watch
    score_scale: RunningScale = field(default_factory=RunningScale)
    iteration: int = 0
    prompts_seen: int = 0
    ptx_seen: int = 0
    """Blocks of pretraining text."""
    best_evaluation: float | None = None
    """The highest held-out reward so far; None before the first evaluation."""
    successes: dict[int, str] = field(default_factory=dict)
    """For each prompt by row, its latest responses, newest last: 1 if solved, else 0. Only with
    `solved_reward`."""

    @classmethod
    def of(cls, config: PPOConfig, step_control: StepControl) -> RunState:
        """Return the state before the first iteration."""
        return cls(CoefficientControl(config), step_control, _watch(config))

    def take_evaluation(self, reward: float) -> bool:
        """Record a held-out reward and return whether it is the best so far."""
        is_best = reward > (-math.inf if self.best_evaluation is None else self.best_evaluation)
        if is_best:
            self.best_evaluation = reward
        return is_best

    def raise_if_stopped(self, run_dir: Path | None = None) -> None:
        """Raise RunStoppedError if a threshold was crossed.

        Args:
            run_dir: directory of checkpoint, policy and report, at the end of a run.
        """
        if self.watch.stopped_by:
            reasons = "; ".join(self.watch.stopped_by)
            if run_dir is None:
                raise RunStoppedError(f"stopped: {reasons}")
            raise RunStoppedError(
                f"stopped after {counted(self.iteration, 'iteration')}: {reasons}. A checkpoint, "
                f"the policy and the report are in {run_dir}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "coefficient_control": self.coefficient_control.state_dict(),
            "step_control": self.step_control.state_dict(),
            "score_scale": asdict(self.score_scale),
            "best_evaluation": self.best_evaluation,
            "successes": [[row, recent] for row, recent in self.successes.items()],
            "watch": self.watch.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.coefficient_control.load_state_dict(state["coefficient_control"])
        self.step_control.load_state_dict(state["step_control"])
        self.score_scale = RunningScale(**state["score_scale"])
        self.best_evaluation = state["best_evaluation"]
        self.successes = dict(state["successes"])
        self.watch.load_state_dict(state["watch"])


def _watch(config: PPOConfig) -> Watch:
    warn_if = [parse_threshold(text) for text in config.warn_if]
    stop_if = [parse_threshold(text) for text in config.stop_if]
    # A default threshold may name an absent metric; a threshold of the user may not.
    chosen = [threshold for threshold in warn_if if str(threshold) not in WARNINGS] + stop_if
    after = ABSENT_AFTER
    if config.eval_prompts and any(threshold.metric.startswith("eval/") for threshold in chosen):
        after = max(after, config.eval_interval)  # the first evaluation
    return Watch(warn_if, stop_if, chosen, min(after, config.iterations))
