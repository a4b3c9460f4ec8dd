"""What came of a run, in a sentence: the change of its reward, and whether noise alone would do it.

An error is one standard error; a change of less than two of them is no change. On held-out prompts
it is that of the two means. Of the reward in training it is estimated from the differences between
neighbouring iterations, which a slow trend hardly enters (von Neumann 1941).
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
"""Standard errors that a change has to exceed."""

LEAST = 10
"""Iterations that say how much the reward varies. Of runs with so many independent normal rewards,
which change by noise alone, 7 % are said to change; with 5 it would be 10 %, with 100 it is 5 %
(400 000 runs simulated for each)."""

LEAST_SPREAD = 1e-4
"""Reward units: of rewards that differ by less nothing is learned, as the default warnings have
it."""

ITEM = PAGE_ITEMS["reward_std"]

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Change:
    """A reward at the end of a run minus that at its beginning."""

    of: str
    value: float
    error: float
    """One standard error; NaN where there are too few rewards to tell."""

    @property
    def is_beyond_noise(self) -> bool:
        """False for NaN."""
        return abs(self.value) > NOISE * self.error

    def __str__(self) -> str:
        if self.value == self.error == 0:
            return f"{self.of} unchanged"
        sentence = f"{self.of} {_rounded(self.value, self.error)}"
        if math.isfinite(self.value) and math.isnan(self.error):  # of a single held-out prompt
            return f"{sentence} (too few to tell)"
        is_noise = abs(self.value) <= NOISE * self.error
        return f"{sentence} (no change beyond noise)" if is_noise else sentence


def summarize(records: Records) -> str:
    """The change of the held-out reward, or of the reward in training where there is no held-out
    one, with the KL that it took. Greedy responses often stay as they were while sampled ones earn
    more; then both are told.

    Args:
        records: of metrics.jsonl, at least one. That of an iteration that broke off has no reward.
    """
    rewards = [record["reward"] for record in records if "reward" in record]
    spreads = [record["reward_std"] for record in records if "reward_std" in record]
    if spreads and all(x < LEAST_SPREAD for x in [*spreads, max(rewards) - min(rewards)]):
        return f"All responses earned the same, {rewards[0]:.3g} (see {PAGE}, item {ITEM})"
    tenth = max(1, len(rewards) // 10)
    kls = [record["kl"] for record in records if "kl" in record]
    kl = statistics.fmean(kls[-tenth:]) if kls else math.nan
    trained = _change_in_training(rewards, tenth)
    held_out = [record for record in records if "eval/reward_error" in record]
    changes: list[Change]
    if held_out and "before/reward_error" in records[0]:
        last = held_out[-1]
        is_greedy = last["eval/reward"] == last.get("eval/greedy/reward")
        change = _held_out_change(records[0], last, is_greedy)
        changes = [change]
        if is_greedy and not change.is_beyond_noise and trained and trained.is_beyond_noise:
            changes = [replace(trained, of="reward of sampled responses in training"), change]
        elif kls:  # where responses are greedy there is none of theirs
            kl = last.get("eval/kl", kl)
    elif trained is None:
        return f"Fewer than {LEAST} iterations: too few to tell a change from noise"
    else:
        changes = [trained]
    sentence = "; ".join(map(str, changes))
    if math.isfinite(kl):
        sentence += f", KL {round(kl, 1) + 0.0:.1f} nats"
    return sentence[0].upper() + sentence[1:]


def _held_out_change(first: Mapping[str, Any], last: Mapping[str, Any], is_greedy: bool) -> Change:
    """Between the evaluations before the first update and in the last record that has one."""
    return Change(
        of="held-out reward, greedy," if is_greedy else "held-out reward",
        value=last["eval/reward"] - first["before/reward"],
        error=math.hypot(last["eval/reward_error"], first["before/reward_error"]),
    )


def _change_in_training(rewards: Sequence[float], tenth: int) -> Change | None:
    """Between the first and the last tenth of a run; None where the iterations are too few."""
    if len(rewards) < LEAST:
        return None
    steps = [after - before for before, after in pairwise(rewards)]
    return Change(
        of="reward",
        value=statistics.fmean(rewards[-tenth:]) - statistics.fmean(rewards[:tenth]),
        error=math.sqrt(statistics.fmean(step**2 for step in steps) / tenth),
    )


def _rounded(change: float, error: float) -> str:
    """Both to the first digit of the error, as in +1.6 ± 0.1."""
    if not (math.isfinite(change) and math.isfinite(error)):
        return f"{change:+.3g}"
    places = max(0, -math.floor(math.log10(error))) if error > 0 else 3
    return f"{change:+z.{places}f} ± {error:.{places}f}"


def critic_summary(records: Records) -> str:
    """Whether the value function was worth having in the last tenth of a run; "" where nothing says
    it."""
    last = records[-max(1, len(records) // 10) :]

    def mean(name: str) -> float | None:
        values = [record[name] for record in last if name in record]
        return statistics.fmean(values) if values else None

    explained = mean("explained_variance")
    if explained is None:
        return ""
    if explained <= 0:
        return "At the end the critic explains nothing of the returns: a constant would do as well"
    return (
        f"At the end the critic explains {100 * explained:.0f} % of the variance of the returns; "
        "a constant would explain none"
    )
