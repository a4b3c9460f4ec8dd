"""The environments of a process.

An environment is a class, or any other callable, that returns an object with

    reset(prompt, **columns) -> str | messages | None  the first observation; None means the prompt
    step(text) -> (observation, reward, done)          the answer to a turn of the policy
    close()                                            optional, called at the end of the run

`step` may return a dict as a fourth value: `invalid`, whether the action was invalid, `success`,
whether the episode has reached its goal, or `outcome`, a text in place of success and failure.

If any method is a coroutine function, all environments run concurrently. Otherwise they run one
after the other.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fastppo.data.chat import is_chat
from fastppo.data.world import World
from fastppo.environments.maker import Conversation, EnvironmentMaker, StepInfo
from fastppo.environments.tools import is_tool_class
from fastppo.functional.scalars import describe
from fastppo.plugins.calling import (
    CallOptions,
    EventLoop,
    UserCodeError,
    call,
    keywords_for,
    place_of,
    traceback_of,
)
from fastppo.rewards.reward import MAX_REWARD, plain_values
from fastppo.rollout import FAILURE, SUCCESS

logger = logging.getLogger(__name__)


class Answer(NamedTuple):
    """The answer of an environment to a turn."""

    observation: Any
    reward: float
    done: bool
    info: StepInfo = StepInfo()


class Failure(NamedTuple):
    """The error of an environment, in place of its answer."""

    sentence: str
    traceback: str = ""
    """Traceback of the exception that the environment raised."""


class EnvironmentPool:
    """One environment per row of a batch. The next batch resets and reuses them.

    Args:
        make: makes an environment.
        options: options of calls to the environments.
        world: the ranks. Each holds the environments of its local rows.
        drops: whether a failed environment is replaced by a new one. Otherwise the first failure
            ends the run, so that later rows are not called.
    """

    def __init__(
        self,
        make: EnvironmentMaker,
        *,
        options: CallOptions | None = None,
        world: World | None = None,
        drops: bool = False,
    ) -> None:
        self.make = make
        self.drops = drops
        self.name = make.__name__
        self.options = options or CallOptions()
        self.world = world or World()
        self._environments: dict[int, Any] = {}
        self._loop: EventLoop | None = None

    def reset(
        self, prompts: Sequence[Any], columns: Sequence[Mapping[str, Any]]
    ) -> dict[int, Any | Failure]:
        """Reset every environment.

        Args:
            columns: of each row. An environment gets the columns that its `reset` names.

        Returns:
            dict: by row, the first observation: a text, chat messages or None.
        """

        def calls(rows: Sequence[int]) -> list[_Call]:
            return [
                self._call(row, "reset", prompts[row], read=_read_opening, columns=columns[row])
                for row in rows
            ]

        return self._on_its_rank(range(len(prompts)), len(prompts), calls)

    def step(self, turns: Mapping[int, Any], count: int) -> dict[int, Answer | Failure]:
        """Step the environments of unfinished episodes.

        Args:
            turns: by row, a turn as `TurnFormat.parse` returned it.
            count: rows of the batch.
        """

        def calls(rows: Sequence[int]) -> list[_Call]:
            return [self._call(row, "step", turns[row], read=_read_answer) for row in rows]

        return self._on_its_rank(list(turns), count, calls)

    def end(self, cut_off: Mapping[int, Any], count: int) -> dict[int, float | Failure]:
        """End the episodes of environments with a method `end` (tools and agents).

        Args:
            cut_off: by row, the policy's last turn if it was truncated, else None.
            count: rows of the batch.

        Returns:
            dict: by row, the reward of the episode.
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

        return self._on_its_rank(list(cut_off), count, calls)

    def close(self) -> None:
        """Close all environments and report errors as a message. Later batches create new ones."""
        failures, count = self._close(list(self._environments))
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        if failures:
            logger.info(
                f"environment {self.name!r} {failures[0].sentence}; {len(failures)} of "
                f"{count} were not closed"
            )

    def _close(self, rows: Sequence[int]) -> tuple[list[Failure], int]:
        """Forget environments, and close those that can be closed.

        Returns:
            (failures, number of calls).
        """
        methods = [getattr(self._environments.pop(row), "close", None) for row in rows]
        calls = [_Call("close", close, lambda returned: None) for close in methods if close]
        return [result for result in self._run(calls) if isinstance(result, Failure)], len(calls)

    def _on_its_rank(
        self, rows: Sequence[int], count: int, calls: Callable[[Sequence[int]], list[_Call]]
    ) -> dict[int, Any]:
        """Run calls on the rank of each row and gather all results by row.

        Unless failures are dropped, a failed row ends the run, so the rows after it may have no
        result.
        """
        own = self.world.local_rows(count)
        own_rows = [row for row in rows if row in own]

        def work() -> dict[int, Any]:
            results: dict[int, Any] = dict(self._make(own_rows))
            if results and not self.drops:
                return results
            made = [row for row in own_rows if row not in results]
            returned = self._run(calls(made), until_one_fails=not self.drops)
            results |= dict(zip(made, returned, strict=False))
            failed = [row for row in made if isinstance(results.get(row), Failure)]
            if self.drops and failed:
                self._close(failed)  # whether this fails too does not matter
            return results

        shares = self.world.gather_results(work)
        return {row: result for share in shares for row, result in sorted(share.items())}

    def _make(self, rows: Sequence[int]) -> dict[int, Failure]:
        """Create the missing environments. Return failures by row, unless they are dropped one."""
        failures: dict[int, Failure] = {}
        for row in rows:
            if failures and not self.drops:
                break
            if row in self._environments:
                continue
            try:
                environment = call(self.make, self.options.timeout)
            except UserCodeError as error:
                failures[row] = _failure(error, "where it is made")
                continue
            missing = [
                method
                for method in ("reset", "step")
                if not callable(getattr(environment, method, None))
            ]
            if missing:
                hint = ""
                if is_tool_class(type(environment)):
                    hint = "; to use its methods as tools, the option must name the class"
                failures[row] = Failure(f"has no method {missing[0]}{hint}")
                continue
            self._environments[row] = environment
        return failures

    def _call(
        self,
        row: int,
        method: str,
        argument: Any,
        *,
        read: Callable[[Any], Any],
        columns: Mapping[str, Any] | None = None,
    ) -> _Call:
        """Bind a method of a row's environment to copies of its arguments."""
        function = getattr(self._environments[row], method)
        keywords = keywords_for(function, columns or {})
        return _Call(method, functools.partial(function, copy.deepcopy(argument), **keywords), read)

    def _run(self, calls: Sequence[_Call], *, until_one_fails: bool = False) -> list[Any]:
        """Return each call's result or `Failure`."""
        timeout = self.options.timeout
        functions = [
            one.function.func if isinstance(one.function, functools.partial) else one.function
            for one in calls
        ]
        if any(map(inspect.iscoroutinefunction, functions)):
            self._loop = self._loop or EventLoop()
            returned = self._loop.call([one.function for one in calls], timeout)
            return [one.result(value) for one, value in zip(calls, returned, strict=True)]
        results: list[Any] = []
        for one in calls:
            try:
                value = call(one.function, timeout)
            except UserCodeError as error:
                value = error
            results.append(one.result(value))
            if until_one_fails and isinstance(results[-1], Failure):
                break  # each of the others might take as long
        return results


