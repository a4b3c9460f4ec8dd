"""What a reward is, and what it may return.

A reward is a callable

    reward(prompts, completions, **columns) -> list

`prompts` are as the dataset holds them (strings, or lists of chat messages), `completions` strings
without special tokens, `columns` the other columns of the dataset, each a list with one entry per
prompt. `prompts` and `completions` are passed by name to a function that has such parameters, and
by position otherwise; a function without `**columns` gets the columns that it names. A function
with a parameter `completion_ids` gets the token ids of the responses, their EOS included. For each
completion a reward returns

    a number                          the reward of the whole response
    a list with a number per token    a reward for each response token
    a list of (end, value) pairs      a reward for each step; `end` is the offset of the character
                                      in the completion that follows the step

and one batch may hold all three. A reward gets copies of everything, so it may change them. One
that an option names is called once before a run's models are loaded, on the first prompt with a
made-up response, so that a broken one fails within seconds; its side effects happen once more.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastppo.data.files import write_whole
from fastppo.data.rows import DataError
from fastppo.functional.scalars import counted, describe
from fastppo.rewards.calling import CallOptions, UserCodeError, call, place_of, traceback_of

Partial = list[float] | list[tuple[int, float]]
"""Rewards within one completion: one number per response token, or (end, value) pairs."""

Reward = Callable[..., Sequence[float | Partial]]

MAX_REWARD = 1e15
"""Rewards are trained on in fp32: the value loss squares them, the gradient's norm squares the
result, and 1e38 is infinite. Beyond this every step would be skipped."""

ATTEMPTS = 3
"""Times that a reward which does not return in time is called."""


class RewardError(RuntimeError):
    """A reward raised, or returned something that cannot be trained on."""


class TermError(RewardError):
    """A `RewardError` of one reward; a row of None means all completions."""

    def __init__(self, reward: str, sentence: str, row: int | None = None) -> None:
        super().__init__(f"reward {reward!r} {sentence}")
        self.reward = reward
        self.sentence = sentence
        self.row = row


@dataclass(frozen=True, slots=True)
class Samples:
    """What rewards are given: B prompts with their completions."""

    prompts: Sequence[Any]
    """[B] strings, or lists of chat messages."""
    completions: Sequence[str]
    """[B] without special tokens."""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Other columns of the dataset, [B] each."""
    completion_ids: Sequence[Sequence[int]] | None = None
    """[B] token ids of the responses, EOS included."""

    def __len__(self) -> int:
        return len(self.completions)

    def select(self, rows: Sequence[int]) -> Samples:
        """Some of the samples."""
        ids = self.completion_ids
        return Samples(
            [self.prompts[row] for row in rows],
            [self.completions[row] for row in rows],
            {name: [column[row] for row in rows] for name, column in self.columns.items()},
            None if ids is None else [ids[row] for row in rows],
        )


class Scored(list[float]):
    """What a reward returned for a batch: a list of the completions' totals, reward units.

    `partial` has, per completion, its rewards by token or by step, or None where the reward was one
    number; it is None if all were. `disagreement` has, per completion, the population standard
    deviation across the members of an ensemble; None for any other reward.
    """

    def __init__(
        self,
        totals: Sequence[float],
        partial: Sequence[Partial | None] | None = None,
        disagreement: Sequence[float] | None = None,
    ) -> None:
        super().__init__(totals)
        self.partial = None if partial is None else list(partial)
        self.disagreement = None if disagreement is None else list(disagreement)

    @classmethod
    def joined(cls, parts: Sequence[Scored]) -> Scored:
        """What it returned for several batches, one after the other."""
        partial = None
        if any(part.partial is not None for part in parts):
            partial = [steps for part in parts for steps in part.partial or [None] * len(part)]
        disagreement = None
        if all(part.disagreement is not None for part in parts):
            disagreement = [value for part in parts for value in part.disagreement or ()]
        return cls([value for part in parts for value in part], partial, disagreement)

    @property
    def at_the_end(self) -> list[float]:
        """[B] what is paid at the last token: the reward if it was one number, else 0, because
        `token_rewards` places it."""
        if self.partial is None:
            return list(self)
        rows = zip(self, self.partial, strict=True)
        return [total if steps is None else 0.0 for total, steps in rows]


@dataclass(slots=True)
class RewardTerm:
    """One reward under its name, with its weight in the sum."""

    name: str
    function: Reward
    weight: float = 1.0
    fingerprint: str = ""
    """Fingerprint of its file, its URL or its weights: another one means another reward."""
    is_named_function: bool = False
    """Whether it is a function that an option names, which is tried before a run."""


