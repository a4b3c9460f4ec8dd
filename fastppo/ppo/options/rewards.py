"""Options of rewards and environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fastppo.run.options import Options, option


@dataclass(kw_only=True, frozen=True)
class RewardOptions(Options):
    """Rewards."""

    rewards: Sequence[str] = option(
        [],
        "Required, except with a reference_model as a teacher. file.py:function, module:function, "
        "a sequence-classification model, or an https:// URL",
    )
    reward_weights: Sequence[float] | None = option(
        None, "One weight per reward, the ensemble's last; default: 1 each"
    )
    monitor_rewards: Sequence[str] = option([], "Rewards that are logged and not trained on")
    reward_timeout: float | None = option(
        None,
        "Time limit of a reward, seconds; default: none for a function, 60 for a URL. A function "
        "with a limit is called in a thread, which keeps running after a timeout",
        above=0,
    )
    missing_eos_penalty: float | None = option(
        None,
        "Subtracted from the score of a truncated response, in reward units",
        minimum=0,
    )
    truncated: Literal["learn", "mask"] = option(
        "learn", "mask: leave truncated responses out of the loss"
    )
    score_normalization: Literal["none", "running"] = option(
        "none", "running: divide scores by their running standard deviation"
    )
    score_clip: float | None = option(
        None, "Clamp scores to ±this after normalization, in reward units", above=0
    )
    reward_ensemble: Sequence[str] = option(
        [], "Reward models to combine into one reward, named `ensemble`"
    )
    reward_ensemble_by: Literal["mean", "min", "lcb"] = option(
        "mean", "mean, minimum, or lcb: mean − standard deviation", needs="reward_ensemble"
    )


@dataclass(kw_only=True, frozen=True)
class TurnOptions(Options):
    """Turns."""

    environment: str = option(
        "",
        "Environment of multi-turn responses: file.py:Name, module:Name (a class with `step`, or "
        "with tools), an agent chat:file.py:name, or an address such as "
        "openenv:http://localhost:8000",
    )
    max_turns: int = option(
        8, "Most turns of a response, of max_new_tokens each", minimum=1, needs="environment"
    )
