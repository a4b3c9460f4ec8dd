"""The rows of a batch of episodes: the sequences that PPO reads and trains on.

Most episodes are one row. An agent's episode has several if its requests do not all continue one
conversation (`fastppo.environments.episodes`). Rewards and groups are of episodes. With the default
`aggregation: token-mean` every token weighs the same, so an episode of three rows of equal length
weighs three times as much as one of one such row. Only with `seq-mean-token-mean` does an episode
weigh as one:

    score            each row ends with the score of its episode, so every turn is credited
    values, GAE      of each row by itself
    rloo, group      one advantage per episode, for all of its rows
    aggregation      a sequence is an episode, all rows together
    minibatches      hold whole episodes

Sources: one advantage per episode for all of its rows, verl (agent loops with several outputs,
issue 5400), SkyRL (step-wise training, pull request 1507) and NeMo RL (pull request 3910); the
loss's mean over all tokens of an episode, slime (pull request 1933, as ported in Miles 1931).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastppo.data.batch import Batch
from fastppo.rewards.scorer import Scores
from fastppo.rollout import Rollout


class Rows(NamedTuple):
    """The rows of a rollout. The rows of an episode are adjacent, the one of its last turn last."""

    prompt_ids: list[list[int]]
    rollout: Rollout
    """One response per row."""
    episodes: Tensor | None = None
    """[rows] int64 on the CPU, the episode of each row. None if every episode is one row."""

    @classmethod
    def of(cls, prompt_ids: list[list[int]], rollout: Rollout) -> Rows:
        """Return the rows of a rollout with one response per episode."""
        if not any(rollout.branches or ()):
            return cls(prompt_ids, rollout)
        assert rollout.branches is not None
        ids: list[list[int]] = []
        parts: list[Rollout] = []
        episodes: list[int] = []
        for episode, branches in enumerate(rollout.branches):
            ids += [*(branch.prompt_ids for branch in branches), prompt_ids[episode]]
            parts += [*(branch.rollout for branch in branches), rollout.select([episode])]
            episodes += [episode] * (len(branches) + 1)
        return cls(ids, Rollout.joined(parts), torch.tensor(episodes))

    def batch(self, device: torch.device) -> Batch:
        """Return the rows as a batch of sequences."""
        rollout = self.rollout
        return Batch.of(self.prompt_ids, rollout.tokens, device, rollout.response_mask)

    def scores(self, scores: Scores) -> Scores:
        """Return the scores of the rows.

        Args:
            scores: of the episodes.
        """
        if self.episodes is None:
            return scores
        return scores.of_rows(self.episodes.tolist(), self.rollout.generated_lengths)
