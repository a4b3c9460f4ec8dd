"""Experience: a batch of responses with the per-token inputs of PPO's losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.data.batch import ALIGNMENT, Batch, in_one_copy, on_device, spans, starts
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
    response_kl: list[float] | None = None
    """KL to the reference of the first responses, those that are logged, nats. None without a
    reference."""
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
        by_token = scores.total.repeat_interleave(batch.generated_lengths)
        experience = cls(
            batch,
            scores=on_device(by_token, batch.device),
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
        return _lengths_of_runs(self.episodes)

    @property
    def episode_lengths(self) -> Tensor:
        """[episodes] int64 on the CPU, tokens of the policy in all rows of each episode."""
        lengths = self.batch.generated_lengths
        if self.episodes is None:
            return lengths
        return _sums(lengths, self.rows_per_episode)

    def by_episode(self, by_row: Tensor) -> Tensor:
        """Return the entry of each episode's last row, [episodes]."""
        if self.episodes is None:
            return by_row
        return by_row[on_device(self.rows_per_episode.cumsum(0) - 1, by_row.device)]

    def mean_of_rows(self, by_row: Tensor) -> Tensor:
        """Return the mean over each episode's rows, [episodes]."""
        if self.episodes is None:
            return by_row
        counts = on_device(self.rows_per_episode, by_row.device)
        return torch.segment_reduce(by_row, "mean", lengths=counts)

    def by_row(self, by_episode: Tensor) -> Tensor:
        """Repeat the entry of each episode for its rows, [B]."""
        if self.episodes is None:
            return by_episode
        counts = on_device(self.rows_per_episode, by_episode.device)
        return by_episode.repeat_interleave(counts, output_size=len(self.batch))

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
        return self.parts([rows])[0]

    def parts(self, rows: Sequence[Tensor], aggregation: str | None = None) -> list[Experience]:
        """Select the sequences of several parts, with one copy to the device and one gather.

        The parts share the memory of one copy. Each begins at an aligned address, so that kernels
        are compiled once.

        Args:
            rows: of each part, [k] int64 on the CPU, in that order.
            aggregation: how to weight the tokens of each part; None keeps their weights.
        """
        if not rows:
            return []
        batch = self.batch
        lengths = batch.generated_lengths
        order = torch.cat([*rows])
        begins = starts(lengths)
        tokens = [spans(begins[part], lengths[part]) for part in rows]
        index = [_padded(part) for part in tokens]
        to_device = [batch.positions(order), torch.cat(index)]
        if aggregation is not None:
            weights = [self._weights(part, aggregation) for part in rows]
            to_device.append(torch.cat([_padded(part) for part in weights]))
        positions, gathered, *weighted = in_one_copy(to_device, batch.device)
        named = self._in_update()
        fields = dict(
            zip(named, torch.stack([*named.values()]).index_select(1, gathered), strict=True)
        )
        if weighted:
            fields["token_weights"] = weighted[0]
        batches = batch.select(order, positions).split([len(part) for part in rows])
        sizes = [len(part) for part in index]
        by_name = {name: values.split(sizes) for name, values in fields.items()}
        return [
            Experience(
                batches[i],
                **{name: values[i][: len(tokens[i])] for name, values in by_name.items()},
                masked=None if self.masked is None else self.masked[part],
                episodes=None if self.episodes is None else self.episodes[part],
                trained=self.trained,
            )
            for i, part in enumerate(rows)
        ]

    def in_loss(self) -> Experience:
        """Drop the masked sequences. If all are masked, they stay, with weights of 0."""
        if self.masked is None or not self.has_loss or not self.masked.any():
            return self
        return replace(self.select((~self.masked).nonzero()[:, 0]), masked=None)

    def minibatches(self, order: Tensor, count: int, aggregation: str) -> list[Experience]:
        """Split into at most `count` minibatches of about equal size, each with its loss weights.

        A minibatch consists of whole episodes. The weights belong to the minibatch, so splitting it
        further changes nothing.

        Args:
            order: [episodes] int64 on the CPU.
        """
        parts = order.tensor_split(min(count, len(self)))
        return self.parts([self.rows_of(part) for part in parts], aggregation)

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
        for i, part in enumerate(self.parts(assignment.of_rank(world.rank))):
            if i < len(parts):
                yield part
            else:
                assert part.token_weights is not None
                yield replace(part, token_weights=torch.zeros_like(part.token_weights))

    def weighted(self, aggregation: str) -> Experience:
        """Return a copy with each token's weight in a loss over the whole batch."""
        weights = self._weights(torch.arange(len(self.batch)), aggregation)
        return replace(self, token_weights=on_device(weights, self.batch.device))

    def _weights(self, rows: Tensor, aggregation: str) -> Tensor:
        """Return the weights of some sequences' tokens in a loss over them, on the CPU.

        Args:
            rows: [k] int64 on the CPU, all rows of some episodes.
        """
        lengths = self.batch.generated_lengths[rows]
        masked = None if self.masked is None else self.masked[rows]
        if self.episodes is not None:
            counts = _lengths_of_runs(self.episodes[rows])
            lengths = _sums(lengths, counts)
            masked = None if masked is None else masked[counts.cumsum(0) - 1]
        return token_weights(lengths, aggregation, masked)

    def _in_update(self) -> dict[str, Any]:
        """Return the tensors of `IN_UPDATE` that there are, by name."""
        tensors = {name: getattr(self, name) for name in IN_UPDATE}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _lengths_of_runs(numbers: Tensor) -> Tensor:
    """Return how often each number is repeated in a row, int64."""
    return numbers.unique_consecutive(return_counts=True)[1]


def _sums(numbers: Tensor, counts: Tensor) -> Tensor:
    """Return the sums of consecutive integers, the first of `counts[0]` of them, int64."""
    return torch.segment_reduce(numbers.double(), "sum", lengths=counts).long()


def _padded(x: Tensor) -> Tensor:
    """Pad a tensor [n] with zeros, so that fp32 values after as many entries are aligned."""
    return torch.nn.functional.pad(x, (0, -len(x) % (ALIGNMENT // 4)))


def token_weights(lengths: Tensor, aggregation: str, masked: Tensor | None = None) -> Tensor:
    """Return the weights [N] fp32 of packed response tokens, from the lengths [B].

    Args:
        masked: [B] bool, responses with weights of 0.
    """
    longest = int(lengths.max()) if lengths.numel() else 0
    mask = torch.arange(longest, device=lengths.device) < lengths.unsqueeze(1)
    in_loss = mask if masked is None else mask & ~masked.unsqueeze(1)
    return aggregation_weights(in_loss, aggregation)[mask]
