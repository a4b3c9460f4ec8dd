"""Several rewards of one thing, combined into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastppo.functional import arguments
from fastppo.rewards.loading import make_terms
from fastppo.rewards.patience import Patience
from fastppo.rewards.reward import Reward, Scored, TermError, score_term

ENSEMBLE_RULES = ("mean", "min", "lcb")


class RewardEnsemble:
    """Several rewards of one thing as one: their mean, their minimum, or a lower bound.

        mean    μ over the members
        min     the worst member
        lcb     μ − std_coef·σ, σ the population standard deviation over the members

    Where reward models were never shown the right answer they disagree, and a policy that is
    trained on the one that errs in its favour learns the error. The minimum and the lower bound
    take that gain away. The result's `disagreement` is σ, per completion.

    Args:
        members: rewards or specs, each returning one number per completion. They want one scale:
            the minimum over members of different scales is one member.
        by: mean, min or lcb.
        std_coef: deviations below the mean of `lcb`, at least 0.
        drop: whether a sample of which a member has no score gets NaN, where it else raises.
        model_options: of members that are models, as for `RewardModel`.

    Raises:
        ValueError: no members, another `by`, a negative `std_coef`, a member that is not there.
        RewardError: as from `score`, when called; it names the member.

    Source: Coste et al. 2023 (mean, worst case, and the mean less the *variance*); Eisenstein et
    al. 2023 (mean less the deviation, which has the reward's own unit).
    """

    def __init__(
        self,
        members: Sequence[str | Reward],
        by: str = "mean",
        std_coef: float = 1.0,
        *,
        drop: bool = False,
        **model_options: Any,
    ) -> None:
        self.__name__ = "ensemble"
        if not members:
            raise ValueError("an ensemble must have at least one member, got none")
        self.by = arguments.choice("by", by, ENSEMBLE_RULES)
        self.std_coef = arguments.finite("std_coef", arguments.at_least("std_coef", std_coef, 0))
        self.drop = drop
        self.terms = make_terms(members, **model_options)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: list[Any],
    ) -> Scored:
        members = []
        for term in self.terms:
            scored = score_term(
                *(term, prompts, completions, columns, completion_ids),
                Patience(drop=self.drop),
                failures=[],
            )
            if scored.partial is not None:
                row = next(i for i, steps in enumerate(scored.partial) if steps is not None)
                raise TermError(
                    term.name,
                    f"returned rewards by token or step for completion {row}; expected one number, "
                    "which is what an ensemble combines",
                    row,
                )
            members.append(scored.values)
        scores = torch.tensor(members, dtype=torch.float64)  # [members, B]
        mean, deviation = scores.mean(0), scores.std(0, correction=0)
        if self.by == "min":
            combined = scores.amin(0)
        else:
            combined = mean - self.std_coef * deviation if self.by == "lcb" else mean
        return Scored(combined.tolist(), disagreement=deviation.tolist())
