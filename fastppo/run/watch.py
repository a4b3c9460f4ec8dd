"""Watching a run: signs that the reward is being gamed, and thresholds.

Over-optimisation shows in the responses before it shows in the reward: they grow long, loop, or
become one response; and a reward that nothing is trained on stops agreeing with the one that is
(`rollout_health`). What counts as too much is the user's to say, as `kl > 20` (`parse_threshold`,
`crossed`). `Watch` holds the thresholds of one run.
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

if TYPE_CHECKING:
    from torch import Tensor

PAGE = "docs/troubleshooting.md"

PAGE_ITEMS = {
    "reward_std": 2,
    "advantage_std": 2,
    "eos_rate": 3,
    "kl": 5,
    "distinct_2": 8,
    "skipped_steps": 10,
    "mismatch/outside": 11,
}
"""Where `PAGE` says what to do about a metric: items of "My run does not learn"."""

MEANINGS = {"reward_std": ": all responses earned the same"}
"""What a warning about a metric means, where its name does not say it."""

VALUE = re.compile(r"(= |step[ -])[-+.\w]+")
"""What differs between two warnings of one kind: a metric's value, an optimiser step."""

ABSENT_AFTER = 3
"""Iterations after which a metric that never came is reported: in one batch a correlation may be
undefined."""


# ---------------------------------------------------------------------------------- the responses


def rollout_health(
    token_ids: Sequence[Sequence[int]],
    scores: Sequence[float] | Tensor,
    monitors: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, float]:
    """Signs of reward hacking and collapse in one batch of responses.

    Args:
        token_ids: [B] responses, their EOS included.
        scores: [B] what is trained on.
        monitors: rewards that are not trained on, [B] each (a gold reward).

    Returns:
        dict:
            length_correlation: Pearson's r of score and length in tokens. Near 1, the reward pays
                for length.
            distinct_1, distinct_2: mean over the responses of distinct n-grams / n-grams within the
                response, in (0, 1]. Loops and repetition push them down; so does length by itself.
            unique_responses: distinct responses / responses, in (0, 1]. A policy that has collapsed
                says one thing.
            correlation/NAME: r of the trained score and the monitored reward. Falling while the
                reward rises is over-optimisation.

        A key that is undefined (r where one side does not vary, n-grams where no response has n
        tokens) is absent.

    Raises:
        ValueError: not one score or monitored reward per response.

    Source: distinct-n: Li et al. 2016, section 5.2, there over all responses at once.
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
    """The mean share of distinct n-grams of the responses that have any."""
    shares = [len(set(response)) / len(response) for response in ngrams if response]
    return statistics.fmean(shares) if shares else None


def _pearson(name: str, x: list[float], y: list[float]) -> float | None:
    """Pearson's r; None where one side does not vary."""
    if len(x) != len(y):
        raise ValueError(f"{name} must be one per response: got {len(x)} for {len(y)} responses")
    # By the values, because the variance of equal numbers may come out as rounding.
    if len(set(x)) < 2 or len(set(y)) < 2:
        return None
    # r does not depend on the scale, but squares of numbers near the ends of the range do.
    largest_x = max(map(abs, x))
    largest_y = max(map(abs, y))
    try:
        return statistics.correlation([a / largest_x for a in x], [b / largest_y for b in y])
    except statistics.StatisticsError:  # they differ by rounding alone
        return None


# -------------------------------------------------------------------------------------- thresholds

_OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_THRESHOLD = re.compile(r"^\s*(?P<metric>[^<>=]*[^<>=\s])\s*(?P<op>[<>]=?)\s*(?P<value>[^<>=]+)$")


@dataclass(slots=True, frozen=True)
class Threshold:
    """A bound on a metric that a run should not cross."""

    metric: str
    op: str
    """>, >=, < or <=: the side on which the trouble is."""
    value: float

    def __str__(self) -> str:
        return f"{self.metric} {self.op} {self.value:g}"


def parse_threshold(text: str, option: str = "threshold") -> Threshold:
    """The threshold that a text like `kl > 20` states.

    Args:
        option: the option that the text is of, for the message.

    Raises:
        ValueError: no metric, another operator than > >= < <=, or no finite number.
    """
    match = _THRESHOLD.match(text) if isinstance(text, str) else None
    try:
        value = float(match["value"]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise ValueError(
            f"{option} must read like `kl > 20`: a metric, one of > >= < <=, a number; got {text!r}"
        )
    return Threshold(match["metric"], match["op"], value)


def crossed(thresholds: Sequence[Threshold], metrics: Mapping[str, Any]) -> list[str]:
    """A sentence for each threshold on whose far side its metric is, such as `kl = 31.2 > 20`.

    A metric that is NaN counts as crossed, since no comparison would ever say so. One that is
    absent does not: see `Watch`.
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
    """The warning without what differs between two of one kind."""
    return VALUE.sub(r"\1", warning)


def advice(warning: str) -> str:
    """What a warning means and where a page helps, as the end of its sentence; nothing where none
    does."""
    metric = warning.partition(" = ")[0]
    item = PAGE_ITEMS.get(metric)
    return "" if item is None else f"{MEANINGS.get(metric, '')} (see {PAGE}, item {item})"


def _digits(value: float, threshold: Threshold) -> str:
    """The value with as few digits as still show on which side of the threshold it is."""
    for digits in (3, 6, 17):
        shown = f"{value:.{digits}g}"
        if _OPERATORS[threshold.op](float(shown), threshold.value):
            break
    return shown


class Watch:
    """What one run is watched for, and what it has shown so far.

    Args:
        warn_if, stop_if: thresholds.
        expected: those of them whose metric is missed if it never comes: a sentence says so once,
            lest one waits forever.
        absent_after: iterations after which it does.
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
        """Sentences of the thresholds of `stop_if` that the last metrics crossed."""
        self._iterations = 0
        self._metrics_seen: set[str] = set()

    def __call__(self, metrics: dict[str, float]) -> list[str]:
        """Sentences to warn with about the metrics of an iteration."""
        self.stopped_by = crossed(self.stop_if, metrics)
        warnings = crossed(self.warn_if, metrics)
        if any(warning.startswith("reward_std = ") for warning in warnings):
            # So that equal rewards are one warning: the advantages follow from them.
            warnings = [text for text in warnings if not text.startswith("advantage_std = ")]
        return warnings + self._missing(metrics)

    def _missing(self, metrics: dict[str, float]) -> list[str]:
        """In iteration `absent_after`, a sentence for each metric that is expected and never came,
        with the nearest one that did."""
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
                    f"so `{threshold}` cannot be crossed{hint}"
                )
        return sentences

    def state_dict(self) -> dict[str, Any]:
        """The metrics that have come so far, as JSON has them."""
        return {"absent": {"calls": self._iterations, "seen": sorted(self._metrics_seen)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self._iterations = state["absent"]["calls"]
        self._metrics_seen = set(map(str, state["absent"]["seen"]))
