"""Dynamic sampling: replace the prompts whose samples all have the same reward.

With `rloo` and `group` the advantage is the difference to the prompt's other samples, so such a
prompt teaches nothing. The replacements are the next prompts of the epoch.

Source: Yu et al. 2025 (DAPO, arXiv:2503.14476), section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from torch import Tensor

from fastppo.data.prompts import Prompts
from fastppo.ppo.experience import Responses
from fastppo.ppo.options.config import PPOConfig
from fastppo.rewards.reward import AllFailedError

Respond = Callable[[Prompts], Responses]
"""Generates and scores responses."""

MorePrompts = Callable[[int], Prompts]
"""Returns the next prompts."""


def draw_once(
    prompts: Prompts, respond: Respond, more_prompts: MorePrompts | None
) -> tuple[Responses, Responses]:
    """Return the responses to the prompts as (responses to train on, all responses drawn)."""
    responses = respond(prompts)
    return responses, responses


class DynamicSampling:
    """Draws the responses of an iteration, and replacements for prompts with equal rewards.

    Args:
        samples: adjacent responses to each prompt.
        rounds: most rounds of replacements.
    """

    def __init__(self, samples: int, rounds: int) -> None:
        self.samples = samples
        self.rounds = rounds

    def __call__(
        self, prompts: Prompts, respond: Respond, more_prompts: MorePrompts | None
    ) -> tuple[Responses, Responses]:
        """Return (responses to train on, all responses drawn)."""
        first = respond(prompts)
        if more_prompts is None:
            return first, first
        return with_replacements(
            first,
            lambda count: respond(more_prompts(count)),
            samples=self.samples,
            rounds=self.rounds,
        )


def make_dynamic_sampling(
    config: PPOConfig,
) -> Callable[[Prompts, Respond, MorePrompts | None], tuple[Responses, Responses]]:
    """Return how the responses of an iteration are drawn."""
    if not config.dynamic_sampling:
        return draw_once
    return DynamicSampling(config.samples_per_prompt, config.dynamic_sampling)


def with_replacements(
    first: Responses, draw: Callable[[int], Responses], *, samples: int, rounds: int
) -> tuple[Responses, Responses]:
    """Draw replacements until every prompt has different rewards, in at most `rounds` rounds.

    Prompts stay in the order in which they were drawn. If too few have different rewards, the first
    of the others fill the batch.

    Args:
        first: an iteration's responses.
        draw: returns the responses to the next n prompts.
        samples: adjacent responses to each prompt.

    Returns:
        (as many responses as in `first`, all responses drawn).
    """
    wanted = len(first.prompts) // samples
    drawn = first
    for _ in range(rounds):
        missing = wanted - int(_differ(drawn, samples).sum())
        if missing <= 0:
            break
        with suppress(AllFailedError):  # of a few episodes; an environment's failures are counted
            drawn = Responses.joined([drawn, draw(missing)])
    differ = _differ(drawn, samples).tolist()
    by_use = sorted(range(len(differ)), key=lambda prompt: not differ[prompt])
    chosen = sorted(by_use[:wanted])
    rows = [prompt * samples + sample for prompt in chosen for sample in range(samples)]
    return drawn.select(rows), drawn


def _differ(responses: Responses, samples: int) -> Tensor:
    """Return whether a prompt's samples have different rewards, [prompts] bool."""
    groups = responses.scores.total.view(-1, samples)
    return groups.amin(dim=1) != groups.amax(dim=1)
