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
        "Required, except with an environment or with a reference_model as a teacher. Each is "
        "file.py:function, module:function, package:name, a sequence-classification model, or an "
        "https:// URL",
    )
    reward_weights: Sequence[float] | None = option(
        None, "Weight of each reward, and last of the ensemble; default: 1 each"
    )
    monitor_rewards: Sequence[str] = option([], "Rewards to log without training on them")
    reward_timeout: float | None = option(
        None,
        "Time limit of a reward in seconds; default: none for a function, 60 for a URL. A function "
        "with a limit is called in a thread, which keeps running after a timeout",
        above=0,
    )
    missing_eos_penalty: float | None = option(
        None,
        "Penalty to subtract from the score of a truncated response, in reward units",
        minimum=0,
    )
    truncated: Literal["learn", "mask", "bootstrap"] = option(
        "learn",
        "What to do with truncated responses: learn treats them as finished, mask leaves them out "
        "of the loss, and bootstrap continues them by the value of their last state",
    )
    score_normalization: Literal["none", "running"] = option(
        "none", "running divides scores by the standard deviation of all scores so far"
    )
    score_clip: float | None = option(
        None, "Clip normalized scores to plus or minus this value", above=0
    )
    reward_ensemble: Sequence[str] = option(
        [], "Reward models whose scores are combined into one reward, named `ensemble`"
    )
    reward_ensemble_by: Literal["mean", "min", "lcb"] = option(
        "mean",
        "Combine the scores of the ensemble by their mean, their minimum, or lcb, which is the "
        "mean − the standard deviation",
        needs="reward_ensemble",
    )


@dataclass(kw_only=True, frozen=True)
class FailureOptions(Options):
    """Failed episodes."""

    environment_failure: Literal["raise", "drop"] = option(
        "raise",
        "What to do if an environment, an agent or a tool with stop_on raises: raise ends the run, "
        "drop leaves out the episode and counts it, and ends the run if more than a tenth fail in "
        "three batches",
        needs="environment",
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
        8,
        "Maximum number of turns in a response, each of at most max_new_tokens",
        minimum=1,
        needs="environment",
    )
