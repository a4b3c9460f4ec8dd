"""Monitor a run: metrics of reward hacking, and thresholds on metrics.

Over-optimization shows in the responses before it shows in the reward: they become long, repetitive
or identical, and the monitored rewards stop following the trained one (`rollout_health`). Users set
thresholds such as `kl > 20`, and `Watch` applies them to a run. Warnings that need several
iterations are in `fastppo.run.trends`.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fastppo.run.trends import EqualRewards, Trends

if TYPE_CHECKING:
    from torch import Tensor

PAGE = "docs/troubleshooting.md"

PAGE_ITEMS = {
    "reward_std": 2,
    "advantage_std": 2,
    "successes_per_minibatch": 2,
    "eos_rate": 3,
    "still_iterations": 4,
    "kl": 5,
    "approx_kl": 5,
    "distinct_2": 8,
    "skipped_steps": 12,
    "mismatch/outside": 13,
    "monitor": 7,
    "response_length": 9,
}
"""Number of the item of "My run does not learn" on `PAGE` that explains a metric, or all metrics
of a group such as `monitor/…`."""

MEANINGS = {
    "eos_rate": ": responses are cut off, at max_new_tokens or after max_turns",
    "reward_std": ": all responses got the same reward",
    "still_iterations": ": the policy does not move",
    "successes_per_minibatch": ": too few responses got more than the lowest reward",
}
"""Explanations of metrics in warnings."""

VALUE = re.compile(r"(= |step[ -])[-+.\w]+")
"""Pattern of the variable parts of a warning: a metric's value, an optimizer step."""

ABSENT_AFTER = 3
"""Iterations after which a missing metric is reported. A correlation may be undefined in a
batch."""


# ---------------------------------------------------------------------------------- the responses


def rollout_health(
    token_ids: Sequence[Sequence[int]],
    scores: Sequence[float] | Tensor,
    monitors: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, float]:
    """Return metrics of reward hacking and collapse for a batch of responses.

    Args:
        token_ids: the B responses, each with its EOS.
        scores: the trained scores, [B].
        monitors: monitored rewards by name, such as a gold reward, [B] each.

    Returns:
        dict:
            length_correlation: Pearson's r of score and length in tokens. Near 1, the reward pays
                for length.
            distinct_1, distinct_2: distinct n-grams / n-grams of a response, averaged over the
                responses, in (0, 1]. Repetition lowers them, and so does length.
            unique_responses: distinct responses / responses, in (0, 1]. It is low for a collapsed
                policy.
            correlation/NAME: r of the trained score and a monitored reward. A fall while the reward
                rises is over-optimization.

        Omits undefined metrics, for example r with a constant or n-grams of shorter responses.

    Raises:
        ValueError: scores or monitored rewards are not one per response.

    Source: distinct-n from Li et al. 2016, section 5.2, there over all responses at once.
    """
    scores = [float(score) for score in scores]
    lengths = [float(len(tokens)) for tokens in token_ids]
    metrics = {
        "length_correlation": _pearson("scores", scores, lengths),
        "distinct_1": _distinct([list(tokens) for tokens in token_ids]),
        "distinct_2": _distinct([list(pairwise(tokens)) for tokens in token_ids]),
    }
    if token_ids:
        metrics["unique_responses"] = len({tuple(tokens) for tokens in token_ids}) / len(token_ids)
    for name, values in (monitors or {}).items():
        metrics[f"correlation/{name}"] = _pearson(name, list(values), scores)
    return {name: value for name, value in metrics.items() if value is not None}


def _distinct(ngrams: list[list[Any]]) -> float | None:
    """Return the mean fraction of distinct n-grams, over the responses that have n-grams."""
    shares = [len(set(response)) / len(response) for response in ngrams if response]
    return statistics.fmean(shares) if shares else None


def _pearson(name: str, x: list[float], y: list[float]) -> float | None:
    """Return Pearson's r, or None if x or y is constant.

    Skips pairs whose x is NaN, a reward that does not apply.
    """
    if len(x) != len(y):
        raise ValueError(f"{name} must be one per response: got {len(x)} for {len(y)} responses")
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if not math.isnan(a)]
    x = [a for a, _ in pairs]
    y = [b for _, b in pairs]
    # Rounding can make the variance of equal numbers nonzero.
    if len(set(x)) < 2 or len(set(y)) < 2:
        return None
    # Scaling leaves r unchanged and keeps the squares of extreme numbers finite.
    largest_x = max(map(abs, x))
    largest_y = max(map(abs, y))
    try:
        return statistics.correlation([a / largest_x for a in x], [b / largest_y for b in y])
    except statistics.StatisticsError:  # they differ by rounding errors
        return None


# -------------------------------------------------------------------------------------- thresholds

_OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_THRESHOLD = re.compile(r"^\s*(?P<metric>[^<>=]*[^<>=\s])\s*(?P<op>[<>]=?)\s*(?P<value>[^<>=]+)$")


@dataclass(slots=True, frozen=True)
class Threshold:
    """A bound on a metric."""

    metric: str
    op: str
    """Comparison >, >=, < or <=; the threshold is crossed if it is true."""
    value: float

    def __str__(self) -> str:
        return f"{self.metric} {self.op} {self.value:g}"


