"""What a reward is, and what it may return.

A reward is a callable

    reward(prompts, completions, **columns) -> list

`prompts` are as the dataset holds them (strings, or lists of chat messages), `completions` strings
without special tokens, `columns` the other columns of the dataset, each a list with one entry per
prompt. `prompts` and `completions` are passed by name to a function that has such parameters, and
by position to one that calls them otherwise; a function without `**columns` is given the columns
that it names. A function with a parameter `completion_ids` is given the token ids of the responses,
their EOS included. For each completion a reward returns

    a number                          the reward of the whole response
    a list with a number per token    a reward for each response token
    a list of (end, value) pairs      a reward for each step; `end` is the offset of the character
                                      in the completion that follows the step

and one batch may hold all three. In place of a score may stand an exception, which says why there
is none. A reward gets copies of everything, so it may do with them what it likes.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastppo.functional.arguments import shown
from fastppo.rewards.patience import Patience

Partial = list[float] | list[tuple[int, float]]
"""Rewards within one completion: one number per response token, or (end, value) pairs."""

Reward = Callable[..., Sequence[float | Partial]]

LONGEST_MESSAGE = 500
"""Characters of what a reward raised that are shown."""

MAX_REWARD = 1e15
"""Rewards are trained on in fp32: the value loss squares them, the gradient's norm squares what
comes of that, and 1e38 is infinite. Beyond this every step would be skipped."""


class RewardError(RuntimeError):
    """A reward raised, or returned something that cannot be trained on."""


class TermError(RewardError):
    """A `RewardError` with reward, sentence and row apart; a row of None is all completions."""

    def __init__(self, reward: str, sentence: str, row: int | None = None) -> None:
        super().__init__(f"reward {reward!r} {sentence}")
        self.reward, self.sentence, self.row = reward, sentence, row


class Scored(list[float]):
    """What a reward said of a batch: a list of the completions' totals, reward units.

    `partial` has, per completion, its rewards by token or by step, or None where the reward was one
    number; it is None if all were. `disagreement` has, per completion, the population standard
    deviation across the members of an ensemble; None for any other reward.
    """

    def __init__(
        self,
        values: Sequence[float],
        partial: Sequence[Partial | None] | None = None,
        disagreement: Sequence[float] | None = None,
    ) -> None:
        super().__init__(values)
        self.partial = None if partial is None else list(partial)
        self.disagreement = None if disagreement is None else list(disagreement)

    def select(self, rows: Sequence[int]) -> Scored:
        """What it said of some of the completions."""
        partial, disagreement = self.partial, self.disagreement
        return Scored(
            [self[row] for row in rows],
            None if partial is None else [partial[row] for row in rows],
            None if disagreement is None else [disagreement[row] for row in rows],
        )

    @classmethod
    def joined(cls, parts: Sequence[Scored]) -> Scored:
        """What it said of several batches, one after the other."""
        partial = disagreement = None
        if any(part.partial is not None for part in parts):
            partial = [steps for part in parts for steps in part.partial or [None] * len(part)]
        if all(part.disagreement is not None for part in parts):
            disagreement = [value for part in parts for value in part.disagreement or ()]
        return cls([value for part in parts for value in part], partial, disagreement)

    @property
    def values(self) -> list[float]:
        """[B] the total of each completion, for logs."""
        return list(self)

    @property
    def whole(self) -> list[float]:
        """[B] what is paid at the last token: the reward if it was one number, else 0, because
        `token_rewards` places it."""
        if self.partial is None:
            return list(self)
        rows = zip(self, self.partial, strict=True)
        return [value if steps is None else 0.0 for value, steps in rows]


@dataclass(slots=True)
class RewardTerm:
    """One reward under its name, with its weight in the sum."""

    name: str
    function: Reward
    weight: float = 1.0
    fingerprint: str = ""
    """Of its file, its URL or its weights: another one is another reward."""


def score(
    term: RewardTerm,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, list[Any]] | None = None,
    failure_file: Path | None = None,
    completion_ids: Sequence[Sequence[int]] | None = None,
    patience: Patience | None = None,
) -> Scored:
    """The term's rewards of all completions, unweighted; NaN for a sample that is dropped.

    `completion_ids` are the responses' token ids, for rewards that ask for them and to count the
    rewards of a list with one per token.

    Raises:
        RewardError: the reward raised, was too late, returned the wrong number of values, or one
            that is not a number within ±`MAX_REWARD`, and nothing is to be dropped. The samples
            are written to `failure_file` first.
    """
    columns, patience = columns or {}, patience or Patience()
    failures: list[TermError] = []
    try:
        scored = score_term(term, prompts, completions, columns, completion_ids, patience, failures)
    except TermError as error:
        failures, scored = [error], Scored([math.nan] * len(completions))
    if not failures:
        return scored
    first = failures[0]
    rows = [error.row for error in failures if error.row is not None] or range(len(completions))
    where = save_failure(
        failure_file,
        first.reward,
        [prompts[i] for i in rows],
        [completions[i] for i in rows],
        {name: [column[i] for i in rows] for name, column in columns.items()},
        first.sentence,
    )
    if not patience.drop:
        raise RewardError(f"{first}{where}") from first.__cause__
    patience.say(f"{first}{where}; {len(rows)} of {len(completions)} samples without a score")
    return scored


def score_term(
    term: RewardTerm,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
    completion_ids: Sequence[Sequence[int]] | None,
    patience: Patience | None = None,
    failures: list[TermError] | None = None,
) -> Scored:
    """`score` without the file.

    Args:
        failures: where `patience` says to drop, takes the errors of single samples; their scores
            are NaN.

    Raises:
        TermError: as `RewardError` there.
    """
    patience = patience or Patience()

    def call() -> Any:
        return _call(term.function, prompts, completions, columns, completion_ids)

    try:
        limited = getattr(term.function, "has_timeout", False)
        waits = Patience(say=patience.say) if limited else patience
        returned = waits.call(term.name, call)
    except TermError as error:  # of a member of an ensemble: both names say where to look
        name = f"{term.name}/{error.reward}"
        raise TermError(name, error.sentence, error.row) from error.__cause__
    except TimeoutError as error:
        if error.errno is not None:  # its own, of a socket
            raise TermError(term.name, _raised(error)) from error
        raise TermError(term.name, str(error)) from None
    # A script's exit() is no way to end a run, nor is a task that was cancelled.
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        raise TermError(term.name, _raised(error)) from error
    found: list[TermError] = []
    scored = _validated(term.name, returned, len(completions), completion_ids, found)
    if found and (not patience.drop or failures is None):
        raise found[0]
    if failures is not None:
        failures += found
    return scored


def _raised(error: BaseException) -> str:
    text = f"raised {error!r}"
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]} …"


def _validated(
    name: str,
    returned: Any,
    count: int,
    completion_ids: Sequence[Sequence[int]] | None,
    failures: list[TermError],
) -> Scored:
    """What a reward returned, as numbers. A sample that has none gets NaN and a failure.

    Raises:
        TermError: it is no list of `count`.
    """
    disagreement = None
    if isinstance(returned, Scored):  # of an ensemble, or of a reward that calls `score` itself
        disagreement = returned.disagreement
        partials = returned.partial or [None] * len(returned)
        returned = [v if p is None else p for v, p in zip(returned, partials, strict=True)]
    rows = _plain(returned)
    if not isinstance(rows, (list, tuple)):
        raise TermError(
            name, f"returned {type(returned).__name__}; expected a list of {count} floats"
        )
    if len(rows) != count:
        raise TermError(name, f"returned {len(rows)} values for {count} completions")
    values: list[float] = []
    partial: list[Partial | None] = []
    for row, reward in enumerate(map(_plain, rows)):
        tokens = None if completion_ids is None else len(completion_ids[row])
        steps, value = None, math.nan
        try:
            if isinstance(reward, Exception):
                raise ValueError(str(reward))
            if isinstance(reward, (list, tuple)):
                steps = _partial(reward, tokens, row)
                numbers = (item[1] if isinstance(item, tuple) else item for item in steps)
                value = _finite(sum(numbers), f"in total for completion {row}")
            else:
                value = _finite(reward, f"for completion {row}")
        except ValueError as error:
            failures.append(TermError(name, str(error), row))
            steps = None
        values.append(value)
        partial.append(steps)
    some = any(steps is not None for steps in partial)
    return Scored(values, partial if some else None, disagreement)


def _plain(value: Any) -> Any:
    """Arrays, tensors and their scalars as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _finite(value: Any, where: str) -> float:
    value = _plain(value)
    if not isinstance(value, (int, float)) or not abs(value) <= MAX_REWARD:
        raise ValueError(
            f"returned {shown(value)} {where}; expected a number within ±{MAX_REWARD:g}"
        )
    return float(value)


