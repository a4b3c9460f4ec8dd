"""The parts of a run, which `fastppo.ppo.setup.build` makes from the options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fastppo.data.prompts import Prompts
from fastppo.data.text import PretrainingText
from fastppo.data.world import World
from fastppo.environments.async_turns import AsyncTurns
from fastppo.environments.turns import Turns
from fastppo.models.images import NoImages
from fastppo.models.policy import ActorCritic
from fastppo.models.reference_policy import ReferencePolicy
from fastppo.rewards.scorer import Scorer
from fastppo.rollout import RolloutEngine, Sampling
from fastppo.rollout.one_turn import OneTurn
from fastppo.run.optimizer import Optimizer


@dataclass(slots=True, eq=False, kw_only=True)
class Parts:
    """The parts of a run."""

    device: torch.device
    world: World
    """The processes."""
    tokenizer: Any
    model: ActorCritic
    reference: ReferencePolicy | None
    """None if no KL needs a model."""
    optimizer: Optimizer
    engine: RolloutEngine
    sampling: Sampling
    episode_runner: OneTurn | Turns | AsyncTurns
    """Generates the responses, single-turn or with the turns of an environment."""
    images: NoImages
    """Runs the vision tower on the images of prompts, if there are any."""
    prompts: Prompts | None
    held_out: Prompts | None
    """Prompts of evaluations."""
    pretraining: PretrainingText | None
    scorer: Scorer
    functions: dict[str, Callable[..., Any]]
    """User-defined functions by option."""
    context: int | None
    """Longest sequence, tokens: the shortest context of policy, reference and critic."""
    fingerprints: dict[str, str]
    """Fingerprints of models, data and rewards, by option."""
    notes: list[str]
    """Sentences for the user about a fallback to another engine or layout, or replaced prompts."""

    @property
    def passed(self) -> tuple[str, ...]:
        """Options that count as on, because their part may be passed in Python."""
        return () if isinstance(self.episode_runner, OneTurn) else ("environment",)
