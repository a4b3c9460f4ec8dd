"""The learning rate of `learning_rate: auto`, set by the KL that an update causes.

The target is the KL from the policy that generated the responses to the policy after the update,
nats per token. It follows the entropy H of the policy, in nats per token, because the same KL
changes most choices of a policy that has few left:

    target = step_kl·√H, with √H bounded by `LEAST_SHARE` and `MOST_SHARE`

The first update has no entropy yet, and the target `step_kl`. The square root is a compromise:
in proportion, a nearly deterministic policy was held back.

The forward pass of every minibatch measures the KL after the steps before it, so the control costs
nothing. Over the steps of an update the KL grows about linearly; with the learning rate η it grows
as η². If k of S steps moved the policy by KL_k, the whole update moves it by about KL_k·S/k. With
m, the mean of KL_k·S/k over the second half of the steps, the rate changes after the update:

    η ← η·√(target/m)           if m is above the target, and after each of the first updates
    η ← η·√(target/m)^RAISE     if m is below

A minibatch's KL is noisy, with rare large values, so that the rate falls at once and rises slowly.
The first updates differ: Adam's first steps move a policy farther than its later ones.

The rate starts at `FIRST_RATE`. Until a measurement comes close to the target, every step changes
it. In bf16, rounding causes a KL that does not depend on the rate; the search subtracts the KL of
its first measurement.

A schedule or a warm-up multiplies the rate by a factor. The rate is what it would be without it.

Sources: rsl_rl's schedule="adaptive" (Rudin et al. 2021, arXiv:2109.11978) and TorchRL's
KLAdaptiveLR multiply the rate by a constant when a minibatch's KL leaves a band.
"""

from __future__ import annotations

import math
from typing import Any

FIRST_RATE = 1e-5
"""About the rate of Ouyang et al. 2022 for 1.3 and 6 billion parameters."""

LARGEST_RATE = 3e-3
"""Where the rate ends if nothing moves the policy, such as one that has become deterministic. The
last step of an update is not measured, and above this rate a single step can ruin a policy."""

SEARCH_GROWTH = 10.0
"""Largest factor on the rate per step during the search."""

PROBE = 2.0
"""Smallest factor after the first measurement of the search, unless it ends the search."""

SEARCH_END = 0.25
"""Share of the expected KL at which the search ends."""

CHANGE = 4.0
"""Largest factor on the rate per update, or its inverse, after the search. Also the largest factor
above the latest rate that reached `SEARCH_END` of the target: a policy that has learned its task
hardly moves at any rate."""

RAISE = 0.5
"""Exponent of a rise, relative to that of a fall: the rate rises half as fast."""

FIRST_UPDATES = 4
"""Updates after the search in which the rate rises as fast as it falls."""

LEAST_SHARE = 0.25
"""Smallest share of `step_kl`, for a policy that has become deterministic. In bf16, rounding causes
a KL of about 0.002, a tenth of the default at 64 responses; with two steps, it is counted twice."""

MOST_SHARE = 2.0
"""Largest share of `step_kl`, at four nats per token and more."""

LEAST_FACTOR = 0.1
"""Factor of a schedule below which the KL of an update is too small to measure."""

SMALLEST_RATE = 1e-9

LEAST_KL = 1e-12
"""Share of the target in place of a KL of 0 or less, which is rounding."""


