"""The coefficients of an iteration, from the options, the schedules and the controllers.

`CoefficientControl` is the one place that makes them. An iteration reads the frozen `Coefficients`;
the options stay those that the user wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fastppo.ppo.controllers import KL_CONTROLLERS, EntropyControl, KLController, PenaltyKL
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.options.update import Schedule
from fastppo.ppo.trained import Trained

FIRST_POLICY_BETA = 1.0
"""β of objective=penalty in the first iteration, per nat."""

POLICY_KL_TARGET = 0.01
"""Target of objective=penalty, nats per token. Schulman et al. 2017 tried 0.003, 0.01 and 0.03."""

MEASURED_BY = {"kl_coef": "kl", "policy_kl_coef": "policy_kl", "entropy_coef": "entropy"}
"""The metric that each controlled coefficient follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """The numbers of one iteration that may change over a run. The options describe them."""

    iteration: int
    """Number of the iteration, from 0."""
    clip_ratio: float
    clip_ratio_high: float | None
    dual_clip: float | None
    value_clip: float | None
    vf_coef: float
    entropy_coef: float
    kl_coef: float
    """β of the KL to the reference in the reward."""
    kl_loss_coef: float
    policy_kl_coef: float
    """β of the KL to the rollout policy in the loss of objective=penalty."""
    ptx_coef: float
    missing_eos_penalty: float | None
    early_stop_kl: float | None
    step_kl: float
    """Target of learning_rate=auto before its adaptation to the entropy, nats per token."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The scheduled coefficients as `schedule/NAME`, and `policy_kl_coef` if it is used."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """(ε_low, ε_high)."""
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return self.clip_ratio, high


NAMES = {member.name for member in fields(Coefficients)} - {
    "iteration",
    "policy_kl_coef",
    "metrics",
}
"""Coefficients that are options, too."""


class CoefficientControl:
    """Makes the coefficients of each iteration, and adapts them after it."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.schedules = [Schedule.parse(text) for text in config.schedules]
        self.controllers: dict[str, KLController | EntropyControl] = {}
        if config.kl_controller != "fixed":
            make = KL_CONTROLLERS[config.kl_controller]
            self.controllers["kl_coef"] = make(config.kl_coef, config.kl_target)
        if config.objective == "penalty":
            self.controllers["policy_kl_coef"] = PenaltyKL(FIRST_POLICY_BETA, POLICY_KL_TARGET)
        if config.entropy_target is not None:
            entropy = EntropyControl(config.entropy_coef, config.entropy_target)
            self.controllers["entropy_coef"] = entropy

    def at(self, iteration: int) -> Coefficients:
        """Return the coefficients of an iteration, counted from 0."""
        numbers = {name: self.config.value_of(name) for name in NAMES} | {"policy_kl_coef": 0.0}
        progress = min(1.0, iteration / max(1, self.config.iterations - 1))
        for schedule in self.schedules:
            numbers[schedule.name] = schedule.value(numbers[schedule.name], progress)
        numbers |= {name: controller.coef for name, controller in self.controllers.items()}
        metrics = {f"schedule/{each.name}": float(numbers[each.name]) for each in self.schedules}
        if "policy_kl_coef" in self.controllers:
            metrics["policy_kl_coef"] = numbers["policy_kl_coef"]
        return Coefficients(iteration=iteration, metrics=metrics, **numbers)

    def update(self, metrics: Mapping[str, float], sequences: int, trained: Trained) -> None:
        """Adapt the controlled coefficients to an iteration.

        They stay as they are if the policy was not trained, and a coefficient of the update if
        none of its tokens was in the loss.

        Args:
            metrics: of the iteration. `kl` is absent without a reference.
            sequences: number of responses.
        """
        if not trained.policy:
            return
        for name, controller in self.controllers.items():
            metric = MEASURED_BY[name]
            if metric in metrics and (metric == "kl" or trained.value):
                controller.update(metrics[metric], sequences)

    def state_dict(self) -> dict[str, Any]:
        """Return the controllers' state as JSON."""
        return {name: each.state_dict() for name, each in self.controllers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Options that have changed since take effect."""
        for name, controller in self.controllers.items():
            controller.load_state_dict(state.get(name, {}))
