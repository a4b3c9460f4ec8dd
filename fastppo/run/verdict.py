"""What came of a run, in a sentence: the change of its reward, and whether noise alone would do it.

An error is one standard error; a change of less than two of them is no change. On held-out prompts
it is that of the two means. Of the reward in training it is estimated from the differences between
neighbouring iterations, which a slow trend hardly enters (von Neumann 1941).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

NOISE = 2.0
"""Standard errors that a change has to exceed."""

LEAST = 5
"""Iterations that say how much the reward varies."""

Records = Sequence[Mapping[str, Any]]


def verdict(records: Records) -> str:
    """The change of the held-out reward, or of the reward in training where there is no held-out
    one, with the KL that it took.

    Args:
        records: of metrics.jsonl, at least one.
    """
    kls = [record["kl"] for record in records if "kl" in record]
    held_out = [record for record in records if "eval/reward_error" in record]
    first = records[0]
    if held_out and "before/reward_error" in first:
        last = held_out[-1]
        name = "held-out reward"
        change = last["eval/reward"] - first["before/reward"]
        error = math.hypot(last["eval/reward_error"], first["before/reward_error"])
        kl = last.get("eval/kl", math.nan) if kls else math.nan
    else:
        rewards = [record["reward"] for record in records]
        if len(rewards) < LEAST:
            return f"Fewer than {LEAST} iterations: too few to tell a change from noise"
        name = "reward"
        tenth = max(1, len(rewards) // 10)
        change = statistics.fmean(rewards[-tenth:]) - statistics.fmean(rewards[:tenth])
        steps = [after - before for before, after in pairwise(rewards)]
        error = math.sqrt(statistics.fmean(step**2 for step in steps) / tenth)
        kl = statistics.fmean(kls[-tenth:]) if kls else math.nan
    parts = [f"{name} {_rounded(change, error)}"]
    if math.isfinite(kl):
        parts.append(f"KL {round(kl, 1) + 0.0:.1f} nats")
    if abs(change) <= NOISE * error:
        parts[-1] += ": no change beyond noise"
    sentence = ", ".join(parts)
    return sentence[0].upper() + sentence[1:]


def _rounded(change: float, error: float) -> str:
    """Both to the first digit of the error, as in +1.6 ± 0.1."""
    if not (math.isfinite(change) and math.isfinite(error)):
        return f"{change:+.3g}"
    places = max(0, -math.floor(math.log10(error))) if error > 0 else 3
    return f"{change:+z.{places}f} ± {error:.{places}f}"


def critic_verdict(records: Records) -> str:
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
