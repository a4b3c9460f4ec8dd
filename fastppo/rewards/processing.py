"""Running normalization of scores.

Scores are one number per response. Their scale depends on the reward, and advantages, value loss
and KL coefficient depend on it. Dividing by the running standard deviation fixes the scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

MIN_DEVIATION = 1e-6
"""Smaller deviations are rounding errors. Scores are then left unscaled."""


@dataclass(slots=True)
class RunningScale:
    """Divide scores by the running standard deviation of all scores so far.

        score / σ,   σ² = m2 / count over every score of the run, this batch included

    The mean is not subtracted, so scores keep their sign. While σ < `MIN_DEVIATION`, scores are
    unchanged.

    The state is these three numbers: `asdict(scale)` goes into a checkpoint as JSON, and
    `RunningScale(**saved)` continues with the same bits.

    Source: Engstrom et al. 2020, section 3 (there the deviation of the discounted return, which
    for one undiscounted score at the end of an episode is the score); batches are merged by Chan
    et al. 1983.
    """

    count: int = 0
    mean: float = 0.0
    """Mean of the scores so far, reward units. `m2` is updated from it."""
    m2: float = 0.0
    """Σ (score − mean)² of the scores so far."""

    def __call__(self, scores: Tensor) -> Tensor:
        """Update the moments, then scale.

        Args:
            scores: [B], any float dtype. The result has the same dtype.

        Raises:
            ValueError: a score is not finite.
        """
        self.update(scores)
        return (scores.double() / self.deviation).to(scores.dtype)

    def update(self, scores: Tensor) -> None:
        """Update the running moments, in fp64."""
        values = scores.tolist()
        if not all(map(math.isfinite, values)):
            raise ValueError(f"scores must be finite, got {values}")
        if not values:
            return
        batch = len(values)
        total = self.count + batch
        batch_mean = math.fsum(values) / batch
        shift = batch_mean - self.mean
        self.m2 += math.fsum((value - batch_mean) ** 2 for value in values)
        self.m2 += shift * shift * self.count * batch / total
        self.mean += shift * batch / total
        self.count = total

    @property
    def deviation(self) -> float:
        """Divisor of scores and of rewards by token: σ, or 1 where σ < `MIN_DEVIATION`."""
        deviation = math.sqrt(self.m2 / self.count) if self.count else 0.0
        return deviation if deviation >= MIN_DEVIATION else 1.0
