"""What happens to an episode whose environment fails.

    raise   the run ends with the error
    drop    the episode is left out of the batch and counted

With several samples per prompt, the others of a dropped one are left out too, so that the samples
of a prompt remain adjacent and complete. A run with `drop` ends if all episodes of a batch fail, or
more than a tenth of those of three batches in a row.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from fastppo.environments.episodes import Episode
from fastppo.rewards.reward import RewardError

logger = logging.getLogger(__name__)

BATCHES = 3
MOST = 0.1
"""Share of failed episodes in `BATCHES` batches that ends a run."""


class RaiseFailures:
    """End the run at the first failure."""

    drops = False

    def take(self, episode: Episode, error: RewardError) -> None:
        """Raise the error."""
        raise error

    def kept(self, episodes: Sequence[Episode]) -> Sequence[int]:
        """Return the rows of the episodes to train on: all."""
        return range(len(episodes))

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
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
        self.recent: deque[tuple[int, int]] = deque(maxlen=BATCHES)
        """(failed episodes, all episodes) of the latest batches."""

    def take(self, episode: Episode, error: RewardError) -> None:
        """End the episode."""
        episode.error = error

    def kept(self, episodes: Sequence[Episode]) -> Sequence[int]:
        """Return the rows of the episodes to train on.

        Raises:
            RewardError: too many have failed.
        """
        failed = [row for row, episode in enumerate(episodes) if episode.error is not None]
        self.failed += len(failed)
        self.recent.append((len(failed), len(episodes)))
        if not failed:
            return range(len(episodes))
        first = episodes[failed[0]].error
        sentence = f"{len(failed)} of {len(episodes)} episodes failed: {first}"
        left_out = {row // self.samples for row in failed}
        kept = [row for row in range(len(episodes)) if row // self.samples not in left_out]
        if not kept:
            raise RewardError(f"no episode is left to train on: {sentence}") from first
        lost, total = map(sum, zip(*self.recent, strict=True))
        if len(self.recent) == BATCHES and lost > MOST * total:
            raise RewardError(
                f"environment_failure=drop: {lost} of the {total} episodes of {BATCHES} batches "
                f"failed, more than a tenth; {sentence}"
            ) from first
        logger.info(f"{sentence}; left out {len(episodes) - len(kept)}")
        return kept

    def metrics(self) -> dict[str, float]:
        """Return the failed episodes since the last call."""
        failed = self.failed
        self.failed = 0
        return {"failed_episodes": float(failed)}
