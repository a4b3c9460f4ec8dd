"""Controllers that adapt a coefficient after each iteration: β of a KL, or that of the entropy.

A controller has the coefficient of the next iteration (`coef`) and adapts it to a measurement
(`update`). To add a controller of the KL to the reference, write its class here and add it to
`KL_CONTROLLERS`; `kl_controller` takes its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(slots=True)
class KLController:
    """Base of the controllers of β. It keeps β constant."""

    summary: ClassVar[str]
    """What it does, for the help of `kl_controller`."""

    coef: float
    """β of the next iteration."""
    target: float = 0.0
    """KL to aim at, in the unit of the measured KL."""

    def update(self, kl: float, sequences: int) -> None:
        """Adapt β to an iteration.

        Args:
            kl: mean KL, nats per sequence for the KL to the reference, nats per token for
                objective=penalty.
            sequences: number of sequences in the mean.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs as JSON; the target comes from its options."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.coef = state.get("coef", self.coef)


@dataclass(slots=True)
class FixedKL(KLController):
    """Constant β, or the β of a schedule. It follows from the options, so it has no state."""

    summary = "constant, or scheduled"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the β of the options."""


@dataclass(slots=True)
class AdaptiveKL(KLController):
    """β ← β·(1 + clip(KL/target − 1, −0.2, 0.2)·min(1, n/horizon)).

    Source: Ziegler et al. 2019, section 2.2. The paper has n much smaller than the horizon; without
    the minimum, β would turn negative above five horizons.
    """

    summary = "in proportion to the error (Ziegler et al. 2019)"

    horizon: float = 10_000.0
    """Sequences over which a constant error of 20 % changes β by 20 %."""

    def update(self, kl: float, sequences: int) -> None:
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(1.0, sequences / self.horizon)


@dataclass(slots=True)
class PenaltyKL(KLController):
    """β·2 if KL > 1.5·target, β/2 if KL < target/1.5. Source: Schulman et al. 2017, section 4."""

    summary = "doubled or halved (Schulman et al. 2017)"

    def update(self, kl: float, sequences: int) -> None:
        if kl > 1.5 * self.target:
            self.coef *= 2
        elif kl < self.target / 1.5:
            self.coef /= 2


KL_CONTROLLERS: dict[str, type[KLController]] = {
    "fixed": FixedKL,
    "adaptive": AdaptiveKL,
    "penalty": PenaltyKL,
}
"""Controllers of the KL to the reference, by the name of `kl_controller`. Each is called with β and
the target, nats per sequence."""

ENTROPY_STEP = 0.005
"""Change of the entropy coefficient per iteration. Source: He et al. 2025; the default of TRL."""

LARGEST_ENTROPY_COEF = 1.0
"""The default of TRL."""


@dataclass(slots=True)
class EntropyControl:
    """Coefficient of the entropy bonus that keeps the entropy at a target or above it.

    After an iteration, c ← clip(c ± 0.005, 0, 1): up if its entropy was at most the target, down
    otherwise. The next iteration uses c in the first case, and 0 in the second.

    Source: He et al. 2025 (Skywork-OR1, arXiv:2505.22312).
    """

    accumulated: float
    """c"""
    target: float
    """Nats per token."""
    is_low: bool = False
    """Whether the latest entropy was at most the target."""

    @property
    def coef(self) -> float:
        """The coefficient to use."""
        return self.accumulated if self.is_low else 0.0

    def update(self, entropy: float, sequences: int) -> None:
        """Adapt the coefficient to the mean entropy of an update, nats per token."""
        self.is_low = entropy <= self.target
        moved = self.accumulated + (ENTROPY_STEP if self.is_low else -ENTROPY_STEP)
        self.accumulated = min(max(moved, 0.0), LARGEST_ENTROPY_COEF)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs; the target comes from its options."""
        return {"accumulated": self.accumulated, "is_low": self.is_low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.accumulated = state.get("accumulated", self.accumulated)
        self.is_low = state.get("is_low", self.is_low)
