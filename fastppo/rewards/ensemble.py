"""Combine several rewards of the same quantity into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastppo.data import fingerprint
from fastppo.data.prompts import Prompts
from fastppo.functional import scalars
from fastppo.plugins.calling import CallOptions
from fastppo.rewards.loading import make_terms
from fastppo.rewards.reward import (
    Reward,
    RewardTerm,
    RewardWithWeights,
    Samples,
    Scored,
    TermError,
    score_term,
)

ENSEMBLE_RULES = ("mean", "min", "lcb")


class RewardEnsemble(RewardWithWeights):
    """The mean, minimum or lower confidence bound of several rewards.

        mean    μ over the members
        min     the worst member
        lcb     μ − σ, σ the population standard deviation over the members

    Reward models disagree far from their training data, and a policy learns to exploit the one
    that errs in its favour. The minimum and the lower bound remove that gain. The `disagreement` of
    the result is σ per completion.

    Args:
        members: rewards or specs, each returning one number per completion. They must share a
            scale; otherwise the minimum is always the same member.
        by: mean, min or lcb.
        options: options of `load_reward` for members given as specs.

    Raises:
        ValueError: there are no members, `by` is unknown, or a member cannot be loaded.
        RewardError: as from `score`, when called. It names the member.

    Source: Coste et al. 2023 (mean, worst case, and the mean less the *variance*); Eisenstein et
    al. 2023 (mean less the standard deviation, in reward units).
    """

    def __init__(
        self,
        members: Sequence[str | Reward],
        by: str = "mean",
        **options: Any,
    ) -> None:
        self.__name__ = "ensemble"
        if not members:
            raise ValueError("an ensemble must have at least one member, got none")
        self.by = scalars.choice("by", by, ENSEMBLE_RULES)
        self.terms = make_terms(members, **options)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: list[Any],
    ) -> Scored:
        samples = Samples(prompts, completions, columns, completion_ids)
        members = [self._score(term, samples) for term in self.terms]
        scores = torch.tensor(members, dtype=torch.float64)  # [members, B]
        mean = scores.mean(0)
        deviation = scores.std(0, correction=0)
        combined = {"mean": mean, "min": scores.amin(0), "lcb": mean - deviation}[self.by]
        return Scored(combined.tolist(), disagreement=deviation.tolist())

    def load(self, device: torch.device | str) -> None:
        """Load the weights of the members that are models."""
        self.terms = [term.loaded(device) for term in self.terms]

    def fingerprint(self) -> str:
        """Return a fingerprint of all members."""
        return fingerprint.of_text(" ".join(term.fingerprint for term in self.terms))

    def check(self, source: str, prompts: Prompts) -> None:
        """Check that every member can be called on the prompts."""
        for term in self.terms:
            term.check(source, prompts)

    def _score(self, term: RewardTerm, samples: Samples) -> list[float]:
        """Return a member's scores, [B]."""
        scored = score_term(term, samples, CallOptions())
        for row, steps in enumerate(scored.steps or ()):
            if steps is not None:
                raise TermError(
                    term.name,
                    f"returned rewards by token or step for completion {row}; expected one number "
                    "from a member of an ensemble",
                    row,
                )
        for row, total in enumerate(scored.or_none):
            if total is None:
                raise TermError(
                    term.name,
                    f"returned None for completion {row}; expected a number from a member of an "
                    "ensemble",
                    row,
                )
        return list(scored)
