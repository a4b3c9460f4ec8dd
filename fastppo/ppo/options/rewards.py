"""Options of the rewards."""

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
        "Required. file.py:function, module:function, a sequence-classification model, or an "
        "https:// URL",
    )
    reward_weights: Sequence[float] | None = option(
        None, "One weight per reward, the ensemble's last; none given means 1"
    )
    monitor_rewards: Sequence[str] = option([], "Rewards that are logged and not trained on")
    reward_timeout: float | None = option(
        None,
        "Longest wait for a reward, seconds; none given waits for a function, and 60 s for a URL. "
        "A function is then called in a thread, which goes on after the time is up",
        above=0,
    )
    missing_eos_penalty: float | None = option(
        None,
        "Subtracted from the score of a response that was cut off: at max_new_tokens, or with its "
        "turns or the context used up; reward units",
        minimum=0,
    )
    score_normalization: Literal["none", "running", "batch"] = option(
        "none",
        "running: divide scores by the running deviation of all so far; batch: whiten each batch",
    )
    score_clip: float | None = option(
        None, "Clamp scores to ±this, after normalisation, reward units", above=0
    )
    reward_ensemble: Sequence[str] = option(
        [], "Reward models that are combined into one reward, by the name of ensemble"
    )
    reward_ensemble_by: Literal["mean", "min", "lcb"] = option(
        "mean", "mean, minimum, or lcb: mean − deviation"
    )
