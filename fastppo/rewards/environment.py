"""Environments: responses of several turns, with what an environment answers between them.

An environment is a class, or whatever else makes objects when it is called. Each of them plays one
episode at a time, and the next one after it is reset:

    reset(prompt, **columns) -> str | messages | None  what the policy reads first; None: the prompt
    step(text) -> (observation, reward, done)          what it answers to a turn of the policy
    close()                                            at the end of the run, if there is such a one

They may be coroutines; then all episodes wait at once. `prompt` is as the dataset holds it, a text
or chat messages; of the columns `reset` gets those that it names, or all with `**columns`. `text`
is the turn without special tokens. The observation is a text, which a chat gets as a message of the
user, or chat messages; where `done` is true it is not looked at. The reward is paid at the last
token of the turn.

The tokens of a turn stay those that were drawn. In a chat, what stands between two turns is what
the tokenizer's template writes between an assistant's message and the next, less the stop token
that the policy drew itself.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.data.chat import (
    check_text,
    decode_completions,
    encode_prompt,
    is_chat,
    render_chat,
    token_ids,
)
from fastppo.data.prompts import Prompts
from fastppo.data.rows import DataError
from fastppo.data.world import World
from fastppo.functional.arguments import shown
from fastppo.rewards.patience import Patience, heartbeat
from fastppo.rewards.reward import MAX_REWARD, RewardError
from fastppo.rollout import FINISHED, OUT_OF_TURNS, TRUNCATED, Rollout, RolloutEngine, Sampling

MARK = "assistantturn"
"""Stands for an assistant's message where only what a template writes after it is wanted."""


class Answer(NamedTuple):
    """What an environment answers to a turn."""

    observation: Any
    reward: float
    done: bool


class Failure(NamedTuple):
    """Why it has no answer."""

    sentence: str


