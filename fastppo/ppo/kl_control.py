"""Controllers of β, the coefficient of a KL, from one iteration to the next."""

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