def _partial(items: Sequence[Any], tokens: int | None, row: int) -> Partial:
    """One completion's rewards by token or by step; no steps at all are an empty list."""
    pairs = [isinstance(item, (list, tuple)) for item in items]
    if any(pairs) and not all(pairs):
        raise ValueError(
            f"returned numbers beside (end, value) pairs for completion {row}; "
            "expected one or the other"
        )
    if any(pairs):
        return [_step(item, row) for item in items]
    if items and tokens is not None and len(items) != tokens:
        raise ValueError(
            f"returned {len(items)} numbers for completion {row}, which has {tokens} response "
            "tokens; expected one per token, or (end, value) pairs"
        )
    return [_finite(x, f"for token {t} of completion {row}") for t, x in enumerate(items)]


def _step(item: Sequence[Any], row: int) -> tuple[int, float]:
    end = _plain(item[0]) if len(item) == 2 else None
    if isinstance(end, bool) or not isinstance(end, int) or end < 1:
        raise ValueError(
            f"returned {shown(tuple(item))} for a step of completion {row}; expected (end, value) "
            "with end the character offset where the step ends, a whole number from 1"
        )
    return end, _finite(item[1], f"for the step of completion {row} that ends at {end}")


def _call(
    function: Reward,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
    completion_ids: Sequence[Sequence[int]] | None = None,
) -> Any:
    """Calls the reward with what its signature has room for: copies, which it may change."""
    prompts, completions = copy.deepcopy(list(prompts)), list(completions)
    columns = copy.deepcopy(columns)
    if completion_ids is not None:
        completion_ids = [list(ids) for ids in completion_ids]
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    positional = any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters)
    wanted: dict[str, Any] = {
        name: column for name, column in columns.items() if takes_all or name in named
    }
    if completion_ids is not None and "completion_ids" in named:  # no column: `**columns` lacks it
        wanted["completion_ids"] = completion_ids
    if "completions" in named or not (named or positional):
        both: dict[str, Any] = {"prompts": prompts, "completions": completions}
        wanted |= {name: value for name, value in both.items() if takes_all or name in named}
        return function(**wanted)
    return function(prompts, completions, **wanted)


def lacking_columns(function: Reward, columns: Collection[str]) -> list[str]:
    """Arguments that a reward cannot do without, and that are neither the prompts and completions
    nor one of the columns of their rows."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # made in C, and says nothing of its arguments
        return []
    names = [p.name for p in parameters]
    known = {"prompts", "completions", "completion_ids", *columns}
    if "completions" not in names:  # the first two are prompts and completions by any name
        known |= {p.name for p in parameters[:2] if p.kind is not p.KEYWORD_ONLY}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    wanted = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    return [name for name in wanted if name not in known]


def save_failure(
    path: Path | None,
    reward: str,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
    reason: str,
) -> str:
    if path is None:
        return ""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "reward": reward,
        "reason": reason,
        "prompts": list(prompts),
        "completions": list(completions),
        "columns": columns,
    }
    path.write_text(json.dumps(record, ensure_ascii=False, indent=2, default=str))
    return f" (samples saved to {path})"
