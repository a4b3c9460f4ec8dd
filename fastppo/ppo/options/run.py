"""Options of watching a run, and of the run itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fastppo.run.options import Options, option

WARNINGS = (
    "kl > 50",
    "approx_kl > 0.1",
    "still_iterations >= 5",
    "eos_rate < 0.1",
    "distinct_2 < 0.1",
    "skipped_steps > 0",
    "mismatch/outside > 0.1",
    "reward_std < 0.0001",
    "advantage_std < 0.0001",
    "successes_per_minibatch < 2",
)
"""Default thresholds of warnings, far outside the range of a healthy run."""


@dataclass(kw_only=True, frozen=True)
class WatchOptions(Options):
    """Watching."""

    warn_if: Sequence[str] = option(
        list(WARNINGS),
        "Warn when a logged metric passes a threshold, such as 'kl > 50', with >, >=, < or <=",
    )
    stop_if: Sequence[str] = option(
        [], "Stop the run with a checkpoint when a metric passes a threshold"
    )


@dataclass(kw_only=True, frozen=True)
class RunOptions(Options):
    """Run."""

    output_dir: str = option("runs/ppo", "Directory of the run")
    seed: int = option(
        0, "Seed of sampling, shuffling and initialization", minimum=0, maximum=2**32 - 1
    )
    device: str = option("auto", "auto (a CUDA GPU if there is one), cpu, cuda, cuda:1, …, mps")
    checkpoint_interval: int = option(
        50, "Number of iterations between checkpoints; 0 writes one at the end only", minimum=0
    )
    checkpoint_best: str | None = option(
        None,
        "Also keep the checkpoint with the best mean of this metric since the previous one: "
        "`reward` for the highest, `min:kl` for the lowest",
    )
    resume: bool | Literal["force"] = option(
        False,
        "Resume from the newest complete checkpoint of output_dir; force: although options, model, "
        "data or rewards have changed",
    )
