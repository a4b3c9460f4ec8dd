"""The result of a run in a sentence: the change of its reward, and whether it exceeds the noise.

Errors are standard errors, and a change below two of them counts as noise. For held-out prompts it
is the error of the difference of two means. For the training reward it is estimated from the
differences of neighboring iterations, which a slow trend hardly affects (von Neumann 1941).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from fastppo.run.watch import PAGE, PAGE_ITEMS

NOISE = 2.0
"""Standard errors."""

LEAST = 10
"""Iterations needed to estimate the noise. With independent normal rewards, 7 % of runs of this
length show a change by noise alone; with 5 iterations 10 %, with 100 iterations 5 % (400 000
simulated runs each)."""

LEAST_SPREAD = 1e-4
"""Reward units. Nothing is learned from smaller differences (the threshold of the default
warnings)."""

ITEM = PAGE_ITEMS["reward_std"]

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Change:
    """The change of a reward from the beginning of a run to its end."""

    of: str
    value: float
    error: float
    """Standard error; NaN if there are too few rewards."""

    @property
    def exceeds_noise(self) -> bool:
        return abs(self.value) > NOISE * self.error

    def __str__(self) -> str:
        if self.value == self.error == 0:
            return f"{self.of} unchanged"
        sentence = f"{self.of} {_rounded(self.value, self.error)}"
        if math.isfinite(self.value) and math.isnan(self.error):  # a single held-out prompt
            return f"{sentence} (too few to tell)"
        is_noise = abs(self.value) <= NOISE * self.error
        return f"{sentence} (no change beyond noise)" if is_noise else sentence


def summarize(records: Records) -> str:
    """Return a sentence with the change of the reward and the KL.

    It uses the held-out reward if there is one, and the training reward otherwise. Greedy responses
    often stay the same while the sampled ones improve; then both changes are given.

    Args:
        records: of metrics.jsonl, at least one. An incomplete iteration has no reward.
    """
    rewards = [record["reward"] for record in records if "reward" in record]
    spreads = [record["reward_std"] for record in records if "reward_std" in record]
    if spreads and all(x < LEAST_SPREAD for x in [*spreads, max(rewards) - min(rewards)]):
        return f"All responses got the same reward, {rewards[0]:.3g} (see {PAGE}, item {ITEM})"
    tenth = max(1, len(rewards) // 10)
    kls = [record["kl"] for record in records if "kl" in record]
    kl = statistics.fmean(kls[-tenth:]) if kls else math.nan
    trained = _training_change(rewards, tenth)
    held_out = [record for record in records if "eval/reward_error" in record]
    changes: list[Change]
    if held_out and "before/reward_error" in records[0]:
        last = held_out[-1]
        is_greedy = last["eval/reward"] == last.get("eval/greedy/reward")
        change = Change(
            of="held-out reward (greedy)" if is_greedy else "held-out reward",
            value=last["eval/reward"] - records[0]["before/reward"],
            error=math.hypot(last["eval/reward_error"], records[0]["before/reward_error"]),
        )
        changes = [change]
        if is_greedy and not change.exceeds_noise and trained and trained.exceeds_noise:
            changes = [replace(trained, of="training reward (sampled)"), change]
        elif kls:  # greedy responses have no KL
            kl = last.get("eval/kl", kl)
    elif trained is None:
        return f"Fewer than {LEAST} iterations: too few to tell a change from noise"
    else:
        changes = [trained]
    sentence = "; ".join(map(str, changes))
    if math.isfinite(kl):
        sentence += f", KL {round(kl, 1) + 0.0:.1f} nats"
    return sentence[0].upper() + sentence[1:]


def _training_change(rewards: Sequence[float], tenth: int) -> Change | None:
    """The change from the first to the last tenth of a run; None for too few iterations."""
    if len(rewards) < LEAST:
        return None
    steps = [after - before for before, after in pairwise(rewards)]
    return Change(
        of="reward",
        value=statistics.fmean(rewards[-tenth:]) - statistics.fmean(rewards[:tenth]),
        error=math.sqrt(statistics.fmean(step**2 for step in steps) / tenth),
    )


def _rounded(change: float, error: float) -> str:
    """Both numbers, rounded to the first digit of the error: +1.6 ± 0.1."""
    if not (math.isfinite(change) and math.isfinite(error)):
        return f"{change:+.3g}"
    places = max(0, -math.floor(math.log10(error))) if error > 0 else 3
    return f"{change:+z.{places}f} ± {error:.{places}f}"


def summarize_critic(records: Records) -> str:
    """Return a sentence with the explained variance in the last tenth of a run; "" without it."""
    last = records[-max(1, len(records) // 10) :]
    explained = [record["explained_variance"] for record in last if "explained_variance" in record]
    if not explained:
        return ""
    mean = statistics.fmean(explained)
    if mean <= 0:
        return "At the end, the critic predicts the returns no better than a constant"
    return f"At the end, the critic explains {100 * mean:.0f} % of the variance of the returns"
