"""Everything of a run that changes and is neither a weight nor a moment of the optimiser.

A run is its options and this: the schedules, the learning rate and the place in the prompts follow
from the counters, so a checkpoint holds `state_dict()`, and a run that loads it goes on as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastppo.functional.scalars import counted
from fastppo.ppo.evaluation import BestEvaluations
from fastppo.ppo.kl_control import AdaptiveKL, FixedKL, PenaltyKL
from fastppo.ppo.options.config import WARNINGS, PPOConfig
from fastppo.ppo.value_regression import ValueRegression
from fastppo.rewards.processing import RunningScale
from fastppo.run.watch import ABSENT_AFTER, Watch, parse_threshold

COUNTERS = (
    "iteration",
    "optimizer_step",
    "prompts_seen",
    "ptx_seen",
    "skipped_steps",
    "skipped_in_a_row",
)

MOST_SKIPPED = 5
"""Steps that may be skipped one after the other before the run stops: by then it is no accident of
one batch."""

FIRST_POLICY_BETA = 1.0
"""β of the KL to the rollout policy in the first iteration, per nat."""


class RunStoppedError(RuntimeError):
    """A threshold of `stop_if` was crossed; checkpoint, policy and report are written."""


@dataclass(slots=True)
class RunState:
    """The counters and controllers of a run."""

    kl_control: FixedKL | AdaptiveKL | PenaltyKL
    """β of the KL in the reward."""
    policy_kl_control: PenaltyKL
    """β of the KL to the rollout policy, for objective=penalty."""
    watch: Watch
    value_regression: ValueRegression | None = None
    """The value head's, where AdamW does not train it; `state_dict` is without its tensors."""
    score_scale: RunningScale = field(default_factory=RunningScale)
    iteration: int = 0
    optimizer_step: int = 0
    prompts_seen: int = 0
    ptx_seen: int = 0
    """Blocks of pretraining text."""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    evaluations: BestEvaluations = field(default_factory=BestEvaluations)
    successes: dict[int, str] = field(default_factory=dict)
    """The last responses to each prompt that was asked, by its row, newest last: 1 for solved, 0
    for not. Kept where `solved_reward` is given."""

    @classmethod
    def of(cls, config: PPOConfig) -> RunState:
        """The state of a run before its first iteration."""
        return cls(
            kl_control=_kl_control(config),
            policy_kl_control=PenaltyKL(FIRST_POLICY_BETA, config.policy_kl_target),
            watch=_watch(config),
            value_regression=ValueRegression() if config.fits_value_head else None,
        )

    def begin_iteration(self, options: PPOConfig) -> None:
        """Sets the coefficients that the iteration's options fix.

        Args:
            options: those of this iteration, schedules applied.
        """
        if isinstance(self.kl_control, FixedKL):
            self.kl_control.coef = options.kl_coef

    def move_kl_coef(self, kl: float | None, sequences: int, options: PPOConfig) -> None:
        """Moves β of the KL in the reward.

        Args:
            kl: an iteration's KL to the reference, nats per sequence; None where there is none.
            sequences: that it is the mean of.
        """
        if kl is not None and not self.is_warming_up(options):
            self.kl_control.update(kl, sequences)

    def skip_step(self, numbers: Mapping[str, float]) -> str:
        """Counts an optimiser step that is not taken; a sentence about it.

        Args:
            numbers: loss and norms of the gradient, of which one at least is not finite.

        Raises:
            FloatingPointError: too many in a row.
        """
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        wrong = [f"{name} {x}" for name, x in numbers.items() if not math.isfinite(x)]
        if self.skipped_in_a_row >= MOST_SKIPPED:
            raise FloatingPointError(
                f"{self.skipped_in_a_row} optimiser steps in a row had a non-finite loss or "
                f"gradient, the last one {', '.join(wrong)}; lower the learning rate, or look for "
                "inf in the rewards or logits"
            )
        return f"optimiser step {self.optimizer_step + 1}: {', '.join(wrong)}; skipped"

    def raise_if_stopped(self, run_dir: Path | None = None) -> None:
        """Raises RunStoppedError if a threshold was crossed.

        Args:
            run_dir: where checkpoint, policy and report are, at the end of a run.
        """
        if self.watch.stopped_by:
            reasons = "; ".join(self.watch.stopped_by)
            if run_dir is None:
                raise RunStoppedError(f"stopped: {reasons}")
            raise RunStoppedError(
                f"stopped after {counted(self.iteration, 'iteration')}: {reasons}. A checkpoint, "
                f"the policy and the report are in {run_dir}"
            )

    def is_warming_up(self, options: PPOConfig) -> bool:
        """Whether this iteration trains the value function alone."""
        return self.iteration < options.value_warmup_iterations

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds, as JSON has it."""
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "kl_coef": self.kl_control.coef,
            "policy_kl_coef": self.policy_kl_control.coef,
            "score_scale": asdict(self.score_scale),
            "evaluations": asdict(self.evaluations),
            "successes": [[row, recent] for row, recent in self.successes.items()],
            "watch": self.watch.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. A fixed β stays the options'."""
        for name in COUNTERS:
            setattr(self, name, state[name])
        if not isinstance(self.kl_control, FixedKL):
            self.kl_control.coef = state["kl_coef"]
        self.policy_kl_control.coef = state["policy_kl_coef"]
        self.score_scale = RunningScale(**state["score_scale"])
        # Checkpoints of 0.2 have neither evaluations nor successes.
        self.evaluations = BestEvaluations(**state.get("evaluations", {}))
        self.successes = dict(state.get("successes", []))
        self.watch.load_state_dict(state["watch"])


def _kl_control(config: PPOConfig) -> FixedKL | AdaptiveKL | PenaltyKL:
    if config.kl_controller == "adaptive":
        return AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)
    if config.kl_controller == "penalty":
        return PenaltyKL(config.kl_coef, config.kl_target)
    return FixedKL(config.kl_coef)


def _watch(config: PPOConfig) -> Watch:
    warn_if = [parse_threshold(text) for text in config.warn_if]
    stop_if = [parse_threshold(text) for text in config.stop_if]
    # The default thresholds are for any run; one that the user chose is missed if it is absent.
    chosen = [threshold for threshold in warn_if if str(threshold) not in WARNINGS] + stop_if
    after = ABSENT_AFTER
    if config.eval_prompts and any(threshold.metric.startswith("eval/") for threshold in chosen):
        after = max(after, config.eval_interval)  # by then there has been an evaluation
    return Watch(warn_if, stop_if, chosen, min(after, config.iterations))
