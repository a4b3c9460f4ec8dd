"""Call a reward and validate what it returns.

A reward is a callable

    reward(prompts, completions, **columns) -> list

`prompts` are the dataset's (strings, or lists of chat messages), `completions` are strings without
special tokens, and `columns` are the other columns of the dataset, each a list with one entry per
prompt. Parameters named `prompts` and `completions` are passed by keyword, otherwise the first two
arguments are positional. Without `**columns`, a function gets the columns that it names. A
parameter `completion_ids` gets the token ids of the responses, EOS included. An `async def` is
awaited. For each completion a reward returns

    a number                          the reward of the whole response
    a list with a number per token    a reward for each response token
    a list of (end, value) pairs      a reward for each step; `end` is the character offset in the
                                      completion just after the step
    None                              the reward does not apply, and counts as 0

A batch may mix all four. A reward gets copies and may modify them. Before the models are loaded,
each reward function named in the config is called once, on the first prompt with a made-up
response, so that a broken one fails within seconds.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastppo.activity import begin_stage
from fastppo.data.datasets import DataError
from fastppo.data.files import write_whole
from fastppo.data.prompts import Prompts
from fastppo.functional.scalars import counted, describe
from fastppo.plugins.calling import (
    CallOptions,
    UserCodeError,
    call,
    place_of,
    run_coroutine,
    traceback_of,
)
from fastppo.plugins.loading import Plugin

if TYPE_CHECKING:
    import torch

StepRewards = list[float] | list[tuple[int, float]]
"""Rewards within one completion: one number per response token, or (end, value) pairs."""

Reward = Callable[..., Sequence[float | StepRewards | None]]

MAX_REWARD = 1e15
"""Largest magnitude of a reward. Training runs in fp32: the value loss squares rewards, the
gradient norm squares the result, and both must stay below 1e38."""

ATTEMPTS = 3
"""Calls of a reward that exceeds its time limit."""

STRINGS = (
    "; completions are strings here, also for chats, where TRL passes lists of messages: use "
    'completion instead of completion[0]["content"]'
)
"""Hint for a reward that reads a completion as a list of messages."""

EXPECTED = (
    "(prompts, completions, **columns), which takes lists, completions as strings, and returns a "
    "list with one reward per completion"
)
"""Signature of a reward, for error messages."""


class RewardError(RuntimeError):
    """A reward or an environment raised, or returned something invalid."""


class AllFailedError(RewardError):
    """Every episode of a batch failed, so that none is left."""


class TermError(RewardError):
    """Error of one reward, at one row of the batch or, with None, at all of them."""

    def __init__(self, reward: str, sentence: str, row: int | None = None) -> None:
        super().__init__(f"reward {reward!r} {sentence}")
        self.reward = reward
        self.sentence = sentence
        self.row = row


@dataclass(frozen=True, slots=True)
class Samples:
    """B prompts with their completions, the input of rewards."""

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
        """Return a subset of the samples."""
        ids = self.completion_ids
        return Samples(
            [self.prompts[row] for row in rows],
            [self.completions[row] for row in rows],
            {name: [column[row] for row in rows] for name, column in self.columns.items()},
            None if ids is None else [ids[row] for row in rows],
        )


class Scored(list[float]):
    """Rewards of a batch: a list of one total per completion, with details.

    Args:
        totals: [B] reward units; NaN where the reward does not apply.
        steps: [B] rewards by token or step, None for a completion with one number. None if all
            completions have one number.
        disagreement: [B] population standard deviation across the members of an ensemble. None for
            other rewards.
    """

    def __init__(
        self,
        totals: Sequence[float],
        steps: Sequence[StepRewards | None] | None = None,
        disagreement: Sequence[float] | None = None,
    ) -> None:
        super().__init__(totals)
        self.steps = None if steps is None else list(steps)
        self.disagreement = None if disagreement is None else list(disagreement)

    @classmethod
    def joined(cls, parts: Sequence[Scored]) -> Scored:
        """Concatenate the rewards of several batches."""
        steps = None
        if any(part.steps is not None for part in parts):
            steps = [row for part in parts for row in part.steps or [None] * len(part)]
        disagreement = None
        if all(part.disagreement is not None for part in parts):
            disagreement = [value for part in parts for value in part.disagreement or ()]
        return cls([value for part in parts for value in part], steps, disagreement)

    def select(self, rows: Sequence[int]) -> Scored:
        """Return the rewards of the given completions, in that order."""
        return Scored(
            [self[row] for row in rows],
            None if self.steps is None else [self.steps[row] for row in rows],
            None if self.disagreement is None else [self.disagreement[row] for row in rows],
        )

    @property
    def or_none(self) -> list[float | None]:
        """[B] The totals, with None where the reward does not apply."""
        return [None if math.isnan(total) else total for total in self]

    @property
    def mean(self) -> float | None:
        """Mean over the completions to which the reward applies; None if there are none."""
        totals = [total for total in self if not math.isnan(total)]
        return sum(totals) / len(totals) if totals else None

    @property
    def at_last_token(self) -> list[float]:
        """[B] The part that is paid at the last token: the reward if it is one number, else 0."""
        steps_by_row = self.steps or [None] * len(self)
        return [
            total if steps is None and total is not None else 0.0
            for total, steps in zip(self.or_none, steps_by_row, strict=True)
        ]


class RewardWithWeights(ABC):
    """A reward that has weights, such as a model.

    Its config and tokenizer are read when it is made, and the weights by `load`, after all inputs
    of a run have been checked.
    """

    @abstractmethod
    def __call__(self, prompts: Sequence[Any], completions: Sequence[str]) -> Sequence[Any]:
        """Return a reward per completion."""

    @abstractmethod
    def load(self, device: torch.device | str) -> None:
        """Load the weights onto a device, unless they are loaded already."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a fingerprint of the weights; "" before they are loaded."""

    @abstractmethod
    def check(self, source: str, prompts: Prompts) -> None:
        """Check that prompts can be scored.

        Args:
            source: name of the prompts in error messages.

        Raises:
            DataError: a prompt cannot be scored.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTerm(Plugin):
    """A reward with its weight in the sum."""

    weight: float = 1.0
    is_named_function: bool = False
    """Whether an option names it as a function. Such a function is tried before the run."""

    def check(self, source: str, prompts: Prompts) -> None:
        """Check that the reward can be called on prompts with their columns.

        Args:
            source: name of the prompts in error messages.

        Raises:
            DataError: a required column is missing, or a prompt cannot be scored.
            ValueError: the signature has no room for prompts or completions.
        """
        signature = inspect.signature(self.function)
        columns = prompts.columns.keys()
        expected = f"expected {self.name}{EXPECTED}"
        if lacking := lacking_columns(signature, columns):
            known = ", ".join(columns) or "none besides the prompt"
            raise DataError(
                f"reward {self.name} needs the column {lacking[0]!r}; the columns of {source} are: "
                f"{known}"
            )
        samples = Samples([None], [""], {column: [None] for column in columns}, [[]])
        try:
            if not signature.parameters:
                raise TypeError("it has no parameters")
            _with_arguments(signature.bind, signature, samples)()
        except TypeError as error:
            raise ValueError(f"reward {self.name} takes {signature}: {error}; {expected}") from None
        if isinstance(self.function, RewardWithWeights):
            self.function.check(source, prompts)

    def loaded(self, device: torch.device | str) -> RewardTerm:
        """Return the reward with its weights, if it has any, on a device."""
        if not isinstance(self.function, RewardWithWeights):
            return self
        self.function.load(device)
        return replace(self, fingerprint=self.function.fingerprint())


def score(
    term: RewardTerm,
    samples: Samples,
    failure_file: Path | None = None,
    options: CallOptions | None = None,
) -> Scored:
    """Return the unweighted rewards of all completions.

    Args:
        failure_file: receives the invalid sample, or all of them, before an error is raised.

    Raises:
        RewardError: the reward raised, exceeded its time limit, or returned the wrong number of
            values or a value outside ±`MAX_REWARD`.
    """
    begin_stage(term.name)
    try:
        return score_term(term, samples, options or CallOptions())
    except TermError as error:
        rows = range(len(samples)) if error.row is None else [error.row]
        saved = _save_failure(failure_file, error, samples.select(rows))
        raise RewardError(f"{error}{saved}") from error.__cause__


def score_term(term: RewardTerm, samples: Samples, options: CallOptions) -> Scored:
    """Call a reward as `score` does, without saving a failure. Raises TermError."""
    timeout = None if getattr(type(term.function), "has_timeout", False) else options.timeout
    try:
        returned = call(lambda: _call(term.function, samples), timeout, ATTEMPTS)
    except UserCodeError as error:
        cause = error.__cause__
        if isinstance(cause, TermError):  # of a member of an ensemble
            name = f"{term.name}/{cause.reward}"
            raise TermError(name, cause.sentence, cause.row) from cause.__cause__
        hint = STRINGS if isinstance(cause, TypeError) and "string ind" in str(cause) else ""
        raise TermError(term.name, f"{error}{place_of(cause)}{hint}") from cause
    return _validated(term.name, returned, samples)


def _validated(name: str, returned: Any, samples: Samples) -> Scored:
    """Convert a reward's result to numbers. Raises TermError for an invalid one."""
    disagreement = None
    if isinstance(returned, Scored):  # of an ensemble, or a reward that calls `score`
        disagreement = returned.disagreement
        steps_by_row = returned.steps or [None] * len(returned)
        rows = zip(returned.or_none, steps_by_row, strict=True)
        returned = [total if steps is None else steps for total, steps in rows]
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
    all_steps: list[StepRewards | None] = []
    for row, reward in enumerate(rewards):
        ids = samples.completion_ids
        tokens = None if ids is None else len(ids[row])
        try:
            steps = None
            if isinstance(reward, (list, tuple)):
                steps = _read_steps(reward, tokens, row)
                total = sum(item[1] if isinstance(item, tuple) else item for item in steps)
                totals.append(_finite(total, f"in total for completion {row}"))
            elif reward is None:
                totals.append(math.nan)
            else:
                totals.append(_finite(reward, f"for completion {row}"))
        except ValueError as error:
            raise TermError(name, str(error), row) from None
        all_steps.append(steps)
    has_steps = any(steps is not None for steps in all_steps)
    return Scored(totals, all_steps if has_steps else None, disagreement)