class _Call(NamedTuple):
    """A call to a method of an environment."""

    method: str
    function: Callable[[], Any]
    read: Callable[[Any], Any]
    """Validates the result; raises ValueError."""

    def result(self, returned: Any) -> Any:
        """Validate what the method returned, or describe its `UserCodeError`, as a `Failure`."""
        if isinstance(returned, UserCodeError):
            return _failure(returned, f"in {self.method}")
        try:
            return self.read(returned)
        except ValueError as error:
            return Failure(str(error))


def as_opening(text: str, prompt: Any) -> Any:
    """Return a first observation in the form of the prompt: a text, or a chat.

    A chat keeps the prompt's system messages.
    """
    if not is_chat(prompt):
        return text
    system = [message for message in prompt if message["role"] == "system"]
    return [*system, {"role": "user", "content": text}]


def _failure(error: UserCodeError, where: str) -> Failure:
    cause = error.__cause__
    return Failure(f"{error} {where}{place_of(cause)}", traceback_of(cause))


def _read_opening(returned: Any) -> Any:
    """Validate the result of `reset`."""
    if returned is None or isinstance(returned, (str, Conversation)) or is_chat(returned):
        return returned
    raise ValueError(
        f"returned {describe(returned)} in reset; expected a text, chat messages or None"
    )


def _read_answer(returned: Any) -> Answer:
    """Validate the result of `step`."""
    if not isinstance(returned, (tuple, list)) or len(returned) not in (3, 4):
        raise ValueError(
            f"returned {describe(returned)} in step; expected (observation, reward, done), and "
            "perhaps a dict"
        )
    observation = returned[0]
    reward = _read_reward(returned[1], "step")
    done = plain_values(returned[2])
    if not isinstance(done, bool):
        raise ValueError(f"returned done={describe(done)} in step; expected a bool")
    if not done and not isinstance(observation, (str, Conversation)) and not is_chat(observation):
        raise ValueError(
            f"returned the observation {describe(observation)} in step; expected a text or chat "
            "messages, because the episode is not done"
        )
    return Answer(observation, reward, done, _read_info(*returned[3:]))


def _read_info(info: Any = None) -> StepInfo:
    """Validate the fourth value of `step`. Other keys than ours are left to the environment."""
    if info is None:
        return StepInfo()
    if not isinstance(info, Mapping):
        raise ValueError(f"returned {describe(info)} in step; expected a dict as the fourth value")
    flags = {key: plain_values(info.get(key)) for key in ("invalid", "success")}
    for key, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"returned {key}={describe(value)} in step; expected a bool")
    outcome = info.get("outcome")
    if flags["success"] is not None:
        outcome = outcome or (SUCCESS if flags["success"] else FAILURE)
    if outcome is not None and not isinstance(outcome, str):
        raise ValueError(f"returned outcome={describe(outcome)} in step; expected a text")
    return StepInfo(flags["invalid"], outcome)


def _read_reward(returned: Any, method: str = "get_reward") -> float:
    """Validate a reward."""
    reward = plain_values(returned)
    if not isinstance(reward, (int, float)) or not abs(reward) <= MAX_REWARD:
        raise ValueError(
            f"returned the reward {describe(reward)} in {method}; expected a number within "
            f"±{MAX_REWARD:g}"
        )
    return float(reward)
