"""The environments of a process: made when they are needed, called, closed at the end.

An environment is a class, or any other callable that returns an object with

    reset(prompt, **columns) -> str | messages | None  what the policy reads first; None: the prompt
    step(text) -> (observation, reward, done)          the answer to a turn of the policy
    close()                                            optional, at the end of the run

Any of them may be a coroutine function; then all environments wait at once. Otherwise one works
after the other.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fastppo.data.chat import is_chat
from fastppo.data.world import World
from fastppo.environments.tools import is_tool_class
from fastppo.functional.scalars import describe
from fastppo.rewards.calling import (
    CallOptions,
    EventLoop,
    UserCodeError,
    call,
    place_of,
    traceback_of,
)
from fastppo.rewards.reading import METHODS, columns_for, signature_of
from fastppo.rewards.reward import MAX_REWARD, plain_number


class Answer(NamedTuple):
    """What an environment answers to a turn."""

    observation: Any
    reward: float
    done: bool


class Failure(NamedTuple):
    """Why an environment has no answer."""

    sentence: str
    traceback: str = ""
    """The traceback of what it raised."""


def _failure(error: UserCodeError, where: str) -> Failure:
    """The failure of a call that raised or was too late, with the user's line."""
    cause = error.__cause__
    return Failure(f"{error} {where}{place_of(cause)}", traceback_of(cause))


class EnvironmentPool:
    """Environments, one for each row of a batch; the next batch resets those that exist.

    Args:
        make: called without arguments, makes an environment.
        options: of their calls.
        world: the ranks, each of which has the environments of its own rows.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        options: CallOptions | None = None,
        world: World | None = None,
    ) -> None:
        self.make = make
        named = make.func if isinstance(make, functools.partial) else make
        self.name = getattr(named, "__name__", type(named).__name__)
        self.options = options or CallOptions()
        self.world = world or World()
        self._environments: dict[int, Any] = {}
        self._loop: EventLoop | None = None

    def reset(
        self, prompts: Sequence[Any], columns: Sequence[Mapping[str, Any]]
    ) -> dict[int, Any | Failure]:
        """By row, what each environment's `reset` returns: a text, messages or None.

        Args:
            columns: of each row; an environment gets those that its `reset` names.
        """

        def calls(rows: Sequence[int]) -> list[_Call]:
            return [
                self._call(row, "reset", prompts[row], read=_read_opening, columns=columns[row])
                for row in rows
            ]

        return self._on_its_rank(range(len(prompts)), len(prompts), calls)

    def step(self, turns: Mapping[int, Any], count: int) -> dict[int, Answer | Failure]:
        """By row, what the environments answer.

        Args:
            turns: texts, or `ToolTurn`s where the environments have tools, or `PolicyTurn`s where
                they are agents; by row of a batch of `count`.
        """

        def calls(rows: Sequence[int]) -> list[_Call]:
            return [self._call(row, "step", turns[row], read=_read_answer) for row in rows]

        return self._on_its_rank(list(turns), count, calls)

    def end(self, cut_off: Sequence[Any]) -> dict[int, float | Failure]:
        """By row, what environments that have `end` pay for the episode.

        Args:
            cut_off: of each row the policy's last turn, if it was cut off and not read.
        """

        def calls(rows: Sequence[int]) -> list[_Call]:
            return [
                _Call(
                    "get_reward",
                    functools.partial(self._environments[row].end, cut_off[row]),
                    _read_reward,
                )
                for row in rows
            ]

        return self._on_its_rank(range(len(cut_off)), len(cut_off), calls)

    def close(self) -> None:
        """Closes every environment that has a `close`; failures are only reported. Later batches
        have new environments."""
        calls: list[_Call] = []
        failures: list[Failure] = []
        with self.options.restoring(f"environment {self.name!r}"):
            for environment in self._environments.values():
                try:
                    close = call(functools.partial(getattr, environment, "close", None))
                except UserCodeError as error:  # of a property, or of `__getattr__`
                    failures.append(_failure(error, "in close"))
                    continue
                if callable(close):
                    calls.append(_Call("close", close, lambda returned: None))
            self._environments = {}
            results = self._run(calls)
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        count = len(failures) + len(calls)
        failures += [result for result in results if isinstance(result, Failure)]
        if failures:
            self.options.say(
                f"environment {self.name!r} {failures[0].sentence}; {len(failures)} of "
                f"{count} were not closed"
            )

    def _on_its_rank(
        self, rows: Sequence[int], count: int, calls: Callable[[Sequence[int]], list[_Call]]
    ) -> dict[int, Any]:
        """Results by row: each rank calls the environments of its own rows, and every rank gets all
        results, or those up to the first `Failure`, which ends the run."""
        own = self.world.local_rows(count)
        own_rows = [row for row in rows if row in own]

        def work() -> dict[int, Any]:
            with self.options.restoring(f"environment {self.name!r}"):
                failed = self._make(own_rows)
                if failed:
                    return failed
                results = self._run(calls(own_rows), until_one_fails=True)
                return dict(zip(own_rows, results, strict=False))

        shares = self.world.gather_results(work)
        return {row: result for share in shares for row, result in sorted(share.items())}

    def _make(self, rows: Sequence[int]) -> dict[int, Failure]:
        """Makes the environments of rows that have none, until one fails; of this one, why."""
        for row in rows:
            if row in self._environments:
                continue
            try:
                environment = call(self.make, self.options.timeout)
                lacking = call(functools.partial(_lacking, environment))
            except UserCodeError as error:
                return {row: _failure(error, "where it is made")}
            if lacking:
                hint = ""
                if is_tool_class(type(environment)):
                    hint = "; its methods are tools where the option names the class itself"
                return {row: Failure(f"has no method {lacking[0]}{hint}")}
            self._environments[row] = environment
        return {}

    def _call(
        self,
        row: int,
        method: str,
        argument: Any,
        *,
        read: Callable[[Any], Any],
        columns: Mapping[str, Any] | None = None,
    ) -> _Call:
        """The call of a method of a row's environment, with copies of what it is given."""
        function = getattr(self._environments[row], method)
        keywords = _named(function, columns or {})
        return _Call(method, functools.partial(function, copy.deepcopy(argument), **keywords), read)

    def _run(self, calls: Sequence[_Call], *, until_one_fails: bool = False) -> list[Any]:
        """What the calls return, or a `Failure` in the place of each that fails."""
        timeout = self.options.timeout
        if any(inspect.iscoroutinefunction(_unbound(one.function)) for one in calls):
            self._loop = self._loop or EventLoop()
            returned = self._loop.call([one.function for one in calls], timeout)
            if not self._loop.answers():  # a coroutine blocks it: the next calls get another
                self._loop = None
            return [one.result(value) for one, value in zip(calls, returned, strict=True)]
        results: list[Any] = []
        for one in calls:
            results.append(one.run(timeout))
            if until_one_fails and isinstance(results[-1], Failure):
                break  # each of the others might take as long
        return results