def plain_values(value: Any) -> Any:
    """Convert arrays, tensors and their scalars, also within lists, to Python lists and numbers."""
    if isinstance(value, (list, tuple)):
        kind = tuple if isinstance(value, tuple) else list
        return kind(plain_values(item) for item in value)
    return value.tolist() if hasattr(value, "tolist") else value


def _read_steps(items: Sequence[Any], tokens: int | None, row: int) -> StepRewards:
    """Validate one completion's rewards by token or by step. Raises ValueError."""
    is_pair = [isinstance(item, (list, tuple)) for item in items]
    if any(is_pair) and not all(is_pair):
        raise ValueError(
            f"returned both numbers and (end, value) pairs for completion {row}; "
            "expected one or the other"
        )
    if any(is_pair):
        return [_read_step(item, row) for item in items]
    if items and tokens is not None and len(items) != tokens:
        raise ValueError(
            f"returned {len(items)} numbers for completion {row}, which has {tokens} response "
            "tokens; expected one per token, or (end, value) pairs"
        )
    return [_finite(x, f"for token {t} of completion {row}") for t, x in enumerate(items)]


def _read_step(item: Sequence[Any], row: int) -> tuple[int, float]:
    end = item[0] if len(item) == 2 else None
    if isinstance(end, bool) or not isinstance(end, int) or end < 1:
        raise ValueError(
            f"returned {describe(tuple(item))} for completion {row}; expected steps (end, value), "
            "end being the character offset just after the step, a whole number from 1"
        )
    return end, _finite(item[1], f"for the step of completion {row} that ends at {end}")


