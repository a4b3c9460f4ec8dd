"""Warn when a run improves its reward and nothing else.

An exploited reward rises while a monitored one falls, or while the responses become several times
longer. `Trends` compares the first iterations of a run with its latest ones, and the held-out
rewards with those before training. A change counts if it exceeds `NOISE` standard errors. The error
of a mean over iterations comes from the differences of neighboring iterations, which a slow trend
hardly affects (von Neumann 1941).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

WINDOW = 5
"""Iterations in each of the two means that are compared."""

NOISE = 3.0
"""Largest change that counts as noise, in standard errors. It is compared in every iteration, so it
is above the 2 of the report's headline."""

LENGTH_FACTOR = 1.5
"""Smallest factor between two lengths that is worth a warning."""


class Change(NamedTuple):
    """A metric at the start of a run and now."""

    before: float
    now: float
    error: float
    """Standard error of the difference; NaN if it is unknown."""

    @property
    def direction(self) -> int:
        """1 if the metric rose, -1 if it fell, 0 if the change is within the noise."""
        change = self.now - self.before
        if not abs(change) > NOISE * self.error:
            return 0
        return 1 if change > 0 else -1

    def __str__(self) -> str:
        verb = "rose" if self.now > self.before else "fell"
        return f"{verb} from {self.before:.3g} to {self.now:.3g}"


@dataclass(slots=True)
class Series:
    """The first and the latest values of a metric."""

    first: list[float] = field(default_factory=list)
    latest: list[float] = field(default_factory=list)
    squares: float = 0.0
    """Sum of the squared differences of neighboring values."""
    count: int = 0

    def add(self, value: float) -> None:
        """Append a value."""
        if self.count:
            self.squares += (value - self.latest[-1]) ** 2
        if self.count < WINDOW:
            self.first.append(value)
        self.latest = [*self.latest, value][-WINDOW:]
        self.count += 1

    @property
    def change(self) -> Change | None:
        """The change from the first values to the latest; None while they overlap."""
        if self.count < 2 * WINDOW:
            return None
        error = math.sqrt(self.squares / (self.count - 1) / WINDOW)
        return Change(statistics.fmean(self.first), statistics.fmean(self.latest), error)


class Trends:
    """The trends of reward, monitored rewards and length. Each warning is given once."""

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}
        self._before: dict[str, float] = {}
        """Held-out rewards and their errors before training."""
        self._warned: set[str] = set()

    def __call__(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the warnings about an iteration."""
        self._before |= {
            name.removeprefix("before/"): value
            for name, value in metrics.items()
            if name.startswith(("before/reward", "before/monitor"))
        }
        for name, value in metrics.items():
            if name in ("reward", "response_length") or name.startswith("monitor/"):
                self._series.setdefault(name, Series()).add(value)
        warnings = self._fallen(self._training_changes(), "")
        warnings += self._fallen(self._held_out_changes(metrics), "eval/")
        return warnings + self._lengths()

    def state_dict(self) -> dict[str, Any]:
        """Return the values that later iterations are compared with, as JSON."""
        return {
            "series": {name: asdict(series) for name, series in self._series.items()},
            "before": self._before,
            "warned": sorted(self._warned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._series = {name: Series(**series) for name, series in state["series"].items()}
        self._before = dict(state["before"])
        self._warned = set(state["warned"])

    def _training_changes(self) -> dict[str, Change]:
        changes = {name: series.change for name, series in self._series.items()}
        return {name: change for name, change in changes.items() if change is not None}

    def _held_out_changes(self, metrics: Mapping[str, float]) -> dict[str, Change]:
        """Return the changes since before training, if this iteration was evaluated."""
        changes = {}
        for name, before in self._before.items():
            if name == "reward" or name.startswith("monitor/"):
                group, slash, monitored = name.partition("/")
                error = f"{group}_error{slash}{monitored}"
                error_before = self._before.get(error, math.nan)
                error_now = metrics.get(f"eval/{error}", math.nan)
                now = metrics.get(f"eval/{name}", math.nan)
                changes[name] = Change(before, now, math.hypot(error_before, error_now))
        return changes

    def _fallen(self, changes: Mapping[str, Change], prefix: str) -> list[str]:
        """Return a warning per monitored reward that falls while the trained one rises."""
        reward = changes.get("reward")
        if reward is None or reward.direction <= 0:
            return []
        return [
            f"{prefix}{name} {change} while {prefix}reward {reward}"
            for name, change in changes.items()
            if name.startswith("monitor/") and change.direction < 0 and self._is_new(name)
        ]

    def _lengths(self) -> list[str]:
        """Return a warning if the length changes much while the reward rises."""
        changes = self._training_changes()
        reward, length = changes.get("reward"), changes.get("response_length")
        if reward is None or length is None or reward.direction <= 0 or length.direction == 0:
            return []
        low, high = sorted([length.before, length.now])
        if high < LENGTH_FACTOR * low or not self._is_new("response_length"):
            return []
        return [f"response_length {length} tokens while reward {reward}"]

    def _is_new(self, name: str) -> bool:
        is_new = name not in self._warned
        self._warned.add(name)
        return is_new


class EqualRewards:
    """Warns once that all responses got the same reward, or says that the task is solved."""

    def __init__(self) -> None:
        self._highest = -math.inf
        """Highest reward of a response so far."""
        self._lowest_mean = math.inf
        """Lowest mean reward so far."""
        self._said: list[str] = []

    def __call__(self, warnings: list[str], metrics: Mapping[str, float]) -> list[str]:
        """Replace a repeated warning about `reward_std`, and what it implies.

        Args:
            warnings: the crossed thresholds of an iteration.
        """
        reward = metrics.get("reward", math.nan)
        is_highest = reward > self._highest or math.isclose(reward, self._highest, rel_tol=1e-6)
        is_solved = is_highest and reward > self._lowest_mean
        self._highest = max(self._highest, metrics.get("reward_max", reward))
        self._lowest_mean = min(self._lowest_mean, reward)
        if not any(text.startswith("reward_std = ") for text in warnings):
            return warnings
        # Equal rewards imply equal advantages and no success.
        implied = ("reward_std = ", "advantage_std = ", "successes_per_minibatch = ")
        others = [text for text in warnings if not text.startswith(implied)]
        kind = "solved" if is_solved else "equal"
        if kind in self._said:
            return others
        self._said.append(kind)
        if is_solved:
            return [*others, f"solved: the mean reward is the highest that was seen, {reward:.3g}"]
        return [text for text in warnings if text in others or text.startswith(implied[0])]

    def state_dict(self) -> dict[str, Any]:
        """Return the rewards seen and the messages given, as JSON."""
        rewards = [self._highest, self._lowest_mean]
        return {
            "rewards": [value if math.isfinite(value) else None for value in rewards],
            "said": self._said,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        highest, lowest_mean = state["rewards"]
        self._highest = -math.inf if highest is None else highest
        self._lowest_mean = math.inf if lowest_mean is None else lowest_mean
        self._said = list(state["said"])
