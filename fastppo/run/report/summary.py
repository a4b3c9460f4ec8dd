"""Summarize a run in a sentence: the change of its reward, and whether it exceeds the noise.

Errors are standard errors, and a change below two of them counts as noise. For held-out prompts,
and for training rewards of short runs, the error is that of the difference of two means over
responses. In longer runs, the error of training rewards is estimated from the differences of
neighboring iterations, which a slow trend hardly affects (von Neumann 1941).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fastppo.run.watch import PAGE, PAGE_ITEMS

NOISE = 2.0
"""Largest change that counts as noise, in standard errors."""

LEAST = 10
"""Iterations needed to estimate the noise from their differences. With independent normal rewards,
7 % of runs of this length show a change by noise alone; with 5 iterations 10 %, with 100 iterations
5 % (400 000 simulated runs each)."""

LEAST_SPREAD = 1e-4
"""Smallest standard deviation of rewards to learn from, the threshold of the default warnings."""

ITEM = PAGE_ITEMS["reward_std"]

Metrics = Mapping[str, Any]
Records = Sequence[Metrics]


@dataclass(frozen=True, slots=True)
class Change:
    """Change of a reward from the beginning of a run to its end."""

    of: str
    value: float
    error: float
    """Standard error of the change; NaN if there are too few rewards."""

    def __str__(self) -> str:
        if self.value == self.error == 0:
            return f"{self.of} unchanged"
        sentence = f"{self.of} {_rounded(self.value, self.error)}"
        if math.isfinite(self.value) and math.isnan(self.error):  # a single held-out prompt
            return f"{sentence} (too few to tell)"
        is_noise = abs(self.value) <= NOISE * self.error
        return f"{sentence} (no change beyond noise)" if is_noise else sentence


def summarize(records: Records) -> str:
    """Return a sentence with the change of the reward and of the monitored rewards, and the KL.

    It uses the held-out rewards if there are any, and the training rewards otherwise.

    Args:
        records: at least one record of metrics.jsonl. An incomplete iteration has no reward.
    """
    rewards = [record["reward"] for record in records if "reward" in record]
    if not rewards:
        return "No complete iteration"
    spreads = [record["reward_std"] for record in records if "reward_std" in record]
    if spreads and all(x < LEAST_SPREAD for x in [*spreads, max(rewards) - min(rewards)]):
        return f"All responses got the same reward, {rewards[0]:.3g} (see {PAGE}, item {ITEM})"
    tenth = max(1, len(rewards) // 10)
    kls = [record["kl"] for record in records if "kl" in record]
    kl = statistics.fmean(kls[-tenth:]) if kls else math.nan
    trained = _training_change(records, "reward")
    held_out = [record for record in records if "eval/reward_error" in record]
    if held_out and "before/reward_error" in records[0]:
        last = held_out[-1]
        changes = _held_out_changes(records[0], last)
        kl = last.get("eval/kl", kl)
    elif len(rewards) == 1:
        return f"Reward {rewards[0]:.3g} in the only iteration"
    else:
        monitors = [name for name in records[0] if name.startswith("monitor/")]
        changes = [trained, *(_training_change(records, name) for name in monitors)]
    sentence = ", ".join(map(str, changes))
    if math.isfinite(kl):
        sentence += f", KL {round(kl, 1) + 0.0:.1f} nats"
    return sentence[0].upper() + sentence[1:]


def _held_out_changes(first: Metrics, last: Metrics) -> list[Change]:
    """Return the changes of the reward and the monitored rewards since before the training.

    Args:
        first: the record with the evaluation before training.
        last: the record with the last evaluation.
    """
    names = [
        "reward",
        *(name.removeprefix("eval/") for name in last if name.startswith("eval/monitor/")),
    ]
    return [
        Change(
            of=_described(name, "held-out reward"),
            value=last[f"eval/{name}"] - first[f"before/{name}"],
            error=math.hypot(
                last.get(f"eval/{_error_of(name)}", math.nan),
                first.get(f"before/{_error_of(name)}", math.nan),
            ),
        )
        for name in names
        if f"before/{name}" in first
    ]


def _training_change(records: Records, name: str) -> Change:
    """Return the change of a reward from the first to the last tenth of a run."""
    records = [record for record in records if name in record]
    values = [record[name] for record in records]
    tenth = max(1, len(values) // 10)
    if len(values) < LEAST:
        ends = (records[0], records[-1])
        error = math.hypot(*(record.get(_error_of(name), math.nan) for record in ends))
    else:
        steps = [after - before for before, after in pairwise(values)]
        error = math.sqrt(statistics.fmean(step**2 for step in steps) / tenth)
    return Change(
        of=_described(name, "reward"),
        value=statistics.fmean(values[-tenth:]) - statistics.fmean(values[:tenth]),
        error=error,
    )


def _error_of(name: str) -> str:
    """Return the name of a reward's standard error: reward_error or monitor_error/NAME."""
    return name.replace("monitor/", "monitor_error/", 1) if "monitor/" in name else f"{name}_error"


def _described(name: str, reward: str) -> str:
    """Return a reward's name for a sentence: `reward`, or "monitored NAME"."""
    return f"monitored {name.partition('monitor/')[2]}" if "monitor/" in name else reward


def _rounded(change: float, error: float) -> str:
    """Format both numbers, rounded to the first digit of the error: +1.6 ± 0.1."""
    if not (math.isfinite(change) and math.isfinite(error)):
        return f"{change:+.3g}"
    places = max(0, -math.floor(math.log10(error))) if error > 0 else 3
    return f"{change:+z.{places}f} ± {error:.{places}f}"


def summarize_critic(records: Records) -> str:
    """Return a sentence on the explained variance in the last tenth of a run, or ""."""
    last = records[-max(1, len(records) // 10) :]
    explained = [record["explained_variance"] for record in last if "explained_variance" in record]
    if not explained:
        return ""
    percent = round(100 * statistics.fmean(explained))
    if percent <= 0:
        return "At the end, the critic predicts the returns no better than a constant"
    return f"At the end, the critic explains {percent} % of the variance of the returns"
