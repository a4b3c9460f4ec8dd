"""A running scale for scores, before they become rewards.

Scores are one number per response. Their scale is the reward's own, and an advantage, a value loss
and a KL coefficient all depend on it; dividing by their deviation so far fixes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

MIN_DEVIATION = 1e-6
"""Below this, scores have not varied but for rounding, and are left alone: dividing by such a
deviation would make rounding the reward."""


@dataclass(slots=True)
class RunningScale:
    """Divides scores by the running standard deviation of all scores seen so far.

        score / σ,   σ² = m2 / count over every score of the run, this batch included

    The mean is not subtracted, so a score keeps its sign and a response that is better than nothing
    stays so. While σ < `MIN_DEVIATION` scores are left as they are.

    The state is these three numbers: `asdict(scale)` goes into a checkpoint as JSON, and
    `RunningScale(**saved)` goes on to the same bits.

    Source: Engstrom et al. 2020, section 3 (there the deviation is of the discounted return, which
    for one score at the end of an episode, undiscounted, is the score); batches join by Chan et
    al. 1983.
    """

    count: int = 0
    mean: float = 0.0
    """Mean of the scores so far, reward units; the deviation needs it."""
    m2: float = 0.0
    """Σ (score − mean)² of the scores so far."""

    def __call__(self, scores: Tensor) -> Tensor:
        """Updates the moments, then scales: [B] any float dtype to [B] of that dtype.

        Raises:
            ValueError: a score is not finite: it would stay in the state.
        """
        self.update(scores)
        return (scores.double() / self.deviation).to(scores.dtype)

    def update(self, scores: Tensor) -> None:
        """Adds the scores to the running moments, in fp64."""
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
        """What scores are divided by, reward units: σ, or 1 where σ < `MIN_DEVIATION`. Rewards by
        token are divided by the same number."""
        deviation = math.sqrt(self.m2 / self.count) if self.count else 0.0
        return deviation if deviation >= MIN_DEVIATION else 1.0