def score(
    term: RewardTerm,
    samples: Samples,
    failure_file: Path | None = None,
    options: CallOptions | None = None,
) -> Scored:
    """The term's rewards of all completions, unweighted.

    Raises:
        RewardError: the reward raised, was too late, returned the wrong number of values, or one
            that is not a number within ±`MAX_REWARD`. The sample at fault, or all of them, are
            written to `failure_file` first.
    """
    options = options or CallOptions()
    try:
        return score_term(term, samples, options)
    except TermError as error:
        rows = range(len(samples)) if error.row is None else [error.row]
        saved = save_failure(failure_file, error, samples.select(rows))
        raise RewardError(f"{error}{saved}") from error.__cause__


def score_term(term: RewardTerm, samples: Samples, options: CallOptions) -> Scored:
    """The term's rewards; raises TermError as `score` does, without a file."""
    timeout = None if getattr(type(term.function), "has_timeout", False) else options.timeout
    try:
        returned = call(lambda: _call(term.function, samples), timeout, ATTEMPTS)
    except UserCodeError as error:
        cause = error.__cause__
        if isinstance(cause, TermError):  # of a member of an ensemble: both names say where to look
            name = f"{term.name}/{cause.reward}"
            raise TermError(name, cause.sentence, cause.row) from cause.__cause__
        raise TermError(term.name, f"{error}{place_of(cause)}") from cause
    return _validated(term.name, returned, samples)


def _validated(name: str, returned: Any, samples: Samples) -> Scored:
    """What a reward returned, as numbers.

    Raises:
        TermError: it is not a list with one reward per sample.
    """
    if inspect.iscoroutine(returned):
        returned.close()  # which nobody awaits
        raise TermError(
            name, "returned a coroutine: expected a plain `def`, in which asyncio.run may await it"
        )
    disagreement = None
    if isinstance(returned, Scored):  # of an ensemble, or of a reward that calls `score` itself
        disagreement = returned.disagreement
        partials = returned.partial or [None] * len(returned)
        returned = [v if p is None else p for v, p in zip(returned, partials, strict=True)]
    count = len(samples)
    rewards = plain_values(returned)
    if not isinstance(rewards, (list, tuple)):
        raise TermError(
            name,
            f"returned {type(returned).__name__}; expected a list of {counted(count, 'float')}",
        )
    if len(rewards) != count:
        values = counted(len(rewards), "value")
        raise TermError(name, f"returned {values} for {counted(count, 'completion')}")
    totals: list[float] = []
    partial: list[Partial | None] = []
    for row, reward in enumerate(rewards):
        ids = samples.completion_ids
        tokens = None if ids is None else len(ids[row])
        try:
            total, steps = _read(reward, tokens, row)
        except ValueError as error:
            raise TermError(name, str(error), row) from None
        totals.append(total)
        partial.append(steps)
    has_parts = any(steps is not None for steps in partial)
    return Scored(totals, partial if has_parts else None, disagreement)


def plain_values(value: Any) -> Any:
    """Convert arrays, tensors and their scalars, also within lists, to Python lists and numbers."""
    if isinstance(value, (list, tuple)):
        kind = tuple if isinstance(value, tuple) else list
        return kind(plain_values(item) for item in value)
    return value.tolist() if hasattr(value, "tolist") else value


def _read(reward: Any, tokens: int | None, row: int) -> tuple[float, Partial | None]:
    """The total of one completion's reward, and its parts if it has any.

    Raises:
        ValueError: it has none of the three forms.
    """
    if not isinstance(reward, (list, tuple)):
        return _finite(reward, f"for completion {row}"), None
    steps = _parts(reward, tokens, row)
    numbers = (item[1] if isinstance(item, tuple) else item for item in steps)
    return _finite(sum(numbers), f"in total for completion {row}"), steps


def _parts(items: Sequence[Any], tokens: int | None, row: int) -> Partial:
    """One completion's rewards by token or by step; no steps at all are an empty list."""
    is_pair = [isinstance(item, (list, tuple)) for item in items]
    if any(is_pair) and not all(is_pair):
        raise ValueError(
            f"returned numbers beside (end, value) pairs for completion {row}; "
            "expected one or the other"
        )
    if any(is_pair):
        return [_step(item, row) for item in items]
    if items and tokens is not None and len(items) != tokens:
        raise ValueError(
            f"returned {len(items)} numbers for completion {row}, which has {tokens} response "
            "tokens; expected one per token, or (end, value) pairs"
        )
    return [_finite(x, f"for token {t} of completion {row}") for t, x in enumerate(items)]


def _step(item: Sequence[Any], row: int) -> tuple[int, float]:
    end = item[0] if len(item) == 2 else None
    if isinstance(end, bool) or not isinstance(end, int) or end < 1:
        raise ValueError(
            f"returned {describe(tuple(item))} for completion {row}; expected steps (end, value) "
            "with end the character offset where the step ends, a whole number from 1"
        )
    return end, _finite(item[1], f"for the step of completion {row} that ends at {end}")


