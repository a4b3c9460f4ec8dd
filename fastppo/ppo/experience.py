"""Experience: a batch of responses with the per-token inputs of PPO's losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.data.batch import Batch, on_device, spans, split_packed, starts
from fastppo.data.microbatches import Limits, assign
from fastppo.data.prompts import Prompts
from fastppo.data.world import World
from fastppo.functional.aggregation import aggregation_weights
from fastppo.ppo.rows import Rows
from fastppo.ppo.trained import Trained
from fastppo.rewards.scorer import Scores
from fastppo.rollout import Rollout


class Responses(NamedTuple):
    """Prompts, responses and scores of an iteration."""

    prompts: Prompts
    rollout: Rollout
    scores: Scores

    def select(self, rows: Sequence[int]) -> Responses:
        """Return the given rows, in that order."""
        return Responses(
            self.prompts.select(rows), self.rollout.select(rows), self.scores.select(rows)
        )

    @classmethod
    def joined(cls, parts: Sequence[Responses]) -> Responses:
        """Concatenate the responses of several draws."""
        prompts, rollouts, scores = zip(*parts, strict=True)
        return cls(Prompts.joined(prompts), Rollout.joined(rollouts), Scores.joined(scores))


PENDING = torch.empty(0)
"""A tensor that a later step fills."""

IN_UPDATE = (
    "old_logprobs",
    "old_values",
    "advantages",
    "returns",
    "monte_carlo_returns",
    "ref_logprobs",
    "importance_weights",
    "scores",
    "token_weights",
)
"""Per-token tensors that an update reads. `select` leaves the others out."""


@dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """One iteration's batch and all that PPO computes about it, filled in four steps.

    Per-token tensors are [N] fp32 on the device.
    """

    # 1. From the rollout and its rewards.
    batch: Batch
    scores: Tensor | None = None
    """Score of each token's response, before normalization."""
    truncated: Tensor | None = None
    """[B] bool on the CPU, whether each response was truncated."""
    masked: Tensor | None = None
    """[B] bool on the CPU, responses left out of the loss. None means that all are in it."""
    episodes: Tensor | None = None
    """[B] int64 on the CPU, the episode of each sequence, adjacent for the rows of an episode. None
    if every episode is one row; see `fastppo.ppo.rows`."""

    # 2. From the policies before the update (`fastppo.ppo.policies`).
    old_logprobs: Tensor = PENDING
    """Logprob under the rollout policy, nats."""
    old_values: Tensor = PENDING
    """Value of the state before each token, at the time of the rollout."""
    final_values: Tensor | None = None
    """[B], value after each sequence's last token."""
    importance_weights: Tensor | None = None
    """π_old/π_sampler, bounded. None if both are the same distribution."""
    ref_logprobs: Tensor | None = None
    """Logprob under the reference, nats. None without a reference."""
    exact_kl: Tensor | None = None
    """KL(policy, reference) of each token's distribution, nats, if the reward uses it."""

    # 3. The rewards and the advantages (`fastppo.ppo.estimators`).
    last_rewards: Tensor = PENDING
    """[B], reward at the last token of each response."""
    token_rewards: Tensor | None = None
    """Reward at each token, in addition to `last_rewards`. An exact KL is a part of it."""
    kl_coef: float = 0.0
    """β of the sampled KL to the reference, which the estimators subtract from the rewards."""
    bootstrap: Tensor | None = None
    """[B], value after a truncated response, 0 after the others."""
    advantages: Tensor = PENDING
    returns: Tensor = PENDING
    """Targets of the value loss."""
    monte_carlo_returns: Tensor = PENDING
    """Monte Carlo returns (λ = 1): rewards-to-go with the KL penalty, the score and rewards within
    the response, discounted like GAE. They contain no values, except the bootstrap value after a
    truncated response if there is one."""
    advantage_std: Tensor | None = None
    """Standard deviation of the advantages before whitening, 0-d."""
    trained: Trained = Trained()
    """What the iteration trains."""

    # 4. In a minibatch.
    token_weights: Tensor | None = None
    """Weight of each token in its minibatch's loss."""

    @classmethod
    def of_rows(cls, batch: Batch, rows: Rows, scores: Scores, *, masks: bool) -> Experience:
        """Return the experience before its first step.

        Args:
            rows: the rows of the batch.
            scores: of the rows.
            masks: whether truncated episodes are left out of the loss.
        """
        truncated = torch.tensor(rows.rollout.truncated)
        experience = cls(
            batch,
            scores=scores.total.repeat_interleave(batch.generated_lengths).to(batch.device),
            truncated=truncated,
            episodes=rows.episodes,
        )
        if masks:
            masked = experience.by_row(experience.by_episode(truncated))
            experience = replace(experience, masked=masked)
        return experience

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self.rows_per_episode)

    @property
    def rows_per_episode(self) -> Tensor:
        """[episodes] int64 on the CPU."""
        if self.episodes is None:
            return torch.ones(len(self.batch), dtype=torch.int64)
        return self.episodes.unique_consecutive(return_counts=True)[1]

    @property
    def episode_lengths(self) -> Tensor:
        """[episodes] int64 on the CPU, tokens of the policy in all rows of each episode."""
        lengths = self.batch.generated_lengths
        if self.episodes is None:
            return lengths
        return torch.segment_reduce(lengths.double(), "sum", lengths=self.rows_per_episode).long()

    def by_episode(self, by_row: Tensor) -> Tensor:
        """Return the entry of each episode's last row, [episodes]."""
        if self.episodes is None:
            return by_row
        return by_row[self.rows_per_episode.cumsum(0) - 1]

    def mean_of_rows(self, by_row: Tensor) -> Tensor:
        """Return the mean over each episode's rows, [episodes]."""
        if self.episodes is None:
            return by_row
        counts = self.rows_per_episode.to(by_row.device)
        return torch.segment_reduce(by_row, "mean", lengths=counts)

    def by_row(self, by_episode: Tensor) -> Tensor:
        """Repeat the entry of each episode for its rows, [B]."""
        if self.episodes is None:
            return by_episode
        return by_episode.repeat_interleave(self.rows_per_episode.to(by_episode.device))

    def rows_of(self, episodes: Tensor) -> Tensor:
        """Return the rows of episodes, in the order of the episodes, [k] int64 on the CPU."""
        if self.episodes is None:
            return episodes
        counts = self.rows_per_episode
        return spans(starts(counts)[episodes], counts[episodes])

    @property
    def has_loss(self) -> bool:
        """Whether any sequence is in the loss."""
        return self.masked is None or not bool(self.masked.all())

    def select(self, rows: Tensor) -> Experience:
        """Select sequences by `rows`, [k] int64 on the CPU, in that order, for an update."""
        lengths = self.batch.generated_lengths
        index = on_device(spans(starts(lengths)[rows], lengths[rows]), self.batch.device)
        masked = None if self.masked is None else self.masked[rows]
        episodes = None if self.episodes is None else self.episodes[rows]
        return Experience(
            self.batch.select(rows),
            **{name: value[index] for name, value in self._in_update().items()},
            masked=masked,
            episodes=episodes,
            trained=self.trained,
        )

    def in_loss(self) -> Experience:
        """Drop the masked sequences. If all are masked, they stay, with weights of 0."""
        if self.masked is None or not self.has_loss or not self.masked.any():
            return self
        return replace(self.select((~self.masked).nonzero()[:, 0]), masked=None)

    def minibatches(self, order: Tensor, count: int, aggregation: str) -> list[Experience]:
        """Split into at most `count` minibatches of about equal size, each with its loss weights.

        A minibatch consists of whole episodes. The weights belong to the minibatch, so splitting it
        further changes nothing. All minibatches share the memory of one shuffled copy.

        Args:
            order: [episodes] int64 on the CPU.
        """
        parts = [self.rows_of(part) for part in order.tensor_split(min(count, len(self)))]
        sizes = [len(rows) for rows in parts]
        shuffled = self.select(torch.cat(parts))
        lengths = shuffled.batch.generated_lengths
        per_token: dict[str, Any] = {
            name: split_packed(value, lengths, sizes)
            for name, value in shuffled._in_update().items()
        }
        minibatches = []
        for i, batch in enumerate(shuffled.batch.split(sizes)):
            minibatch = Experience(
                batch,
                **{name: parts[i] for name, parts in per_token.items()},
                masked=None if shuffled.masked is None else shuffled.masked.split(sizes)[i],
                episodes=None if shuffled.episodes is None else shuffled.episodes.split(sizes)[i],
                trained=self.trained,
            )
            minibatches.append(minibatch.weighted(aggregation))
        return minibatches

    def microbatches(self, limits: Limits, world: World | None = None) -> Iterator[Experience]:
        """Yield this rank's microbatches; see `fastppo.data.microbatches`.

        If other ranks have more microbatches, a sequence without weight fills in.
        """
        world = world or World()
        assignment = assign(self.batch.lengths, limits, world)
        parts = assignment.ranks[world.rank]
        if world.size == 1 and len(parts) == 1:
            yield self
            return
        for rows in parts:
            yield self.select(rows)
        for _ in range(assignment.rounds - len(parts)):
            filler = self.select(assignment.filler)
            assert filler.token_weights is not None
            yield replace(filler, token_weights=torch.zeros_like(filler.token_weights))

    def weighted(self, aggregation: str) -> Experience:
        """Return a copy with each token's weight in a loss over the whole batch."""
        masked = None if self.masked is None else self.by_episode(self.masked)
        weights = token_weights(self.episode_lengths, aggregation, masked)
        return replace(self, token_weights=on_device(weights, self.batch.device))

    def _in_update(self) -> dict[str, Any]:
        """Return the tensors of `IN_UPDATE` that there are, by name."""
        tensors = {name: getattr(self, name) for name in IN_UPDATE}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def token_weights(lengths: Tensor, aggregation: str, masked: Tensor | None = None) -> Tensor:
    """Return the weights [N] fp32 of packed response tokens, from the lengths [B].

    Args:
        masked: [B] bool, responses with weights of 0.
    """
    longest = int(lengths.max()) if lengths.numel() else 0
    mask = torch.arange(longest, device=lengths.device) < lengths.unsqueeze(1)
    in_loss = mask if masked is None else mask & ~masked.unsqueeze(1)
    return aggregation_weights(in_loss, aggregation)[mask]
