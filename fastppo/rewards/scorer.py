"""The rewards of a batch of responses, up to what advantages are made from.

    Scorer                  calls each reward once; weights, and where in a response it is paid
    Scores.charged          the penalty of a missing EOS
    Scores.normalized       the scale, and a bound

A response is paid in two parts, at its last token and within it, and all that is done to a score
keeps the two apart: rewards within a response are scaled by the factor that its total is scaled by;
what is added to the total, such as a mean that is subtracted, goes to the last token.
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
from fastppo.functional.advantages import whiten
from fastppo.rewards.calling import CallOptions
from fastppo.rewards.placing import paid_where_written, token_rewards
from fastppo.rewards.processing import RunningScale
from fastppo.rewards.reward import RewardTerm, Samples, Scored, score


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Rewards of B responses, of which the policy wrote N tokens, on the CPU, in order."""

    last: Tensor
    """[B] fp32, paid at the last token."""
    within: Tensor | None = None
    """[N] fp32, paid at each token, or None if every reward was one number."""
    lengths: Sequence[int] = ()
    """[B] response tokens that the policy wrote; required with `within`."""
    terms: Mapping[str, Scored] = field(default_factory=dict)
    """Each trained term, unweighted."""
    monitors: Mapping[str, Scored] = field(default_factory=dict)
    """Each reward that is logged and not trained on."""

    @property
    def total(self) -> Tensor:
        """[B] fp32: both parts together."""
        if self.within is None:
            return self.last
        return self.last + self._sum_by_response(self.within)

    def plus(self, name: str, rewards: Sequence[Sequence[float]] | None) -> Scores:
        """The scores plus another term, paid at each token that the policy wrote."""
        if rewards is None:
            return self
        paid = torch.tensor([reward for row in rewards for reward in row])
        totals = [sum(row) for row in rewards]
        return replace(
            self,
            within=paid if self.within is None else self.within + paid,
            terms={name: Scored(totals), **self.terms},
        )

    def charged(self, truncated: Sequence[bool], missing_eos_penalty: float | None) -> Scores:
        """The scores less the penalty, reward units, of each response that was cut off, [B]."""
        if missing_eos_penalty is None:
            return self
        penalties = missing_eos_penalty * torch.tensor(truncated).float()
        return replace(self, last=self.last - penalties)

    def normalized(
        self, method: str = "none", clip: float | None = None, running: RunningScale | None = None
    ) -> Scores:
        """The scores on one scale, then within ±clip.

        Args:
            method: none; batch, mean 0 and deviation 1 in this batch; running, divided by the
                deviation of all scores that `running` has seen, these included.
        """
        total = self.total
        factor = torch.ones_like(total)
        if method == "running":
            assert running is not None
            total = running(total)
            factor = factor / running.deviation
        elif method == "batch":
            if len(total) > 1:
                factor = factor * (total.var() + 1e-8).rsqrt()
            else:
                factor = 0 * factor
            # The definition sums in fp64: scores that are all alike become exact zeros.
            total = whiten(total, backend="torch")
        if clip is not None:
            clipped = total.clamp(-clip, clip)
            factor = torch.where(clipped == total, factor, factor * clipped / total)
            total = clipped
        if self.within is None:
            return replace(self, last=total)
        within = self.within * factor.repeat_interleave(torch.tensor(self.lengths))
        return replace(self, last=total - self._sum_by_response(within), within=within)

    def metrics(self) -> dict[str, float]:
        """Means over the batch: the total, each term and each monitored reward."""
        total = self.total
        metrics = {"reward": total.mean().item()}
        if len(total) > 1:
            metrics["reward_std"] = total.std(correction=0).item()
        for name, scored in self.terms.items():
            metrics[f"reward/{name}"] = _mean(scored)
            if scored.disagreement is not None:
                metrics["ensemble_disagreement"] = sum(scored.disagreement) / len(scored)
        for name, scored in self.monitors.items():
            metrics[f"monitor/{name}"] = _mean(scored)
        return metrics

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """The scores of several batches of responses, one batch after the other."""
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
        )

    def _sum_by_response(self, within: Tensor) -> Tensor:
        """[B]: the sum over each response."""
        return torch.stack([tokens.sum() for tokens in within.split(list(self.lengths))])


def _joined(parts: Sequence[Mapping[str, Scored]]) -> dict[str, Scored]:
    return {name: Scored.joined([part[name] for part in parts]) for name in parts[0]}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Scorer:
    """Calls the rewards of a run.

    Args:
        terms: what is trained on.
        monitors: what is only logged.
        tokenizer: the policy's, to find the token at which a step of a completion ends.
        failure_file: where the samples that a reward fails on are written.
        options: how long each is waited for.
        world: the ranks that share the responses of a batch; every reward gets a rank's own.
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
        """The weighted sum of the terms, each where it is paid.

        Args:
            written: of each response, the tokens that the policy wrote; None means all.

        Raises:
            RewardError: a reward raised, or returned what cannot be trained on.
        """
        if written is None:
            written = [[True] * len(ids) for ids in response_ids]
        if self.world.size == 1:
            return self._score(prompts, completions, response_ids, written)
        rows = self.world.local_rows(len(prompts))
        own = slice(rows.start, rows.stop)

        def score_own_rows() -> Scores | None:
            if not rows:
                return None
            return self._score(
                prompts.select(rows), completions[own], response_ids[own], written[own]
            )

        shares = self.world.gather_results(score_own_rows)
        return Scores.joined([scores for scores in shares if scores is not None])

    def _score(
        self,
        prompts: Prompts,
        completions: Sequence[str],
        response_ids: Sequence[list[int]],
        written: Sequence[Sequence[bool]],
    ) -> Scores:
        """The scores of responses that are all this rank's."""
        samples = Samples(prompts.prompts, completions, prompts.columns, response_ids)
        terms = self._scored(self.terms, samples)
        monitors = self._scored(self.monitors, samples)
        last = torch.zeros(len(samples))
        for term in self.terms:
            last += term.weight * torch.tensor(terms[term.name].at_the_end)
        return Scores(
            last=last,
            within=self._within(terms, samples, prompts.token_ids, written),
            lengths=[sum(row) for row in written],
            terms=terms,
            monitors=monitors,
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
        """[N] weighted rewards by token; None if no term is paid within a response."""
        if all(scored.partial is None for scored in terms.values()):
            return None
        assert samples.completion_ids is not None
        per_token = [[0.0] * len(ids) for ids in samples.completion_ids]
        for term in self.terms:
            for row, partial in enumerate(terms[term.name].partial or ()):
                placed = token_rewards(
                    partial,
                    samples.completions[row],
                    prompt_ids=prompt_ids[row],
                    response_ids=samples.completion_ids[row],
                    tokenizer=self.tokenizer,
                )
                for token, value in enumerate(placed):
                    per_token[row][token] += term.weight * value
        paid: list[float] = []
        for rewards, is_written in zip(per_token, written, strict=True):
            paid += paid_where_written(rewards, is_written)
        return torch.tensor(paid)
