"""The state of a run besides weights and optimizer.

Schedules, learning rate and the position in the prompts follow from the counters and the options.
A checkpoint stores `state_dict()`, and a run that loads it continues exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fastppo.functional.scalars import counted
from fastppo.ppo.advantages import ScoreScale
from fastppo.ppo.evaluation import BestEvaluations
from fastppo.ppo.kl_control import AdaptiveKL, EntropyControl, FixedKL, PenaltyKL
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.options.run import WARNINGS
from fastppo.ppo.rate_control import AdaptiveRate, FixedRate
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
    "still_iterations",
)

MOST_SKIPPED = 5
"""Consecutive skipped steps after which the run stops."""

STILL = 1e-5
"""KL to the rollout policy, nats per token, below which an update has not moved the policy."""

FIRST_POLICY_BETA = 1.0
"""β of objective=penalty in the first iteration, per nat."""

POLICY_KL_TARGET = 0.01
"""Target of objective=penalty, nats per token. Schulman et al. 2017 tried 0.003, 0.01 and 0.03."""


class RunStoppedError(RuntimeError):
    """A metric crossed a threshold of `stop_if`. Checkpoint, policy and report are written."""


@dataclass(slots=True)
class RunState:
    """Counters and controllers of a run."""

    kl_control: FixedKL | AdaptiveKL | PenaltyKL
    """β of the KL in the reward."""
    policy_kl_control: PenaltyKL
    """β of the KL to the rollout policy, for objective=penalty."""
    watch: Watch
    entropy_control: EntropyControl | None = None
    """With a target in `schedules`."""
    value_regression: ValueRegression | None = None
    """For a closed-form value head. `state_dict` does not contain its tensors."""
    score_scale: RunningScale = field(default_factory=RunningScale)
    usual_scores: ScoreScale = field(default_factory=ScoreScale)
    rate_control: FixedRate = field(default_factory=FixedRate)
    """An `AdaptiveRate` with learning_rate=auto."""
    has_signal: bool = True
    """Whether the responses of the latest batch differ in what they earn."""
    iteration: int = 0
    optimizer_step: int = 0
    prompts_seen: int = 0
    ptx_seen: int = 0
    """Blocks of pretraining text."""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    still_iterations: int = 0
    """Consecutive updates with a signal that left the policy where it was."""
    evaluations: BestEvaluations = field(default_factory=BestEvaluations)
    successes: dict[int, str] = field(default_factory=dict)
    """For each prompt by row, its latest responses, newest last: 1 if solved, else 0. Only with
    `solved_reward`."""

    @classmethod
    def of(cls, config: PPOConfig) -> RunState:
        """Return the state before the first iteration."""
        target = config.entropy_target
        return cls(
            kl_control=_kl_control(config),
            policy_kl_control=PenaltyKL(FIRST_POLICY_BETA, POLICY_KL_TARGET),
            watch=_watch(config),
            entropy_control=None if target is None else EntropyControl(config.entropy_coef, target),
            value_regression=ValueRegression() if config.fits_value_head else None,
            rate_control=AdaptiveRate() if config.is_adaptive else FixedRate(),
        )

    def begin_iteration(self, options: PPOConfig) -> PPOConfig:
        """Set the coefficients of an iteration from its options; return the adapted options."""
        if isinstance(self.kl_control, FixedKL):
            self.kl_control.coef = options.kl_coef
        if self.entropy_control is not None:
            options = replace(options, entropy_coef=self.entropy_control.coef)
        return options

    def move_coefficients(
        self,
        metrics: Mapping[str, float],
        sequences: int,
        options: PPOConfig,
        has_loss: bool = True,
    ) -> None:
        """Update β of the KL in the reward, and the coefficient of the entropy.

        Args:
            metrics: `entropy`, and with a reference `kl`, the mean in nats per sequence.
            sequences: number of sequences in the mean.
            has_loss: whether the loss had a token, without which there is no entropy.
        """
        if self.is_value_warmup(options):
            return
        if "kl" in metrics:
            self.kl_control.update(metrics["kl"], sequences)
        if self.entropy_control is not None and has_loss:
            self.entropy_control.update(metrics["entropy"])

    def count_still(self, approx_kl: float, options: PPOConfig) -> int:
        """Count an update that did not move the policy, and return their number in a row.

        Args:
            approx_kl: of the update, nats per token.
        """
        if self.trains_by_reward(options):
            self.still_iterations = self.still_iterations + 1 if approx_kl < STILL else 0
        return self.still_iterations

    def skip_step(self, numbers: Mapping[str, float]) -> str:
        """Count a skipped optimizer step and return a message about it.

        Args:
            numbers: loss and gradient norms; at least one is not finite.

        Raises:
            FloatingPointError: too many steps in a row were skipped.
        """
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        wrong = [f"{name} {x}" for name, x in numbers.items() if not math.isfinite(x)]
        if self.skipped_in_a_row >= MOST_SKIPPED:
            raise FloatingPointError(
                f"{self.skipped_in_a_row} optimizer steps in a row had a non-finite loss or "
                f"gradient, the last one {', '.join(wrong)}; lower the learning rate, or look for "
                "inf in the rewards or logits"
            )
        return f"optimizer step {self.optimizer_step + 1}: {', '.join(wrong)}; skipped"

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

    def is_value_warmup(self, options: PPOConfig) -> bool:
        """Whether this iteration trains only the value function.

        It does so, too, if all responses earn the same and the loss has no KL: otherwise only
        errors of the value function would move the policy, at full strength.
        """
        if self.iteration < options.value_warmup_iterations:
            return True
        return not self.has_signal and options.kl_loss_coef == 0

    def trains_by_reward(self, options: PPOConfig) -> bool:
        """Whether rewards move the policy in this iteration."""
        return self.has_signal and not self.is_value_warmup(options)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "kl_coef": self.kl_control.coef,
            "policy_kl_coef": self.policy_kl_control.coef,
            "entropy_control": self.entropy_control and asdict(self.entropy_control),
            "score_scale": asdict(self.score_scale),
            "usual_scores": asdict(self.usual_scores),
            "rate_control": self.rate_control.state_dict(),
            "has_signal": self.has_signal,
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
        if self.entropy_control is not None and state.get("entropy_control"):
            saved = EntropyControl(**state["entropy_control"])
            self.entropy_control = replace(saved, target=self.entropy_control.target)
        self.score_scale = RunningScale(**state["score_scale"])
        self.usual_scores = ScoreScale(**state["usual_scores"])
        self.rate_control.load_state_dict(state["rate_control"])
        self.has_signal = state["has_signal"]
        self.evaluations = BestEvaluations(**state["evaluations"])
        self.successes = dict(state["successes"])
        self.watch.load_state_dict(state["watch"])


def _kl_control(config: PPOConfig) -> FixedKL | AdaptiveKL | PenaltyKL:
    if config.kl_controller == "adaptive":
        return AdaptiveKL(config.kl_coef, config.kl_target)
    if config.kl_controller == "penalty":
        return PenaltyKL(config.kl_coef, config.kl_target)
    return FixedKL(config.kl_coef)


def _watch(config: PPOConfig) -> Watch:
    warn_if = [parse_threshold(text) for text in config.warn_if]
    stop_if = [parse_threshold(text) for text in config.stop_if]
    # A default threshold may name an absent metric; a threshold of the user may not.
    chosen = [threshold for threshold in warn_if if str(threshold) not in WARNINGS] + stop_if
    after = ABSENT_AFTER
    if config.eval_prompts and any(threshold.metric.startswith("eval/") for threshold in chosen):
        after = max(after, config.eval_interval)  # the first evaluation
    return Watch(warn_if, stop_if, chosen, min(after, config.iterations))