@dataclass(slots=True, eq=False)
class Episode:
    """One response as it grows; every rank has all of them."""

    prompt: Any
    """A text or messages; of a chat the messages so far."""
    prompt_ids: list[int]
    columns: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    """Of the response: turns, and what is between them."""
    written: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Of each token that the policy wrote."""
    drawn: dict[str, list[Tensor]] = field(default_factory=dict)
    """What the engine gave by token: sampler_logprobs, logprobs, values."""
    texts: list[str] = field(default_factory=list)
    """The turns."""
    finish_reason: str | None = None
    """None while it goes on."""
    is_lost: bool = False
    """Whether its environment could not be reset: it is dropped after a turn that nobody hears."""

    @property
    def conversation(self) -> list[int]:
        """Token ids: all that the policy reads."""
        return self.prompt_ids + self.tokens

    def drop(self) -> None:
        """Ends it without a reward, so that the sample is left out of the batch."""
        self.rewards[-1], self.finish_reason = math.nan, FINISHED

    def hear(self, gap: Sequence[int], room: int) -> None:
        """Takes up tokens that the policy did not write, as many as there is room for."""
        fitting = list(gap)[: max(0, room)]
        self.tokens += fitting
        self.written += [False] * len(fitting)


class OneTurn:
    """Responses to which nobody answers."""

    pays = False

    def play(
        self, prompts: Prompts, engine: RolloutEngine, sampling: Sampling
    ) -> tuple[Prompts, Rollout]:
        return prompts, engine.generate(prompts.token_ids, sampling)

    def close(self) -> None:
        """There is nothing to close."""


class Turns:
    """Plays the episodes of a batch of prompts, turn by turn, all of them at once.

    Args:
        make: called without arguments, makes an environment.
        tokenizer: the policy's.
        max_turns: of an episode.
        max_tokens: of a response, what the environment writes included; None is no limit.
        context: tokens that prompt and response may have; None is no limit.
        concurrency: environments at work at a time, where they are no coroutines.
        patience: `timeout` and `drop` for the steps of an environment.
        failure_file: where the episode goes in which one fails.
        world: of ranks, each of which has the environments of its own rows.
    """

    pays = True

    def __init__(
        self,
        make: Callable[[], Any],
        tokenizer: Any,
        *,
        max_turns: int,
        max_tokens: int | None = None,
        context: int | None = None,
        concurrency: int = 1,
        patience: Patience | None = None,
        failure_file: Path | None = None,
        world: World | None = None,
    ) -> None:
        self.make, self.tokenizer = make, tokenizer
        self.name = getattr(make, "__name__", type(make).__name__)
        self.max_turns, self.max_tokens, self.context = max_turns, max_tokens, context
        self.concurrency = concurrency
        self.patience = patience or Patience()
        self.failure_file = failure_file
        self.world = world or World()
        self.made: dict[int, Any] = {}
        self.loop: _Loop | None = None

    def play(
        self, prompts: Prompts, engine: RolloutEngine, sampling: Sampling
    ) -> tuple[Prompts, Rollout]:
        """The episodes as prompts and responses; `Rollout.rewards` has what they earned, NaN where
        the environment failed and the sample is to be dropped.

        Raises:
            RewardError: an environment raised, was too late, or returned what is no answer; its
                episode is written to `failure_file` first.
            DataError: an observation that the chat template has no place for.
        """
        episodes = self._opened(prompts, sampling.max_new_tokens)
        for turn in range(self.max_turns):
            live = [row for row, episode in enumerate(episodes) if episode.finish_reason is None]
            if not live:
                break
            conversations = [episodes[row].conversation for row in live]
            drawn = engine.generate(conversations, sampling)
            texts = decode_completions(self.tokenizer, conversations, drawn.tokens)
            for place, row in enumerate(live):
                _take_turn(episodes[row], texts[place], drawn, place)
                if episodes[row].is_lost:
                    episodes[row].drop()
            acting = [row for row in live if episodes[row].finish_reason is None]
            answers = self._ask(
                len(episodes),
                {row: ("step", (episodes[row].texts[-1],), {}) for row in acting},
                _answer,
            )
            self._check(answers, episodes, drop=self.patience.drop)
            for row in acting:
                self._take_answer(episodes[row], answers[row], sampling, turn + 1)
        return self._prompts(prompts, episodes), _rollout(episodes)

    def close(self) -> None:
        """Calls `close` of every environment that has one; what goes wrong there is said, and no
        more. Later episodes have new environments."""
        closing = [env for env in self.made.values() if callable(getattr(env, "close", None))]
        self.made = {}
        calls = [_Call(env.close, (), {}, lambda returned: None) for env in closing]
        with heartbeat(f"closing environment {self.name!r}", self.patience.say):
            failed = [found for found in self._run(calls) if isinstance(found, Failure)]
        if failed:
            self.patience.say(
                f"environment {self.name!r} {failed[0].sentence}; {len(failed)} of {len(closing)} "
                "were not closed"
            )

    # ------------------------------------------------------------------------------ the episodes

    def _opened(self, prompts: Prompts, max_new_tokens: int) -> list[Episode]:
        """Every episode after its reset."""
        columns = [
            {name: column[row] for name, column in prompts.columns.items()}
            for row in range(len(prompts))
        ]
        asked = {
            row: ("reset", (prompts.prompts[row],), columns[row]) for row in range(len(prompts))
        }
        episodes = [
            Episode(prompt, ids, of_row)
            for prompt, ids, of_row in zip(prompts.prompts, prompts.token_ids, columns, strict=True)
        ]
        first = self._ask(len(episodes), asked, _opening)
        self._check(first, episodes, drop=self.patience.drop)
        for row, episode in enumerate(episodes):
            if isinstance(first[row], Failure):
                episode.is_lost = True
            elif first[row] is not None:
                where = f"environment {self.name!r}, what reset returned"
                episode.prompt = first[row]
                episode.prompt_ids = encode_prompt(first[row], self.tokenizer, where)
            if len(episode.prompt_ids) + max_new_tokens > self._limit(episode):
                raise DataError(
                    f"environment {self.name!r}: an episode begins with {len(episode.prompt_ids)} "
                    f"tokens, which leave no room for a turn of {max_new_tokens}"
                )
            if is_chat(episode.prompt):
                episode.prompt = copy.deepcopy(list(episode.prompt))
        return episodes

    def _take_answer(
        self, episode: Episode, answer: Answer | Failure, sampling: Sampling, turns: int
    ) -> None:
        """Pays the turn, and goes on with what the environment wrote, or ends."""
        if isinstance(answer, Failure):
            episode.drop()
            return
        episode.rewards[-1] += answer.reward
        if answer.done:
            episode.finish_reason = FINISHED
            return
        # What comes next is read even where there is no further turn: its value is V_next.
        gap = self._gap(episode, answer.observation, sampling.stop_token_ids)
        limit = self._limit(episode)
        episode.hear(gap, limit - len(episode.conversation))
        if turns == self.max_turns:
            episode.finish_reason = OUT_OF_TURNS
        elif len(episode.conversation) + sampling.max_new_tokens > limit:
            episode.finish_reason = TRUNCATED

    def _limit(self, episode: Episode) -> int:
        """Tokens that prompt and response may have."""
        limits = [2**31] if self.context is None else [self.context]
        if self.max_tokens is not None:
            limits.append(len(episode.prompt_ids) + self.max_tokens)
        return min(limits)

    def _gap(self, episode: Episode, observation: Any, stop: Sequence[int]) -> list[int]:
        """Tokens between the policy's last one and its next turn."""
        where = f"environment {self.name!r}, an observation"
        if not is_chat(episode.prompt):
            if not isinstance(observation, str):
                raise DataError(
                    f"{where}: the prompt is a text, so it must be one too, got messages"
                )
            text = observation
        else:
            if isinstance(observation, str):
                observation = [{"role": "user", "content": observation}]
            marked = [*episode.prompt, {"role": "assistant", "content": MARK}, *observation]
            whole = render_chat(self.tokenizer, marked, where, add_generation_prompt=True)
            _, mark, text = whole.rpartition(MARK)
            if not mark:
                raise DataError(f"{where}: the chat template leaves out an assistant's message")
            ending = self.tokenizer.decode(episode.tokens[-1:])
            if episode.tokens[-1] in stop and text.lstrip().startswith(ending):
                text = text.lstrip().removeprefix(ending)
            spoken = {"role": "assistant", "content": episode.texts[-1]}
            episode.prompt = [*episode.prompt, spoken, *observation]
        check_text(text, where)
        gap = token_ids(self.tokenizer, text)
        if not gap:
            raise DataError(f"{where}: it has no tokens, and the policy would not know of it")
        return gap

    def _prompts(self, prompts: Prompts, episodes: Sequence[Episode]) -> Prompts:
        """The prompts as the policy read them; to rewards they are as the dataset has them."""
        return Prompts(prompts.prompts, [each.prompt_ids for each in episodes], prompts.columns)

    # -------------------------------------------------------------------------- the environments

    def _ask(
        self,
        count: int,
        calls: Mapping[int, tuple[str, tuple[Any, ...], dict[str, Any]]],
        read: Callable[[Any], Any],
    ) -> dict[int, Any]:
        """What the environments of these rows of `count` return, or a `Failure` of each. A rank
        asks its own, and every rank gets all."""
        own = self.world.own(count)
        mine = {row: call for row, call in calls.items() if row in own}

        def ask() -> dict[int, Any]:
            with heartbeat(f"waiting for environment {self.name!r}", self.patience.say):
                return dict(zip(mine, self._call_all(mine, read), strict=True))

        if self.world.size == 1:
            return ask()
        with torch.random.fork_rng(devices=[]):  # every rank must go on from the same state
            found = self.world.share(ask, "environment")
        return {row: answer for each in found for row, answer in sorted(each.items())}

    def _call_all(
        self,
        calls: Mapping[int, tuple[str, tuple[Any, ...], dict[str, Any]]],
        read: Callable[[Any], Any],
    ) -> list[Any]:
        bound = []
        for row, (method, given, columns) in calls.items():
            if row not in self.made:
                self.made[row] = self.make()
            function = getattr(self.made[row], method)
            bound.append(_Call(function, copy.deepcopy(given), _named(function, columns), read))
        return self._run(bound)

    def _run(self, bound: Sequence[_Call]) -> list[Any]:
        """What the calls give, or a `Failure` of each."""
        if any(inspect.iscoroutinefunction(call.function) for call in bound):
            self.loop = self.loop or _Loop()
            return self.loop.run([call.wait(self.patience.timeout) for call in bound])
        # With its own retries a reward is asked anew; an environment has moved on.
        patience = replace(self.patience, retries=0)
        if self.concurrency == 1:
            return [call.run(patience, self.name) for call in bound]
        with ThreadPoolExecutor(self.concurrency, "environment") as pool:
            return list(pool.map(lambda call: call.run(patience, self.name), bound))

    def _check(
        self, answers: Mapping[int, Any], episodes: Sequence[Episode], *, drop: bool
    ) -> None:
        """Raises RewardError, with the episode saved, where one failed and is not dropped."""
        failed = [row for row in sorted(answers) if isinstance(answers[row], Failure)]
        if not failed:
            return
        episode, sentence = episodes[failed[0]], answers[failed[0]].sentence
        where = self.world.first(lambda: self._save(episode, sentence))
        sentence = f"environment {self.name!r} {sentence}{where}"
        if not drop:
            raise RewardError(sentence)
        self.patience.say(f"{sentence}; {len(failed)} of {len(episodes)} samples dropped")

    def _save(self, episode: Episode, sentence: str) -> str:
        if self.failure_file is None:
            return ""
        self.failure_file.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "environment": self.name,
            "reason": sentence,
            "prompt": episode.prompt,
            "columns": episode.columns,
            "turns": episode.texts,
            "conversation": self.tokenizer.decode(episode.conversation),
        }
        text = json.dumps(record, ensure_ascii=False, indent=2, default=str)
        self.failure_file.write_text(text)
        return f" (episode saved to {self.failure_file})"


