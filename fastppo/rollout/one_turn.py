"""Responses of one turn."""

from __future__ import annotations

from fastppo.data.prompts import Prompts
from fastppo.models.images import NoImages
from fastppo.rollout import Rollout, RolloutEngine, Sampling


class OneTurn:
    """Sample responses of one turn, without an environment.

    `fastppo.environments.turns.Turns` has the same interface.

    Args:
        images: runs the vision tower on the images of the prompts.
    """

    name = ""
    has_rewards = False
    max_turns = 1

    def __init__(self, images: NoImages | None = None) -> None:
        self.images = images or NoImages()

    def run(
        self, prompts: Prompts, engine: RolloutEngine, sampling: Sampling, *, held_out: bool = False
    ) -> tuple[Prompts, Rollout]:
        """Return the prompts, with the output of the vision tower, and their responses."""
        prompts = self.images(prompts)
        return prompts, engine.generate(prompts.token_ids, sampling).with_tokens()

    def prepare(self, following: Prompts, engine: RolloutEngine) -> None:
        """Tell the engine the next iteration's prompts; none after the last."""
        engine.prepare(following.token_ids)

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def close(self) -> None:
        """Do nothing."""