class _Call(NamedTuple):
    """One call of an environment's method."""

    method: str
    function: Callable[[], Any]
    read: Callable[[Any], Any]
    """Checks what was returned."""

    def run(self, timeout: float | None) -> Any:
        """Calls it; what was read, or a `Failure`."""
        try:
            returned = call(self.function, timeout)
        except UserCodeError as error:
            returned = error
        return self.result(returned)

    def result(self, returned: Any) -> Any:
        """What was read of what it returned, or a `Failure`; a `UserCodeError` is one."""
        if isinstance(returned, UserCodeError):
            return _failure(returned, f"in {self.method}")
        try:
            return self.read(returned)
        except _NoAnswerError as error:
            return Failure(str(error))


class _NoAnswerError(ValueError):
    """An environment returned something that is no answer."""


def _lacking(environment: Any) -> list[str]:
    """The methods that an environment does not have; a property of it may raise."""
    return [name for name in METHODS if not callable(getattr(environment, name, None))]


def _unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    return function.func if isinstance(function, functools.partial) else function


def _named(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the columns that a function has a parameter for."""
    signature = signature_of(function)
    return {} if signature is None else copy.deepcopy(columns_for(signature, columns))


def _read_opening(returned: Any) -> Any:
    """What `reset` returned: None, a text or messages."""
    if returned is None or isinstance(returned, str) or is_chat(returned):
        return returned
    raise _NoAnswerError(
        f"returned {describe(returned)} in reset; expected a text, chat messages or None"
    )


def _read_answer(returned: Any) -> Answer:
    """What `step` returned, in its three parts."""
    try:  # its methods may be the user's
        parts = call(lambda: list(returned) if isinstance(returned, (tuple, list)) else [])
    except UserCodeError as error:
        raise _NoAnswerError(
            f"returned {type(returned).__name__}, which {error} when read"
        ) from error
    if len(parts) != 3:
        raise _NoAnswerError(
            f"returned {describe(returned)} in step; expected (observation, reward, done)"
        )
    observation = parts[0]
    reward = _read_reward(parts[1], "step")
    done = _number(parts[2])
    if not isinstance(done, bool):
        raise _NoAnswerError(f"returned done={describe(done)} in step; expected a bool")
    if not done and not isinstance(observation, str) and not is_chat(observation):
        raise _NoAnswerError(
            f"returned the observation {describe(observation)} in step; expected a text or chat "
            "messages, since the episode goes on"
        )
    return Answer(observation, reward, done)


def _read_reward(returned: Any, method: str = "get_reward") -> float:
    """A reward that a method returned."""
    reward = _number(returned)
    if not isinstance(reward, (int, float)) or not abs(reward) <= MAX_REWARD:
        raise _NoAnswerError(
            f"returned the reward {describe(reward)} in {method}; expected a number within "
            f"±{MAX_REWARD:g}"
        )
    return float(reward)


def _number(value: Any) -> Any:
    """A scalar of an array or tensor, or one of a number's subclass, as a Python number."""
    try:
        return plain_number(call(lambda: value.item() if hasattr(value, "item") else value))
    except UserCodeError as error:
        raise _NoAnswerError(f"returned {type(value).__name__}, whose item {error}") from error
