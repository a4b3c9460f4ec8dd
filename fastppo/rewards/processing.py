"""What is done to the scores of a batch before they become rewards.

Scores are one number per response. Their scale is the reward's own, and an advantage, a value loss
and a KL coefficient all depend on it; these functions fix the scale, or make length cost something.

    RunningScale        score / deviation of all scores so far: the scale, never the sign
    whiten_scores       mean 0, deviation 1 within the batch: the sign too
    length_penalty      coef · max(0, length − free_tokens), to be subtracted
    length_normalized   score / length

All take [B] tensors, scores in reward units, lengths in tokens, and leave their input as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastppo.functional import arguments
from fastppo.functional.advantages import whiten

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
    """Of the scores so far, reward units. It is kept for the deviation's sake."""
    m2: float = 0.0
    """Σ (score − mean)² of the scores so far."""

    def __call__(self, scores: Tensor) -> Tensor:
        """Takes the scores in, then scales them: [B] any float dtype to [B] of that dtype.

        Raises:
            ValueError: scores are not [B], or one is not finite: it would stay in the state.
        """
        self.update(scores)
        return (scores.double() / self.deviation).to(scores.dtype)

    def update(self, scores: Tensor) -> None:
        """Takes the scores into the running moments, in fp64."""
        values = _vector("scores", scores).tolist()
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


def whiten_scores(scores: Tensor) -> Tensor:
    """Scores of one batch to mean 0 and deviation 1: `fastppo.whiten` on [B].

        (score − mean) · rsqrt(var + 1e-8),   var with Bessel's correction

    One score, or scores that are all alike, become 0: a batch without differences teaches nothing.
    Unlike `RunningScale` this takes the mean away, so half of a good batch is punished.

    Args:
        scores: [B] any float dtype; the global batch.

    Returns:
        [B] fp32 (fp64 of fp64).

    Source: Ziegler et al. 2019 (their code's `whiten`).
    """
    # B numbers are no work for a kernel, and the definition sums them in fp64: scores that are all
    # alike then give exact zeros.
    return whiten(_vector("scores", scores), backend="torch")


def length_penalty(lengths: Tensor, coef: float, free_tokens: int = 0) -> Tensor:
    """What a response's length costs, to be subtracted from its score: longer never scores higher.

        coef · max(0, length − free_tokens)

    Args:
        lengths: [B] int or float, response tokens, the EOS included.
        coef: at least 0, reward units per token.
        free_tokens: at least 0; tokens that cost nothing.

    Returns:
        [B] fp32, reward units, at least 0.

    Raises:
        ValueError: a negative coefficient or number of tokens, lengths that are not [B].
    """
    arguments.finite("coef", arguments.at_least("coef", coef, 0))
    arguments.at_least("free_tokens", free_tokens, 0)
    _vector("lengths", lengths, arguments.NUMBERS)
    return coef * (lengths.float() - free_tokens).clamp(min=0)


def length_normalized(scores: Tensor, lengths: Tensor) -> Tensor:
    """Reward per token, score / length: where scores add up over tokens, length pays no more.

    Dividing brings a negative score nearer to 0 the longer the response is, so a reward that is
    mostly negative pays for length: use `length_penalty` there.

    Args:
        scores: [B] any float dtype, reward units. lengths: [B] int or float, response tokens >= 1.

    Returns:
        [B] the scores' dtype, reward units per token.

    Raises:
        ValueError: shapes differ, or a response has no token.
    """
    _vector("scores", scores)
    arguments.tensor("lengths", lengths, shape=scores.shape, like=scores, dtypes=arguments.NUMBERS)
    if bool((lengths < 1).any()):
        raise ValueError(f"lengths must be >= 1, got {lengths.tolist()}")
    return (scores.double() / lengths).to(scores.dtype)


def _vector(name: str, value: Tensor, dtypes: tuple[torch.dtype, ...] = arguments.FLOATS) -> Tensor:
    arguments.tensor(name, value, dtypes=dtypes)
    if value.dim() != 1:
        raise ValueError(f"{name} must be [B], one per sequence, got {list(value.shape)}")
    return value