def parse_threshold(text: str, option: str = "threshold") -> Threshold:
    """Parse a threshold such as `kl > 20`.

    Args:
        option: the option's name, for the message.

    Raises:
        ValueError: the text is not a metric, one of > >= < <=, and a finite number.
    """
    match = _THRESHOLD.match(text) if isinstance(text, str) else None
    try:
        value = float(match["value"]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise ValueError(
            f"{option} must be like `kl > 20`: a metric, one of > >= < <=, a number; got {text!r}"
        )
    return Threshold(match["metric"], match["op"], value)


def crossed(thresholds: Sequence[Threshold], metrics: Mapping[str, Any]) -> list[str]:
    """Return a sentence per crossed threshold, such as `kl = 31.2 > 20`.

    NaN crosses every threshold. `Watch` reports missing metrics.
    """
    sentences = []
    for threshold in thresholds:
        value = metrics.get(threshold.metric)
        if not isinstance(value, (int, float)):
            continue
        if math.isnan(value):
            sentences.append(f"{threshold.metric} = nan, watched for {threshold}")
        elif _OPERATORS[threshold.op](value, threshold.value):
            sentences.append(
                f"{threshold.metric} = {_digits(value, threshold)} "
                f"{threshold.op} {threshold.value:g}"
            )
    return sentences


def kind_of(warning: str) -> str:
    """Return a warning without its variable parts, such as a metric's value."""
    return VALUE.sub(r"\1", warning)


def advice(warning: str) -> str:
    """Return the explanation of a warning with a link to `PAGE`, or "" if there is none."""
    metric = warning.partition(" ")[0]
    group = metric.removeprefix("eval/").partition("/")[0]
    item = PAGE_ITEMS.get(metric, PAGE_ITEMS.get(group))
    return "" if item is None else f"{MEANINGS.get(metric, '')} (see {PAGE}, item {item})"


def _digits(value: float, threshold: Threshold) -> str:
    """Format a value with enough digits to show that it crosses the threshold."""
    for digits in (3, 6, 17):
        shown = f"{value:.{digits}g}"
        if _OPERATORS[threshold.op](float(shown), threshold.value):
            break
    return shown


class Watch:
    """The thresholds of a run.

    Args:
        warn_if, stop_if: the thresholds that warn and that stop the run.
        expected: thresholds whose metric must exist. A missing metric is reported once.
        absent_after: number of iterations after which a missing metric is reported.
    """

    def __init__(
        self,
        warn_if: Sequence[Threshold] = (),
        stop_if: Sequence[Threshold] = (),
        expected: Sequence[Threshold] = (),
        absent_after: int = ABSENT_AFTER,
    ) -> None:
        self.warn_if = list(warn_if)
        self.stop_if = list(stop_if)
        self.expected = list(expected)
        self.absent_after = absent_after
        self.stopped_by: list[str] = []
        """One sentence for each threshold of `stop_if` that the latest metrics crossed."""
        self._iterations = 0
        self._metrics_seen: set[str] = set()
        self._eos_warning_is_due: bool | None = None
        """Whether the warning about eos_rate is due; None while every iteration crossed its
        threshold."""
        self._trends = Trends()
        self._equal_rewards = EqualRewards()

    def __call__(self, metrics: dict[str, float]) -> list[str]:
        """Return the warnings about the metrics of an iteration."""
        self.stopped_by = crossed(self.stop_if, metrics)
        warnings = self._equal_rewards(crossed(self.warn_if, metrics), metrics)
        warnings += self._trends(metrics)
        if "eos_rate" in metrics:
            warnings = self._with_eos_warning_once(warnings, metrics)
        return warnings + self._missing(metrics)

    def _with_eos_warning_once(
        self, warnings: list[str], metrics: Mapping[str, float]
    ) -> list[str]:
        """Keep the first warning about eos_rate, and none if it was low from the start.

        If all responses are truncated from the start, that is intended, as in plain text
        continuation. In episodes of several turns it never is.
        """
        others = [text for text in warnings if not text.startswith("eos_rate = ")]
        is_low = len(others) < len(warnings)
        if self._eos_warning_is_due is None and (not is_low or "turns" in metrics):
            self._eos_warning_is_due = True
        if not is_low or not self._eos_warning_is_due:
            return others
        self._eos_warning_is_due = False
        return warnings

    def _missing(self, metrics: dict[str, float]) -> list[str]:
        """Return a sentence per metric that is still missing in iteration `absent_after`."""
        self._iterations += 1
        if self._iterations > self.absent_after:
            return []
        self._metrics_seen |= {name for name, x in metrics.items() if isinstance(x, (int, float))}
        if self._iterations < self.absent_after:
            return []
        sentences = []
        for threshold in self.expected:
            if threshold.metric not in self._metrics_seen:
                known = sorted(self._metrics_seen)
                near = difflib.get_close_matches(threshold.metric, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                sentences.append(
                    f"no metric {threshold.metric!r} in the first {self.absent_after} iterations, "
                    f"so `{threshold}` has no effect{hint}"
                )
        return sentences

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics seen so far, as JSON."""
        return {
            "absent": {"calls": self._iterations, "seen": sorted(self._metrics_seen)},
            "eos_warning_is_due": self._eos_warning_is_due,
            "trends": self._trends.state_dict(),
            "equal_rewards": self._equal_rewards.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._iterations = state["absent"]["calls"]
        self._metrics_seen = set(map(str, state["absent"]["seen"]))
        self._eos_warning_is_due = state["eos_warning_is_due"]
        self._trends.load_state_dict(state["trends"])
        self._equal_rewards.load_state_dict(state["equal_rewards"])
