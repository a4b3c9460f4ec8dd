"""The rewards of a batch of responses, and their way to what advantages are made from.

    Scorer                  each reward is called once; weights, and where in a response it is paid
    Scores.charged          what length and a missing EOS cost
    Scores.normalized       the scale, and a bound

Every response is paid in two parts, at its last token and within it, and all that is done to a
score keeps the two apart: within a response rewards are scaled by the factor that its total is
scaled by; what is added to the total, a mean taken away say, goes to the last token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastppo.data.prompts import Prompts
from fastppo.data.world import World
from fastppo.rewards.patience import Patience
from fastppo.rewards.placing import paid_where_written, token_rewards
from fastppo.rewards.processing import (
    RunningScale,
    length_normalized,
    length_penalty,
    whiten_scores,
)
from fastppo.rewards.reward import MAX_REWARD, RewardError, RewardTerm, Scored, save_failure, score


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Rewards of B responses, of which the policy wrote N tokens, on the CPU, in order."""

    last: Tensor
    """[B] fp32, paid at the last token."""
    within: Tensor | None = None
    """[N] fp32, paid at each token, or None where every reward was one number."""
    lengths: Sequence[int] = ()
    """[B] response tokens that the policy wrote; needed where `within` is given."""
    terms: Mapping[str, Scored] = field(default_factory=dict)
    """Each trained term, unweighted."""
    monitors: Mapping[str, Scored] = field(default_factory=dict)
    """Each reward that is watched and not trained on."""

    kept: list[int] | None = None
    """The responses that have a score; None where there is none without."""

    @property
    def total(self) -> Tensor:
        """[B] fp32: both parts together."""
        return self.last if self.within is None else self.last + self._paid(self.within)

    def plus(self, name: str, rewards: Sequence[Sequence[float]] | None) -> Scores:
        """With another term, paid at each token that the policy wrote; NaN drops a sample."""
        if rewards is None:
            return self
        paid = torch.tensor([reward for row in rewards for reward in row])
        within = paid if self.within is None else self.within + paid
        totals = [sum(row) for row in rewards]
        kept = self.kept
        if any(map(math.isnan, totals)):
            rows = range(len(totals)) if kept is None else kept
            kept = [row for row in rows if not math.isnan(totals[row])]
        terms = {name: Scored(totals), **self.terms}
        return replace(self, within=within, terms=terms, kept=kept)

    def charged(
        self,
        lengths: Sequence[int],
        truncated: Sequence[bool],
        *,
        length_normalized_score: bool = False,
        length_coef: float = 0.0,
        length_free: int = 0,
        missing_eos_penalty: float | None = None,
    ) -> Scores:
        """The scores less what length and a missing EOS cost.

        Args:
            lengths: [B] response tokens; truncated: [B], whether a response was cut off.
            length_normalized_score: divide the rewards of a response by its length first.
            length_coef: reward units per token beyond `length_free` tokens.
            missing_eos_penalty: reward units, for a response that was cut off.
        """
        tokens, last, within = torch.tensor(lengths), self.last, self.within
        if length_normalized_score:
            last = length_normalized(last, tokens)
            if within is not None:
                within = within / tokens.repeat_interleave(tokens)
        last = last - length_penalty(tokens, length_coef, length_free)
        if missing_eos_penalty is not None:
            last = last - missing_eos_penalty * torch.tensor(truncated).float()
        return replace(self, last=last, within=within)

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
            factor = factor * (total.var() + 1e-8).rsqrt() if len(total) > 1 else 0 * factor
            total = whiten_scores(total)
        if clip is not None:
            clipped = total.clamp(-clip, clip)
            factor = torch.where(clipped == total, factor, factor * clipped / total)
            total = clipped
        if self.within is None:
            return replace(self, last=total)
        within = self.within * factor.repeat_interleave(torch.tensor(self.lengths))
        return replace(self, last=total - self._paid(within), within=within)

    def metrics(self) -> dict[str, float]:
        """Means over the batch, without dropped samples: the total, each term and each monitored
        reward."""
        total = self.total if self.kept is None else self.total[self.kept]
        metrics = {
            "reward": total.mean().item(),
            "reward_std": total.std(correction=0).item() if len(total) else math.nan,
        }
        for name, values in self.terms.items():
            metrics[f"reward/{name}"] = _mean(values)
            if values.disagreement is not None:
                disagreement = sum(values.disagreement) / len(values)
                metrics["ensemble_disagreement"] = disagreement
        for name, values in self.monitors.items():
            metrics[f"monitor/{name}"] = _mean(values)
        return metrics

    def select(self, rows: Sequence[int]) -> Scores:
        """The scores of some of the responses."""
        within = self.within
        if within is not None:
            parts = within.split(list(self.lengths))
            within = torch.cat([parts[row] for row in rows])
        lengths = [self.lengths[row] for row in rows] if self.lengths else ()
        terms, monitors = (
            {name: scored.select(rows) for name, scored in group.items()}
            for group in (self.terms, self.monitors)
        )
        return Scores(self.last[list(rows)], within, lengths, terms, monitors)

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """The scores of several batches of responses, one batch after the other."""
        if len(parts) == 1:
            return parts[0]
        within = None
        if any(part.within is not None for part in parts):
            none = [torch.zeros(sum(part.lengths)) for part in parts]
            both = zip(parts, none, strict=True)
            within = torch.cat([n if part.within is None else part.within for part, n in both])
        terms, monitors = (
            {name: Scored.joined([group[name] for group in groups]) for name in groups[0]}
            for groups in ([part.terms for part in parts], [part.monitors for part in parts])
        )
        kept = None
        if parts[0].kept is not None:
            first = [sum(len(part.last) for part in parts[:i]) for i in range(len(parts))]
            both_kept = zip(first, parts, strict=True)
            kept = [begin + row for begin, part in both_kept for row in part.kept or ()]
        lengths = [length for part in parts for length in part.lengths]
        last = torch.cat([part.last for part in parts])
        return cls(last, within, lengths, terms, monitors, kept)

    def _paid(self, within: Tensor) -> Tensor:
        """[B]: the sum over each response."""
        return torch.stack([tokens.sum() for tokens in within.split(list(self.lengths))])