def _finite(value: Any, where: str) -> float:
    if not isinstance(value, (int, float)) or not abs(value) <= MAX_REWARD:
        raise ValueError(
            f"returned {describe(value)} {where}; expected a number within ±{MAX_REWARD:g}"
        )
    return float(value)


def _call(function: Reward, samples: Samples) -> Any:
    """Call a reward with the arguments of its signature, and await a coroutine."""
    returned = _with_arguments(function, inspect.signature(function), samples)()
    return run_coroutine(returned) if inspect.iscoroutine(returned) else returned


def _with_arguments(
    function: Callable[..., Any], signature: inspect.Signature, samples: Samples
) -> Callable[[], Any]:
    """Bind a function to the arguments of a reward with this signature, as copies."""
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
    if ids is not None and "completion_ids" in named:  # not a column, so not in `**columns`
        keywords["completion_ids"] = [list(row) for row in ids]
    if "completions" not in named and (named or positional):
        return functools.partial(function, prompts, completions, **keywords)
    if takes_all or "prompts" in named:
        keywords["prompts"] = prompts
    if takes_all or "completions" in named:
        keywords["completions"] = completions
    return functools.partial(function, **keywords)


def _save_failure(path: Path | None, error: TermError, samples: Samples) -> str:
    """Write the samples of an error as JSON. Return the end of its message."""
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


# ------------------------------------------------------------------------------------- signatures


def lacking_columns(signature: inspect.Signature, columns: Collection[str]) -> list[str]:
    """Return the required arguments that are not prompts, completions or columns."""
    parameters = list(signature.parameters.values())
    names = [p.name for p in parameters]
    known = {"prompts", "completions", "completion_ids", *columns}
    if "completions" not in names:  # then the first two may have any name
        known |= {p.name for p in parameters[:2] if p.kind is not p.KEYWORD_ONLY}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    return [name for name in required if name not in known]