class AdaptiveRate:
    """The learning rate and its adaptation. It converges from any small initial rate."""

    def __init__(self) -> None:
        self.rate: float = FIRST_RATE
        self.is_searching = True
        self.reached: float | None = None
        """The latest rate whose update came near the target."""
        self.first_moved = 0.0
        self.first_path = 0.0
        """The first measurement of the search: `moved` and the sum of the rates before it."""
        self.updates = 0
        """Measured updates since the search."""
        self.target_share = 1.0
        """Target as a share of `step_kl`, by the entropy of the latest update."""
        self.begin_update(1.0, 1)

    def begin_update(self, target: float, steps: int) -> None:
        """Start an update.

        Args:
            target: `step_kl`, nats per token.
            steps: planned optimizer steps.
        """
        self.target = target * self.target_share
        self.steps = steps
        self._taken = 0
        self._path = 0.0
        """Sum of the rates of the steps so far."""
        self._first_kl = 0.0
        self._sensitivities: list[float] = []
        """KL of a whole update, as a share of the target, per squared rate."""

    def before_step(self, kl: float) -> None:
        """Take the KL before the next step into account.

        Args:
            kl: to the rollout policy, over the next step's minibatch, nats per token.
        """
        if not math.isfinite(kl):
            return
        if self._taken == 0:
            # Rounding, or responses of an earlier policy.
            self._first_kl = kl
            return
        if kl <= self._first_kl and self._first_kl > self.target:
            return  # the noise is larger than the movement
        moved = max((kl - self._first_kl) / self.target, LEAST_KL)
        mean_rate = self._path / self._taken
        if mean_rate < LEAST_FACTOR * self.rate:
            return
        self._sensitivities.append(moved * self.steps / self._taken / mean_rate**2)
        if self.is_searching:
            self._search(moved)

    def step_taken(self, factor: float = 1.0) -> None:
        """Count a step at the current rate times the factor of a schedule."""
        self._taken += 1
        self._path += factor * self.rate

    def end_update(self, entropy: float) -> None:
        """Set the rate of the next update.

        Args:
            entropy: of the policy in this update, nats per token; 0 if no token was in the loss.
        """
        if 0 < entropy < math.inf:
            self.target_share = min(max(entropy**0.5, LEAST_SHARE), MOST_SHARE)
        if self.is_searching or not self._sensitivities:
            return
        self.updates += 1
        expected = self._sensitivity * self.rate**2
        if expected > SEARCH_END:
            self.reached = self.rate
        gain = 1.0 if expected > 1 or self.updates <= FIRST_UPDATES else RAISE
        change = min(max(expected ** (-gain / 2), 1 / CHANGE), CHANGE)
        rate = self.rate * change
        self._set(rate if self.reached is None else min(rate, CHANGE * self.reached))

    def _search(self, moved: float) -> None:
        is_first = self.first_path == 0
        if self._path <= self.first_path:
            return  # the rate is at its largest
        caused = max(moved - self.first_moved, LEAST_KL)
        # Quadratic in the steps, the most that is possible: the first steps may be small.
        expected = caused * (self.steps * self.rate) ** 2 / (self._path**2 - self.first_path**2)
        # An extrapolated first measurement may be rounding, times the squared number of steps.
        self.is_searching = (moved if is_first else expected) < SEARCH_END
        change = min(expected**-0.5, SEARCH_GROWTH)
        if is_first:
            self.first_moved, self.first_path = moved, self._path
            change = max(change, PROBE) if self.is_searching else change
        self._set(self.rate * change)

    def _set(self, rate: float) -> None:
        self.rate = min(max(rate, SMALLEST_RATE), LARGEST_RATE)

    @property
    def is_stuck(self) -> bool:
        """Whether the largest rate does not reach the target."""
        return self.is_searching and self.rate == LARGEST_RATE

    @property
    def metrics(self) -> dict[str, float]:
        """`update_kl`: KL of the update, extrapolated to its last step, nats per token;
        `target_kl`: its target."""
        metrics = {"target_kl": self.target}
        if self._sensitivities:
            mean_rate = self._path / self._taken
            metrics["update_kl"] = self.target * self._sensitivity * mean_rate**2
        return metrics

    @property
    def _sensitivity(self) -> float:
        """The mean over the second half of the steps."""
        recent = self._sensitivities[len(self._sensitivities) // 2 :]
        return sum(recent) / len(recent)

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two updates, as JSON."""
        return {
            "rate": self.rate,
            "is_searching": self.is_searching,
            "reached": self.reached,
            "first_moved": self.first_moved,
            "first_path": self.first_path,
            "updates": self.updates,
            "target_share": self.target_share,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Checkpoints of fixed-rate runs hold no state."""
        self.rate = state.get("rate", self.rate)
        self.is_searching = state.get("is_searching", self.is_searching)
        self.reached = state.get("reached", self.reached)
        self.first_moved = state.get("first_moved", self.first_moved)
        self.first_path = state.get("first_path", self.first_path)
        self.updates = state.get("updates", self.updates)
        self.target_share = state.get("target_share", self.target_share)