def _finite(value: Any, where: str) -> float:
    if not isinstance(value, (int, float)) or not abs(value) <= MAX_REWARD:
        raise ValueError(
            f"returned {describe(value)} {where}; expected a number within ±{MAX_REWARD:g}"
        )
    return float(value)


def _call(function: Reward, samples: Samples) -> Any:
    """Calls the reward with what its signature has room for: copies, which it may change."""
    return _with_arguments(function, inspect.signature(function), samples)()


def _with_arguments(
    function: Callable[..., Any], signature: inspect.Signature, samples: Samples
) -> Callable[[], Any]:
    """A function with the arguments of a reward of this signature."""
    prompts = copy.deepcopy(list(samples.prompts))
    completions = list(samples.completions)
    parameters = signature.parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    positional = any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters)
    keywords: dict[str, Any] = {
        name: copy.deepcopy(list(column))
        for name, column in samples.columns.items()
        if takes_all or name in named
    }
    ids = samples.completion_ids
    if ids is not None and "completion_ids" in named:  # no column: `**columns` lacks it
        keywords["completion_ids"] = [list(row) for row in ids]
    if "completions" not in named and (named or positional):
        return functools.partial(function, prompts, completions, **keywords)
    if takes_all or "prompts" in named:
        keywords["prompts"] = prompts
    if takes_all or "completions" in named:
        keywords["completions"] = completions
    return functools.partial(function, **keywords)


def save_failure(path: Path | None, error: TermError, samples: Samples) -> str:
    """Writes samples that a reward failed on, and the traceback of what it raised; the end of a
    sentence that says where."""
    if path is None:
        return ""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "reward": error.reward,
        "reason": error.sentence,
        "traceback": traceback_of(error.__cause__),
        "prompts": list(samples.prompts),
        "completions": list(samples.completions),
        "columns": samples.columns,
    }
    write_whole(path, json.dumps(record, ensure_ascii=False, indent=2, default=str))
    return f" (samples saved to {path})"


# -------------------------------------------------------------------------------- before a run


EXPECTED = (
    "expected {name}(prompts, completions, **columns), which takes lists, completions of texts, "
    "and returns a list with a reward for each completion"
)
"""What a reward takes and returns."""

MADE_UP = "A made-up response, on which the reward is tried before the run."
"""What a reward is called on once before anything is loaded."""


def check_signature(
    name: str, signature: inspect.Signature, source: str, columns: Collection[str]
) -> None:
    """Checks that a reward of this signature can be called.

    Args:
        source: names the prompts in an error.
        columns: the prompts' columns, without the prompt's own.

    Raises:
        DataError: it needs a column that is not there.
        ValueError: it has no room for prompts or completions; the sentence says what is expected.
    """
    if lacking := lacking_columns(signature, columns):
        known = ", ".join(columns) or "none beside the prompt"
        raise DataError(
            f"reward {name} needs the column {lacking[0]!r}; the columns of {source} are: {known}"
        )
    expected = EXPECTED.format(name=name)
    if not signature.parameters:
        raise ValueError(f"reward {name} takes no arguments; {expected}")
    samples = Samples([None], [MADE_UP], {column: [None] for column in columns}, [[]])
    try:
        _with_arguments(signature.bind, signature, samples)()
    except TypeError as error:
        raise ValueError(f"reward {name} takes {signature}: {error}; {expected}") from None


def try_reward(
    term: RewardTerm,
    row: Mapping[str, Any],
    column: str,
    *,
    failure_file: Path | None = None,
    options: CallOptions | None = None,
) -> None:
    """Calls a reward once, on a prompt of the data with a made-up response.

    Args:
        row: of the data; column: that of its prompt.

    Raises:
        RewardError: as from `score`; it says that the response was made up.
    """
    columns = {name: [value] for name, value in row.items() if name != column}
    samples = Samples([row.get(column)], [MADE_UP], columns, [[0]])
    try:
        score(term, samples, failure_file, options)
    except RewardError as error:
        raise RewardError(
            f"{error}; it was called on a made-up response, before anything is loaded: "
            f"{EXPECTED.format(name=term.name)}"
        ) from error.__cause__


def lacking_columns(signature: inspect.Signature, columns: Collection[str]) -> list[str]:
    """Arguments that a reward requires and that are neither the prompts and completions nor one of
    the columns."""
    parameters = list(signature.parameters.values())
    names = [p.name for p in parameters]
    known = {"prompts", "completions", "completion_ids", *columns}
    if "completions" not in names:  # the first two are prompts and completions by any name
        known |= {p.name for p in parameters[:2] if p.kind is not p.KEYWORD_ONLY}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    return [name for name in required if name not in known]
