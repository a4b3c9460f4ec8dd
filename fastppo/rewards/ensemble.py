"""Several rewards of one thing, combined into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastppo.functional import scalars
from fastppo.rewards.calling import CallOptions
from fastppo.rewards.loading import make_terms
from fastppo.rewards.reward import Reward, RewardTerm, Samples, Scored, TermError, score_term

ENSEMBLE_RULES = ("mean", "min", "lcb")


class RewardEnsemble:
    """Several rewards of one thing as one: their mean, their minimum, or a lower bound.

        mean    μ over the members
        min     the worst member
        lcb     μ − σ, σ the population standard deviation over the members

    Reward models disagree where they were never shown the right answer, and a policy that is
    trained on the one that errs in its favour learns the error. The minimum and the lower bound
    take that gain away. The result's `disagreement` is σ, per completion.

    Args:
        members: rewards or specs, each returning one number per completion. They need one scale:
            the minimum over members of different scales is always the same member.
        by: mean, min or lcb.
        options: of members that are named by specs, as for `load_reward`.

    Raises:
        ValueError: no members, another `by`, a member that cannot be loaded.
        RewardError: as from `score`, when called; it names the member.

    Source: Coste et al. 2023 (mean, worst case, and the mean less the *variance*); Eisenstein et
    al. 2023 (mean less the deviation, which has the reward's own unit).
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
        members = [self._scores_of(term, samples) for term in self.terms]
        scores = torch.tensor(members, dtype=torch.float64)  # [members, B]
        mean = scores.mean(0)
        deviation = scores.std(0, correction=0)
        combined = {"mean": mean, "min": scores.amin(0), "lcb": mean - deviation}[self.by]
        return Scored(combined.tolist(), disagreement=deviation.tolist())

    def _scores_of(self, term: RewardTerm, samples: Samples) -> list[float]:
        """[B] a member's scores."""
        scored = score_term(term, samples, CallOptions())
        for row, steps in enumerate(scored.partial or ()):
            if steps is not None:
                raise TermError(
                    term.name,
                    f"returned rewards by token or step for completion {row}; expected one number, "
                    "which is what an ensemble combines",
                    row,
                )
        return list(scored)
