"""Dynamic sampling: replace the prompts whose samples all have the same reward.

With `rloo` and `group` the advantage is the difference to the prompt's other samples, so such a
prompt teaches nothing. The replacements are the next prompts of the epoch.

Source: Yu et al. 2025 (DAPO, arXiv:2503.14476), section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fastppo.ppo.experience import Responses


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
