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

and one batch may hold all three.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Partial = list[float] | list[tuple[int, float]]
"""Rewards within one completion: one number per response token, or (end, value) pairs."""

Reward = Callable[..., Sequence[float | Partial]]

FP32_MAX = torch.finfo(torch.float32).max
"""Rewards are trained on in fp32, where more than this is infinite."""


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


def score(
    term: RewardTerm,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, list[Any]] | None = None,
    failure_file: Path | None = None,
    completion_ids: Sequence[Sequence[int]] | None = None,
) -> Scored:
    """The term's rewards of all completions, unweighted.

    `completion_ids` are the responses' token ids, for rewards that ask for them and to count the
    rewards of a list with one per token.

    Raises:
        RewardError: the reward raised, returned the wrong number of values, or one that is not a
            finite number. The samples are written to `failure_file` first.
    """
    columns = columns or {}
    try:
        return score_term(term, prompts, completions, columns, completion_ids)
    except TermError as error:
        rows = range(len(completions)) if error.row is None else [error.row]
        where = _save_failure(
            failure_file,
            error.reward,
            [prompts[i] for i in rows],
            [completions[i] for i in rows],
            {name: [column[i] for i in rows] for name, column in columns.items()},
            error.sentence,
        )
        raise RewardError(f"{error}{where}") from error.__cause__


def score_term(
    term: RewardTerm,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
    completion_ids: Sequence[Sequence[int]] | None,
) -> Scored:
    """`score` without the file.

    Raises:
        TermError: as `RewardError` there.
    """
    try:
        returned = _call(term.function, prompts, completions, columns, completion_ids)
    except TermError as error:  # of a member of an ensemble: both names say where to look
        name = f"{term.name}/{error.reward}"
        raise TermError(name, error.sentence, error.row) from error.__cause__
    except Exception as error:
        raise TermError(term.name, f"raised {error!r}") from error
    return _validated(term.name, returned, len(completions), completion_ids)


def _validated(
    name: str, returned: Any, count: int, completion_ids: Sequence[Sequence[int]] | None
) -> Scored:
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
        try:
            if isinstance(reward, (list, tuple)):
                steps = _partial(reward, tokens, row)
                partial.append(steps)
                numbers = (item[1] if isinstance(item, tuple) else item for item in steps)
                values.append(_finite(sum(numbers), f"in total for completion {row}"))
            else:
                partial.append(None)
                values.append(_finite(reward, f"for completion {row}"))
        except ValueError as error:
            raise TermError(name, str(error), row) from None
    some = any(steps is not None for steps in partial)
    return Scored(values, partial if some else None, disagreement)


def _plain(value: Any) -> Any:
    """Arrays, tensors and their scalars as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _finite(value: Any, where: str) -> float:
    value = _plain(value)
    if not isinstance(value, (int, float)) or not abs(value) <= FP32_MAX:
        raise ValueError(f"returned {value!r} {where}; expected a finite number (fp32)")
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
            f"returned {tuple(item)!r} for a step of completion {row}; expected (end, value) with "
            "end the character offset where the step ends, a whole number from 1"
        )
    return end, _finite(item[1], f"for the step of completion {row} that ends at {end}")


def _call(
    function: Reward,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
    completion_ids: Sequence[Sequence[int]] | None = None,
) -> Any:
    """Calls the reward with what its signature has room for."""
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


def _save_failure(
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