class _Call(NamedTuple):
    """One call of an environment."""

    function: Callable[..., Any]
    given: tuple[Any, ...]
    columns: dict[str, Any]
    read: Callable[[Any], Any]

    def run(self, patience: Patience, name: str) -> Any:
        try:
            return self.read(
                patience.call(name, lambda: self.function(*self.given, **self.columns))
            )
        except (Exception, SystemExit) as error:  # of whatever the environment does
            return self._failure(error)

    async def wait(self, timeout: float | None) -> Any:
        try:
            returned = self.function(*self.given, **self.columns)
            if inspect.isawaitable(returned):
                returned = await asyncio.wait_for(returned, timeout)
            return self.read(returned)
        except TimeoutError:
            return Failure(f"did not answer within {timeout:g} s ({self.function.__name__})")
        except (Exception, SystemExit) as error:  # of whatever the environment does
            return self._failure(error)

    def _failure(self, error: BaseException) -> Failure:
        if isinstance(error, _NoAnswerError):
            return Failure(str(error))
        return Failure(f"raised {error!r} in {self.function.__name__}")


class _NoAnswerError(ValueError):
    """What an environment returned is no answer."""


class _Loop:
    """An event loop in a thread of its own, so that it may be used where another one runs. It stays
    for the run: what environments hold, a connection say, belongs to it."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.thread = ThreadPoolExecutor(1, "environment")
        weakref.finalize(self, _close, self.runner, self.thread)

    def run(self, coroutines: Sequence[Any]) -> list[Any]:
        async def together() -> list[Any]:
            return await asyncio.gather(*coroutines)

        return self.thread.submit(lambda: self.runner.run(together())).result()


def _close(runner: asyncio.Runner, thread: ThreadPoolExecutor) -> None:
    thread.shutdown()
    runner.close()


def _named(function: Callable[..., Any], columns: dict[str, Any]) -> dict[str, Any]:
    """Copies of the columns that a function has a parameter for."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = {each.name for each in parameters}
    return copy.deepcopy({k: v for k, v in columns.items() if takes_all or k in names})


