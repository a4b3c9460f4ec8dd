"""Step control: the optimizer steps of an update.

`StepControl` sets the learning rate of every step, takes the step unless the loss or the gradient
is not finite, and ends an update early if the policy has moved too far. `AutoStepControl` also
chooses the learning rate (`learning_rate: auto`, see `fastppo.ppo.rate_control`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fastppo.ppo.coefficients import Coefficients
from fastppo.ppo.experience import Experience
from fastppo.ppo.metrics import LossSums, to_floats
from fastppo.ppo.optimizer import schedule_factor, set_learning_rate
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.rate_control import LARGEST_RATE, AdaptiveRate
from fastppo.ppo.trained import Trained
from fastppo.run.optimizer import Optimizer

MOST_SKIPPED = 5
"""Consecutive skipped steps after which the run stops."""

STILL = 1e-5
"""KL to the rollout policy, nats per token, below which an update has not moved the policy."""

COUNTERS = ("optimizer_step", "skipped_steps", "skipped_in_a_row", "still_iterations")


class SkippedStepsError(FloatingPointError):
    """Too many optimizer steps in a row were not finite.

    Args:
        metrics: the record of the iteration.
    """

    def __init__(self, sentence: str, metrics: dict[str, float]) -> None:
        super().__init__(sentence)
        self.metrics = metrics


class StepControl:
    """Takes the optimizer steps of each update at the learning rate of the options.

    Args:
        config: the options.
        optimizer: the optimizer, whose gradients are accumulated before each step.
        warn: shows a warning, and where in the run it occurred.
    """

    def __init__(
        self, config: PPOConfig, optimizer: Optimizer, warn: Callable[[str, str], None]
    ) -> None:
        self.config = config
        self.optimizer = optimizer
        self.warn = warn
        self.optimizer_step = 0
        """Optimizer steps of the run so far, those that were skipped included."""
        self.skipped_steps = 0
        self.skipped_in_a_row = 0
        self.still_iterations = 0
        """Consecutive updates by rewards that did not move the policy."""

    # ------------------------------------------------------------------------------- an update

    def begin_update(self, experience: Experience, coefficients: Coefficients) -> None:
        """Start an update on an experience, and set the learning rate of its first step."""
        self.coefficients = coefficients
        self.trained: Trained = experience.trained
        self.planned_steps = self.config.ppo_epochs * min(self.config.minibatches, len(experience))
        self._first_step = coefficients.iteration * self.config.steps_per_iteration
        self._schedule_step = self._first_step
        self._skipped_before = self.skipped_steps
        self._overflowed_before = self.optimizer.overflowed_steps
        self._epoch_kls: list[float] = []
        self.set_learning_rate()

    def begin_epoch(self) -> None:
        """Start an epoch over the experience."""
        self._epoch_kls = []

    def step(self, sums: LossSums) -> dict[str, float]:
        """Clip the gradient and take a step, unless the loss or the gradient is not finite.

        Args:
            sums: of the minibatch whose gradient has been accumulated.

        Returns:
            The loss and gradient norms that are finite, and the learning rate.

        Raises:
            SkippedStepsError: `MOST_SKIPPED` steps in a row were skipped.
        """
        if not self.optimizer.has_gradients:
            # All responses are masked, or a closed-form head warms up on the policy's trunk.
            self._epoch_kls.append(0.0)
            metrics = to_floats({"loss": sums.loss}) | {"learning_rate": self.set_learning_rate()}
            self._schedule_step += 1
            return metrics
        norms = self.optimizer.clip_gradients(self.config.max_grad_norm)
        # The host waits for a GPU here, once per step, and nowhere within a microbatch.
        numbers = to_floats({"policy_kl": sums.approx_kl, "loss": sums.loss, **norms})
        policy_kl = numbers.pop("policy_kl")
        self._epoch_kls.append(policy_kl)
        is_zero = not any(numbers[name] for name in norms if name != "loss_scale")
        if is_zero and not self.trained.has_signal:
            # As of a user's objective with no term but the ratio's. AdamW would go on by momentum.
            self._schedule_step += 1
            return {"loss": numbers["loss"], "learning_rate": self.set_learning_rate()}
        metrics = {name: x for name, x in numbers.items() if math.isfinite(x)}
        self.measure(policy_kl)
        metrics["learning_rate"] = self.set_learning_rate()
        self._take(numbers)
        # The schedule also counts the steps that an early stop leaves out.
        self._schedule_step += 1
        return metrics

    def _take(self, numbers: Mapping[str, float]) -> None:
        """Take a step, or count one that is skipped.

        Args:
            numbers: loss and gradient norms.
        """
        overflowed_before = self.optimizer.overflowed_steps
        if self.optimizer.step(numbers):
            self.skipped_in_a_row = 0
            if self.optimizer.overflowed_steps == overflowed_before:
                self.step_taken()
        else:
            self._count_skipped(numbers)
        self.optimizer_step += 1

    def _count_skipped(self, numbers: Mapping[str, float]) -> None:
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        wrong = ", ".join(f"{name} {x}" for name, x in numbers.items() if not math.isfinite(x))
        if self.skipped_in_a_row >= MOST_SKIPPED:
            raise SkippedStepsError(
                f"{self.skipped_in_a_row} optimizer steps in a row had a non-finite loss or "
                f"gradient, the last one {wrong}; lower the learning rate, or look for inf in the "
                "rewards or logits",
                {"skipped_steps": float(self.skipped_in_a_row)},
            )
        self.warn(f"optimizer step {self.optimizer_step + 1}: {wrong}; skipped", "")

    @property
    def policy_kl(self) -> float:
        """Mean KL to the rollout policy before the epoch's steps so far, nats per token."""
        return sum(self._epoch_kls) / len(self._epoch_kls)

    @property
    def exceeds_limit(self) -> bool:
        """Whether the KL of the epoch exceeds `early_stop_kl`, so that the update ends."""
        limit = self.coefficients.early_stop_kl
        return limit is not None and self.policy_kl > limit

    def end_update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """End an update, and return its metrics of the steps.

        Args:
            metrics: of the update's loss.
        """
        ended = {
            "skipped_steps": float(self.skipped_steps - self._skipped_before),
            "no_signal": float(not self.trained.has_signal),
        }
        if self.coefficients.early_stop_kl is not None:
            ended["early_stopped"] = float(self.exceeds_limit)
            ended["optimizer_steps"] = float(self._schedule_step - self._first_step)
        if self.config.objective == "penalty":
            ended["policy_kl"] = self.policy_kl
        if self.planned_steps > 1:
            if self.trained.by_reward:
                is_still = metrics["approx_kl"] < STILL
                self.still_iterations = self.still_iterations + 1 if is_still else 0
            ended["still_iterations"] = float(self.still_iterations)
        return ended | self.optimizer.metrics(self._overflowed_before)

    # -------------------------------------------------------------------- what a variant changes

    rate: float | None = None
    """The learning rate, or None if it follows from the options."""

    def measure(self, policy_kl: float) -> None:
        """Take a measurement before the next step.

        Args:
            policy_kl: KL to the rollout policy, nats per token.
        """

    def step_taken(self) -> None:
        """Count a step at the current rate."""

    def set_learning_rate(self) -> float:
        """Set the learning rate of the next step and return the policy's."""
        return set_learning_rate(self.optimizer, self._schedule_step, self.config, self.rate)

    # ---------------------------------------------------------------------------- a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two updates as JSON."""
        return {name: getattr(self, name) for name in COUNTERS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name in COUNTERS:
            setattr(self, name, state[name])


class AutoStepControl(StepControl):
    """Adapts the learning rate to the KL of the updates."""

    def __init__(
        self, config: PPOConfig, optimizer: Optimizer, warn: Callable[[str, str], None]
    ) -> None:
        super().__init__(config, optimizer, warn)
        self.adaptive = AdaptiveRate()

    def begin_update(self, experience: Experience, coefficients: Coefficients) -> None:
        super().begin_update(experience, coefficients)
        self.adaptive.begin_update(coefficients.step_kl, self.planned_steps)

    def measure(self, policy_kl: float) -> None:
        if self.trained.by_reward:
            self.adaptive.before_step(policy_kl)

    def step_taken(self) -> None:
        self.adaptive.step_taken(schedule_factor(self._schedule_step, self.config))

    def end_update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        ended = super().end_update(metrics) | self.adaptive.metrics
        self.adaptive.end_update(metrics["entropy"])
        if self.adaptive.is_stuck:
            self.warn(
                f"learning_rate=auto ends at {LARGEST_RATE:g}, which does not move the policy by "
                "step_kl: it is made for AdamW; choose a number for other optimizers",
                "",
            )
        return ended

    @property
    def rate(self) -> float:  # type: ignore[override]
        return self.adaptive.rate

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rate": self.adaptive.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.adaptive.load_state_dict(state.get("rate", {}))


def make_step_control(
    config: PPOConfig, optimizer: Optimizer, warn: Callable[[str, str], None]
) -> StepControl:
    """Return the step control that the options ask for."""
    make = AutoStepControl if config.is_adaptive else StepControl
    return make(config, optimizer, warn)
