"""What moves β, the coefficient of a KL, from one iteration to the next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class FixedKL:
    """β stays what it is."""

    coef: float

    def update(self, kl: float, sequences: int) -> None:
        """`kl`: mean over sequences of the summed KL to the reference, nats."""


@dataclass(slots=True)
class AdaptiveKL:
    """β ← β·(1 + clip(KL/target − 1, −0.2, 0.2)·min(1, n/horizon)).

    Source: Ziegler et al. 2019, 2.2, where the n sequences of an update are few beside the horizon;
    without the minimum more than five horizons of them would turn β negative.
    """

    coef: float
    target: float
    horizon: float = 10_000.0
    """Sequences over which a constant error of 20 % moves β by 20 %."""

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
