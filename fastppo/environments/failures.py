"""What happens to an episode whose environment fails.

    raise   the run ends with the error
    drop    the episode is left out of the batch and counted

With several samples per prompt, the others of a dropped one are left out too, so that the samples
of a prompt remain adjacent and complete. A run with `drop` ends if all episodes of an iteration
fail, or more than a tenth of those of three iterations in a row. Evaluations leave out the failed
episodes alone, and do not end a run unless all of theirs fail.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from fastppo.environments.episodes import Episode
from fastppo.rewards.reward import AllFailedError, RewardError

logger = logging.getLogger(__name__)

ITERATIONS = 3
MOST = 0.1
"""Share of failed episodes in `ITERATIONS` iterations that ends a run."""


class RaiseFailures:
    """End the run at the first failure."""

    drops = False

    def take(self, episode: Episode, error: RewardError) -> None:
        """Raise the error."""
        raise error

    def kept(self, episodes: Sequence[Episode], *, held_out: bool = False) -> Sequence[int]:
        """Return the rows of the episodes to keep: all."""
        return range(len(episodes))

    def metrics(self) -> dict[str, float]:
        """End an iteration or an evaluation, and return no metrics."""
        return {}


class DropFailures(RaiseFailures):
    """Leave out failed episodes.

    Args:
        samples_per_prompt: adjacent episodes of one prompt, which are left out together.
    """

    drops = True

    def __init__(self, samples_per_prompt: int = 1) -> None:
        self.samples = samples_per_prompt
        self.failed = 0
        """Episodes since the last call of `metrics`."""
        self.recent: deque[list[int]] = deque([[0, 0]], maxlen=ITERATIONS)
        """[failed episodes, all episodes] of the latest iterations; the last is in progress."""

    def take(self, episode: Episode, error: RewardError) -> None:
        """End the episode."""
        episode.error = error

    def kept(self, episodes: Sequence[Episode], *, held_out: bool = False) -> Sequence[int]:
        """Return the rows of the episodes to keep.

        Args:
            held_out: whether this is an evaluation: prompts have one sample, and failures do not
                count for the end of the run.

        Raises:
            AllFailedError: none is left.
            RewardError: too many have failed.
        """
        failed = [row for row, episode in enumerate(episodes) if episode.error is not None]
        self.failed += len(failed)
        if not held_out:
            self.recent[-1][0] += len(failed)
            self.recent[-1][1] += len(episodes)
        if not failed:
            return range(len(episodes))
        first = episodes[failed[0]].error
        sentence = f"{len(failed)} of {len(episodes)} episodes failed: {first}"
        lost, total = map(sum, zip(*self.recent, strict=True))
        if len(self.recent) == ITERATIONS and lost > MOST * total and not held_out:
            raise RewardError(
                f"environment_failure=drop: {lost} of the {total} episodes of {ITERATIONS} "
                f"iterations failed, more than a tenth; {sentence}"
            ) from first
        samples = 1 if held_out else self.samples
        left_out = {row // samples for row in failed}
        kept = [row for row in range(len(episodes)) if row // samples not in left_out]
        if not kept:
            raise AllFailedError(f"no episode is left: {sentence}") from first
        logger.info(f"{sentence}; left out {len(episodes) - len(kept)}")
        return kept

    def metrics(self) -> dict[str, float]:
        """End an iteration or an evaluation, and return its number of failed episodes."""
        if self.recent[-1][1]:
            self.recent.append([0, 0])
        failed = self.failed
        self.failed = 0
        return {"failed_episodes": float(failed)}