def _opening(returned: Any) -> Any:
    """What `reset` returned: None, a text or messages."""
    if returned is None or isinstance(returned, str) or is_chat(returned):
        return returned
    raise _NoAnswerError(
        f"returned {shown(returned)} in reset; expected a text, chat messages or None"
    )


def _answer(returned: Any) -> Answer:
    """What `step` returned, in its three parts."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        raise _NoAnswerError(
            f"returned {shown(returned)} in step; expected (observation, reward, done)"
        )
    observation, reward, done = returned
    reward, done = (each.item() if hasattr(each, "item") else each for each in (reward, done))
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


def _take_turn(episode: Episode, text: str, drawn: Rollout, place: int) -> None:
    """Takes up what the policy wrote; an episode whose turn was cut off is over."""
    tokens = drawn.tokens[place]
    episode.tokens += tokens
    episode.written += [True] * len(tokens)
    episode.rewards += [0.0] * len(tokens)
    episode.texts.append(text)
    for name in ("sampler_logprobs", "logprobs", "values"):
        found = getattr(drawn, name)
        if found is not None:
            episode.drawn.setdefault(name, []).append(found[place])
    if drawn.truncated[place]:
        episode.finish_reason = TRUNCATED


def _rollout(episodes: Sequence[Episode]) -> Rollout:
    """The episodes as responses. Values after those that were cut off are not told: they are of
    what the environment said last."""
    packed: dict[str, Any] = {
        name: [torch.cat(each.drawn[name]) for each in episodes]
        for name in ("sampler_logprobs", "logprobs", "values")
        if all(name in each.drawn for each in episodes)
    }
    return Rollout(
        [each.tokens for each in episodes],
        [each.finish_reason or OUT_OF_TURNS for each in episodes],
        written=[each.written for each in episodes],
        rewards=[each.rewards for each in episodes],
        **packed,
    )