def _mean(values: Sequence[float]) -> float:
    """The mean of the samples that were not dropped."""
    kept = [value for value in values if not math.isnan(value)]
    return sum(kept) / len(kept) if kept else math.nan


class Scorer:
    """Calls the rewards of a run.

    Args:
        terms: what is trained on; monitors: what is only watched.
        tokenizer: the policy's, to find the token at which a step of a completion ends.
        failure_file: where the samples go of which a reward fails.
        patience: how long each is waited for, and what becomes of samples without a score.
        world: of the ranks that share the responses of a batch; every reward gets a rank's own.
    """

    def __init__(
        self,
        terms: Sequence[RewardTerm],
        monitors: Sequence[RewardTerm],
        tokenizer: Any,
        failure_file: Path | None = None,
        patience: Patience | None = None,
        world: World | None = None,
    ) -> None:
        self.world = world or World()
        self.terms = list(terms)
        self.monitors = list(monitors)
        self.tokenizer = tokenizer
        self.failure_file = failure_file
        self.patience = patience or Patience()

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
        rows = self.world.own(len(prompts))
        begin, end = rows.start, rows.stop

        def own() -> Scores | None:
            if not rows:
                return None
            # A reward may draw, and every rank must go on from the same random state.
            with torch.random.fork_rng(devices=[]):
                return self._score(
                    prompts.select(rows),
                    completions[begin:end],
                    response_ids[begin:end],
                    written[begin:end],
                )

        found = self.world.share(own, "score")
        return Scores.joined([scores for scores in found if scores is not None])

    def _score(
        self,
        prompts: Prompts,
        completions: Sequence[str],
        response_ids: Sequence[list[int]],
        written: Sequence[Sequence[bool]],
    ) -> Scores:
        """Of responses that are all this rank's."""
        terms, monitors = (
            {
                term.name: score(
                    term,
                    prompts.prompts,
                    completions,
                    prompts.columns,
                    self.failure_file,
                    response_ids,
                    self.patience,
                )
                for term in group
            }
            for group in (self.terms, self.monitors)
        )
        last = torch.zeros(len(completions))
        for term in self.terms:
            last += term.weight * torch.tensor(terms[term.name].whole)
        within = self._within(terms, prompts, completions, response_ids, written)
        lengths = [sum(row) for row in written]
        kept = None
        if self.patience.drop:
            kept = [row for row, score in enumerate(last.tolist()) if not math.isnan(score)]
        scores = Scores(last, within, lengths, terms, monitors, kept)
        self._check_range(scores, prompts, completions)
        return scores

    def _check_range(self, scores: Scores, prompts: Prompts, completions: Sequence[str]) -> None:
        """Raises RewardError for a weighted sum, of a response or a token, that fp32 PPO cannot
        use. Of a sample without a score there is none."""
        largest = scores.total.abs()
        if scores.within is not None:
            parts = scores.within.abs().split(list(scores.lengths))
            tokens = torch.stack([torch.cat([part, torch.zeros(1)]).amax() for part in parts])
            largest = torch.maximum(largest, tokens)
        for row, value in enumerate(largest.tolist()):
            dropped = any(math.isnan(values[row]) for values in scores.terms.values())
            if value <= MAX_REWARD or dropped:
                continue
            sentence = (
                f"the weighted rewards of completion {row} come to {value:g}; expected a number "
                f"within ±{MAX_REWARD:g}"
            )
            columns = {name: [column[row]] for name, column in prompts.columns.items()}
            where = save_failure(
                self.failure_file,
                "all",
                [prompts.prompts[row]],
                [completions[row]],
                columns,
                sentence,
            )
            raise RewardError(sentence + where)

    def _within(
        self,
        terms: Mapping[str, Scored],
        prompts: Prompts,
        completions: Sequence[str],
        response_ids: Sequence[list[int]],
        written: Sequence[Sequence[bool]],
    ) -> Tensor | None:
        """[N] weighted rewards by token; None where no term is paid within a response."""
        if all(scored.partial is None for scored in terms.values()):
            return None
        per_token = [[0.0] * len(ids) for ids in response_ids]
        for term in self.terms:
            for row, partial in enumerate(terms[term.name].partial or ()):
                placed = token_rewards(
                    partial,
                    completions[row],
                    prompts.token_ids[row],
                    response_ids[row],
                    self.tokenizer,
                )
                for token, value in enumerate(placed):
                    per_token[row][token] += term.weight * value
        both = zip(per_token, written, strict=True)
        return torch.tensor([value for row in both for value in paid_where_written(*row)])
