"""Controllers of a coefficient, β of a KL or that of the entropy, between iterations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class FixedKL:
    """Constant β."""

    coef: float

    def update(self, kl: float, sequences: int) -> None:
        """`kl`: mean KL to the reference, nats per sequence."""


@dataclass(slots=True)
class AdaptiveKL:
    """β ← β·(1 + clip(KL/target − 1, −0.2, 0.2)·min(1, n/horizon)).

    Source: Ziegler et al. 2019, section 2.2. The paper has n much smaller than the horizon; without
    the minimum, β would turn negative above five horizons.
    """

    coef: float
    target: float
    horizon: float = 10_000.0
    """Sequences over which a constant error of 20 % changes β by 20 %."""

    def update(self, kl: float, sequences: int) -> None:
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(1.0, sequences / self.horizon)


@dataclass(slots=True)
class PenaltyKL:
    """β·2 if KL > 1.5·target, β/2 if KL < target/1.5. Source: Schulman et al. 2017, section 4."""

    coef: float
    target: float

    def update(self, kl: float, sequences: int) -> None:
        if kl > 1.5 * self.target:
            self.coef *= 2
        elif kl < self.target / 1.5:
            self.coef /= 2


ENTROPY_STEP = 0.005
"""Change of the entropy coefficient per iteration. Source: He et al. 2025; the default of TRL."""

LARGEST_ENTROPY_COEF = 1.0
"""The default of TRL."""


@dataclass(slots=True)
class EntropyControl:
    """Coefficient of the entropy bonus that holds the entropy up to a target.

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

    def update(self, entropy: float) -> None:
        """Adapt the coefficient to the mean entropy of an update, nats per token."""
        self.is_low = entropy <= self.target
        moved = self.accumulated + (ENTROPY_STEP if self.is_low else -ENTROPY_STEP)
        self.accumulated = min(max(moved, 0.0), LARGEST_ENTROPY_COEF)
