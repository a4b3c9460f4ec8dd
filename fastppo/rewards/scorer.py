"""Score a batch of responses.

    Scorer                      calls each reward once and forms the weighted sum
    Scores.with_eos_penalty     the penalty for a missing EOS
    Scores.normalized           normalization and clipping

The reward of a response has two parts, one at its last token and one within it. Scaling applies to
both, and the penalty to the last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastppo.data.prompts import Prompts
from fastppo.data.world import World
from fastppo.functional.scalars import describe
from fastppo.rewards.calling import CallOptions
from fastppo.rewards.placing import token_rewards, written_token_rewards
from fastppo.rewards.processing import RunningScale
from fastppo.rewards.reward import RewardError, RewardTerm, Samples, Scored, score


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Rewards of B responses with N tokens written by the policy, on the CPU."""

    last: Tensor
    """[B] fp32, reward at the last token."""
    within: Tensor | None = None
    """[N] fp32, reward at each token, or None if every reward is one number."""
    lengths: Sequence[int] = ()
    """[B] tokens written by the policy. Required with `within`."""
    terms: Mapping[str, Scored] = field(default_factory=dict)
    """Trained rewards by name, unweighted."""
    monitors: Mapping[str, Scored] = field(default_factory=dict)
    """Rewards that are only logged, by name."""
    has_rewards: bool = True
    """False in a run without rewards, which trains on the KL alone."""

    @property
    def total(self) -> Tensor:
        """[B] fp32, the sum of both parts."""
        if self.within is None:
            return self.last
        return self.last + self._sum_by_response(self.within)

    def add_term(self, name: str, rewards: Sequence[Sequence[float]] | None) -> Scores:
        """Add a term with a reward for each token that the policy wrote."""
        if rewards is None:
            return self
        per_token = torch.tensor([reward for row in rewards for reward in row])
        totals = [sum(row) for row in rewards]
        return replace(
            self,
            within=per_token if self.within is None else self.within + per_token,
            terms={name: Scored(totals), **self.terms},
            has_rewards=True,
        )

    def with_eos_penalty(
        self, truncated: Sequence[bool], missing_eos_penalty: float | None
    ) -> Scores:
        """Subtract the penalty, in reward units, from truncated responses, [B]."""
        if missing_eos_penalty is None:
            return self
        penalties = missing_eos_penalty * torch.tensor(truncated).float()
        return replace(self, last=self.last - penalties)

    def normalized(
        self, method: str = "none", clip: float | None = None, running: RunningScale | None = None
    ) -> Scores:
        """Normalize the scores, then clip them to ±clip.

        Args:
            method: none; or running, divided by the standard deviation of all scores so far.
            running: state of method running, which this call updates.
        """
        total = self.total
        factor = torch.ones_like(total)
        if method == "running":
            assert running is not None
            total = running(total)
            factor = factor / running.deviation
        if clip is not None:
            clipped = total.clamp(-clip, clip)
            factor = torch.where(clipped == total, factor, factor * clipped / total)
            total = clipped
        if self.within is None:
            return replace(self, last=total)
        within = self.within * factor.repeat_interleave(torch.tensor(self.lengths))
        return replace(self, last=total - self._sum_by_response(within), within=within)

    def metrics(self) -> dict[str, float]:
        """Return batch means of the total, each term and each monitored reward.

        A reward that applies to no completion has no mean.
        """
        total = self.total
        metrics = {"reward": total.mean().item()}
        if len(total) > 1 and self.has_rewards:
            metrics["reward_std"] = total.std(correction=0).item()
        means = {name: scored.mean for name, scored in self._by_metric.items()}
        metrics |= {name: mean for name, mean in means.items() if mean is not None}
        disagreements = [
            sum(scored.disagreement) / len(scored)
            for scored in self.terms.values()
            if scored.disagreement is not None
        ]
        if disagreements:
            metrics["ensemble_disagreement"] = max(disagreements)
        return metrics

    @property
    def counts(self) -> dict[str, int]:
        """Completions to which each reward applies, by the name of its metric."""
        return {
            name: sum(value is not None for value in scored.or_none)
            for name, scored in self._by_metric.items()
        }

    @property
    def _by_metric(self) -> dict[str, Scored]:
        terms = {f"reward/{name}": scored for name, scored in self.terms.items()}
        return terms | {f"monitor/{name}": scored for name, scored in self.monitors.items()}

    def select(self, rows: Sequence[int]) -> Scores:
        """Return the scores of the given responses, in that order."""
        within = None
        if self.within is not None:
            tokens = self.within.split(list(self.lengths))
            within = torch.cat([tokens[row] for row in rows])
        return replace(
            self,
            last=self.last[list(rows)],
            within=within,
            lengths=[self.lengths[row] for row in rows],
            terms={name: scored.select(rows) for name, scored in self.terms.items()},
            monitors={name: scored.select(rows) for name, scored in self.monitors.items()},
        )

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Concatenate the scores of several batches."""
        if len(parts) == 1:
            return parts[0]
        within = None
        if any(part.within is not None for part in parts):
            within = torch.cat(
                [
                    torch.zeros(sum(part.lengths)) if part.within is None else part.within
                    for part in parts
                ]
            )
        return cls(
            last=torch.cat([part.last for part in parts]),
            within=within,
            lengths=[length for part in parts for length in part.lengths],
            terms=_joined([part.terms for part in parts]),
            monitors=_joined([part.monitors for part in parts]),
            has_rewards=parts[0].has_rewards,
        )

    def _sum_by_response(self, within: Tensor) -> Tensor:
        """Sum over each response, [B]."""
        return torch.stack([tokens.sum() for tokens in within.split(list(self.lengths))])


def _joined(parts: Sequence[Mapping[str, Scored]]) -> dict[str, Scored]:
    return {name: Scored.joined([part[name] for part in parts]) for name in parts[0]}


class Scorer:
    """Call the rewards of a run.

    Args:
        terms: rewards to train on.
        monitors: rewards to log only.
        tokenizer: the policy's. It locates the end of a step of a completion.
        failure_file: receives the samples of a failed reward.
        options: the time limit of rewards.
        world: the ranks. Each scores its local rows of a batch.
    """

    def __init__(
        self,
        terms: Sequence[RewardTerm],
        monitors: Sequence[RewardTerm],
        tokenizer: Any,
        *,
        failure_file: Path | None = None,
        options: CallOptions | None = None,
        world: World | None = None,
    ) -> None:
        self.terms = list(terms)
        self.monitors = list(monitors)
        self.tokenizer = tokenizer
        self.failure_file = failure_file
        self.options = options or CallOptions()
        self.world = world or World()

    def __call__(
        self,
        prompts: Prompts,
        completions: Sequence[str],
        response_ids: Sequence[list[int]],
        written: Sequence[Sequence[bool]] | None = None,
    ) -> Scores:
        """Return the weighted sum of the terms.

        Args:
            written: mask of the tokens that the policy wrote, per response. None means all, in
                responses of one turn.

        Raises:
            RewardError: a reward raised or returned an invalid value, or none applies to a response
                of one turn.
        """
        must_apply = written is None and bool(self.terms)
        if written is None:
            written = [[True] * len(ids) for ids in response_ids]
        if self.world.size == 1:
            return self._score(prompts, completions, response_ids, written, must_apply)
        rows = self.world.local_rows(len(prompts))
        own = slice(rows.start, rows.stop)

        def score_own_rows() -> Scores | None:
            if not rows:
                return None
            return self._score(
                prompts.select(rows), completions[own], response_ids[own], written[own], must_apply
            )

        shares = self.world.gather_results(score_own_rows)
        return Scores.joined([scores for scores in shares if scores is not None])

    def _score(
        self,
        prompts: Prompts,
        completions: Sequence[str],
        response_ids: Sequence[list[int]],
        written: Sequence[Sequence[bool]],
        must_apply: bool,
    ) -> Scores:
        """Score responses on this rank."""
        samples = Samples(prompts.prompts, completions, prompts.columns, response_ids)
        terms = self._scored(self.terms, samples)
        columns = [scored.or_none for scored in terms.values()]
        for row, rewards in enumerate(zip(*columns, strict=True)):
            if must_apply and all(reward is None for reward in rewards):
                raise RewardError(
                    f"no reward applies to completion {row} of the batch, to the prompt "
                    f"{describe(prompts.prompts[row])}: every reward returned None"
                )
        monitors = self._scored(self.monitors, samples)
        last = torch.zeros(len(samples))
        for term in self.terms:
            last += term.weight * torch.tensor(terms[term.name].at_last_token)
        return Scores(
            last=last,
            within=self._within(terms, samples, prompts.token_ids, written),
            lengths=[sum(row) for row in written],
            terms=terms,
            monitors=monitors,
            has_rewards=bool(self.terms),
        )

    def _scored(self, terms: Sequence[RewardTerm], samples: Samples) -> dict[str, Scored]:
        return {term.name: score(term, samples, self.failure_file, self.options) for term in terms}

    def _within(
        self,
        terms: Mapping[str, Scored],
        samples: Samples,
        prompt_ids: Sequence[list[int]],
        written: Sequence[Sequence[bool]],
    ) -> Tensor | None:
        """Return weighted rewards by token, [N], or None if every reward is one number."""
        if all(scored.steps is None for scored in terms.values()):
            return None
        assert samples.completion_ids is not None
        per_token = [[0.0] * len(ids) for ids in samples.completion_ids]
        for term in self.terms:
            for row, steps in enumerate(terms[term.name].steps or ()):
                placed = token_rewards(
                    steps,
                    samples.completions[row],
                    prompt_ids=prompt_ids[row],
                    response_ids=samples.completion_ids[row],
                    tokenizer=self.tokenizer,
                )
                for token, value in enumerate(placed):
                    per_token[row][token] += term.weight * value
        result: list[float] = []
        for rewards, is_written in zip(per_token, written, strict=True):
            result += written_token_rewards(rewards, is_written)
        return torch.tensor(result)
