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

import torch

from fastppo.data.chat import is_chat
from fastppo.data.world import World
from fastppo.functional.arguments import shown
from fastppo.rewards.calling import CallOptions, EventLoop, UserCodeError, call, call_coroutine
from fastppo.rewards.reward import MAX_REWARD


class Answer(NamedTuple):
    """What an environment answers to a turn."""

    observation: Any
    reward: float
    done: bool


class Failure(NamedTuple):
    """Why an environment has no answer."""

    sentence: str


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
        self.name = getattr(make, "__name__", type(make).__name__)
        self.options = options or CallOptions()
        self.world = world or World()
        self._environments: dict[int, Any] = {}
        self._loop: EventLoop | None = None

    def reset(
        self, prompts: Sequence[Any], columns: Sequence[Mapping[str, Any]]
    ) -> dict[int, Any | Failure]:
        """By row, what each environment's `reset` returns: a text, messages or None.

        Args:
            columns: of each row, of which an environment gets those that it names.
        """

        def calls(rows: Sequence[int]) -> list[_Call]:
            return [
                self._call(row, "reset", prompts[row], read=_read_opening, columns=columns[row])
                for row in rows
            ]

        return self._on_its_rank(range(len(prompts)), len(prompts), calls)

    def step(self, texts: Mapping[int, str], count: int) -> dict[int, Answer | Failure]:
        """By row, what the environments answer.

        Args:
            texts: the turns, by row of a batch of `count`.
        """

        def calls(rows: Sequence[int]) -> list[_Call]:
            return [self._call(row, "step", texts[row], read=_read_answer) for row in rows]

        return self._on_its_rank(list(texts), count, calls)

    def close(self) -> None:
        """Closes every environment that has a `close`; failures are only reported. Later batches
        have new environments."""
        closing = [
            environment
            for environment in self._environments.values()
            if callable(getattr(environment, "close", None))
        ]
        self._environments = {}
        calls = [
            _Call("close", environment.close, lambda returned: None) for environment in closing
        ]
        results = self._run(calls)
        failures = [result for result in results if isinstance(result, Failure)]
        if failures:
            self.options.say(
                f"environment {self.name!r} {failures[0].sentence}; {len(failures)} of "
                f"{len(closing)} were not closed"
            )

    def _on_its_rank(
        self, rows: Sequence[int], count: int, calls: Callable[[Sequence[int]], list[_Call]]
    ) -> dict[int, Any]:
        """Results by row: each rank calls the environments of its own rows, and every rank gets all
        results."""
        own = self.world.own(count)
        own_rows = [row for row in rows if row in own]

        def work() -> dict[int, Any]:
            return dict(zip(own_rows, self._run(calls(own_rows)), strict=True))

        if self.world.size == 1:
            return work()
        with torch.random.fork_rng(devices=[]):  # every rank must go on from the same state
            shares = self.world.share(work)
        return {row: result for share in shares for row, result in sorted(share.items())}

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
        if row not in self._environments:
            self._environments[row] = self.make()
        function = getattr(self._environments[row], method)
        keywords = _named(function, columns or {})
        return _Call(method, functools.partial(function, copy.deepcopy(argument), **keywords), read)

    def _run(self, calls: Sequence[_Call]) -> list[Any]:
        """What the calls return, or a `Failure` in the place of each that fails."""
        timeout = self.options.timeout
        if any(inspect.iscoroutinefunction(_unbound(one.function)) for one in calls):
            self._loop = self._loop or EventLoop()
            return self._loop.run([one.wait(timeout) for one in calls])
        return [one.run(timeout) for one in calls]


class _Call(NamedTuple):
    """One call of an environment's method."""

    method: str
    function: Callable[[], Any]
    read: Callable[[Any], Any]
    """Checks what was returned."""

    def run(self, timeout: float | None) -> Any:
        try:
            return self.read(call(self.function, timeout))
        except UserCodeError as error:
            return Failure(f"{error} in {self.method}")
        except _NoAnswerError as error:
            return Failure(str(error))

    async def wait(self, timeout: float | None) -> Any:
        try:
            return self.read(await call_coroutine(self.function, timeout))
        except UserCodeError as error:
            return Failure(f"{error} in {self.method}")
        except _NoAnswerError as error:
            return Failure(str(error))


class _NoAnswerError(ValueError):
    """An environment returned something that is no answer."""


def _unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    return function.func if isinstance(function, functools.partial) else function


def _named(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the columns that a function has a parameter for."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    return copy.deepcopy({k: v for k, v in columns.items() if takes_all or k in names})


def _read_opening(returned: Any) -> Any:
    """What `reset` returned: None, a text or messages."""
    if returned is None or isinstance(returned, str) or is_chat(returned):
        return returned
    raise _NoAnswerError(
        f"returned {shown(returned)} in reset; expected a text, chat messages or None"
    )


def _read_answer(returned: Any) -> Answer:
    """What `step` returned, in its three parts."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        raise _NoAnswerError(
            f"returned {shown(returned)} in step; expected (observation, reward, done)"
        )
    observation = returned[0]
    reward = _number(returned[1])
    done = _number(returned[2])
    if not isinstance(reward, (int, float)) or not abs(reward) <= MAX_REWARD:
        raise _NoAnswerError(
            f"returned the reward {shown(reward)} in step; expected a number within ±{MAX_REWARD:g}"
        )
    if not isinstance(done, bool):
        raise _NoAnswerError(f"returned done={shown(done)} in step; expected a bool")
    if not done and not isinstance(observation, str) and not is_chat(observation):
        raise _NoAnswerError(
            f"returned the observation {shown(observation)} in step; expected a text or chat "
            "messages, since the episode goes on"
        )
    return Answer(observation, float(reward), done)


def _number(value: Any) -> Any:
    """A scalar of an array or tensor as a Python number."""
    return value.item() if hasattr(value, "item") else value
