"""Responses of several turns, with what an environment answers between them.

For the interface of an environment see `fastppo.environments.pool`. `prompt` is the dataset's:
a text or chat messages; `text` is the turn without special tokens. An observation is a text
(in a chat, a user message) or chat messages; it is ignored when `done` is true. The reward is paid
at the last token of the turn.

The tokens of a turn stay those that were drawn. In a chat, what stands between two turns is what
the tokenizer's template writes between an assistant's message and the next, less the stop token
that the policy drew itself.

Environments whose turns are tool calls: `fastppo.environments.tools`. Agents that ask for turns by
HTTP: `fastppo.environments.agents`.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastppo.data.chat import (
    decode_completions,
    encode_prompt,
    is_chat,
    render_chat,
    token_ids,
)
from fastppo.data.files import write_whole
from fastppo.data.prompts import Prompts
from fastppo.data.rows import DataError
from fastppo.data.world import World
from fastppo.environments.agents import Agent, PolicyTurn
from fastppo.environments.pool import Answer, EnvironmentPool, Failure
from fastppo.environments.tools import ToolForm, Tools
from fastppo.rewards.calling import CallOptions
from fastppo.rewards.reward import RewardError
from fastppo.rollout import FINISHED, OUT_OF_TURNS, TRUNCATED, Rollout, RolloutEngine, Sampling

MARK = "assistantturn"
"""Stands for an assistant's message where only what a template writes after it is needed."""

POLICY = "policy"
"""The role of the policy's turns."""

ENVIRONMENT = "environment"
"""The role of an environment's texts; messages have their own."""

BY_TOKEN = ("sampler_logprobs", "logprobs", "values")
"""What an engine may return by token, beside the tokens."""


@dataclass(slots=True, eq=False)
class Episode:
    """One response as it grows; every rank has all of them."""

    prompt: Any
    """A text or messages; of a chat the messages so far."""
    prompt_ids: list[int]
    columns: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    """The response: its turns, and what is between them."""
    written: list[bool] = field(default_factory=list)
    """Whether the policy wrote each token."""
    rewards: list[float] = field(default_factory=list)
    """The reward paid at each token that the policy wrote."""
    by_token: dict[str, list[Tensor]] = field(default_factory=dict)
    """The engine's `BY_TOKEN`, a tensor for each turn."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Its entry of `Rollout.turns`."""
    calls: list[str] = field(default_factory=list)
    """Its entry of `Rollout.calls`."""
    finish_reason: str | None = None
    """None while it goes on."""
    version: int | None = None
    """Number of the weights that drew it."""

    @property
    def conversation(self) -> list[int]:
        """Token ids of all that the policy reads."""
        return self.prompt_ids + self.tokens

    @property
    def cut_off(self) -> PolicyTurn | None:
        """The policy's last turn, where it was cut off and no environment has read it."""
        last = self.turns[-1]
        if self.finish_reason != TRUNCATED or last["role"] != POLICY:
            return None
        written = len(list(itertools.takewhile(bool, reversed(self.written))))
        return PolicyTurn(last["text"], len(self.conversation) - written, written)

    def add_turn(self, text: str, rollout: Rollout, row: int) -> None:
        """Appends what the policy wrote; a turn that was cut off ends the episode."""
        tokens = rollout.tokens[row]
        self.tokens += tokens
        self.written += [True] * len(tokens)
        self.rewards += [0.0] * len(tokens)
        self.turns.append({"role": POLICY, "text": text, "reward": 0.0})
        for name in BY_TOKEN:
            values = getattr(rollout, name)
            if values is not None:
                self.by_token.setdefault(name, []).append(values[row])
        if rollout.versions is not None:
            self.version = rollout.versions[row]
        if rollout.truncated[row]:
            self.finish_reason = TRUNCATED

    def pay(self, reward: float) -> None:
        """Pays the policy's last turn, at its last token."""
        self.rewards[-1] += reward
        turn = next(turn for turn in reversed(self.turns) if turn["role"] == POLICY)
        turn["reward"] += reward

    def add_observation(self, ids: Sequence[int], limit: int) -> None:
        """Appends tokens that the policy did not write, as many as there is room for."""
        fitting = list(ids)[: max(0, limit - len(self.conversation))]
        self.tokens += fitting
        self.written += [False] * len(fitting)


class OneTurn:
    """Responses of one turn, without an environment."""

    has_rewards = False
    max_turns = 1

    def run(
        self, prompts: Prompts, engine: RolloutEngine, sampling: Sampling
    ) -> tuple[Prompts, Rollout]:
        return prompts, engine.generate(prompts.token_ids, sampling)

    def close(self) -> None:
        """Does nothing."""


class Turns:
    """Plays the episodes of a batch of prompts, turn by turn, all of them at once.

    Args:
        make: called without arguments, makes an environment.
        tokenizer: the policy's.
        max_turns: of an episode.
        context: tokens that prompt and response may have; None is no limit.
        options: of the calls of an environment.
        failure_file: where the episode of an environment that fails is written.
        world: the ranks, each of which has the environments of its own rows.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        tokenizer: Any,
        *,
        max_turns: int,
        context: int | None = None,
        options: CallOptions | None = None,
        failure_file: Path | None = None,
        world: World | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_turns = max_turns
        self.context = 2**31 if context is None else context
        self.options = options or CallOptions()
        self.failure_file = failure_file
        self.world = world or World()
        self.environments = EnvironmentPool(make, options=self.options, world=self.world)
        self.name = self.environments.name
        self.has_rewards = not isinstance(make, Tools) or make.has_rewards
        self.is_agent = isinstance(make, Agent)
        self.rewards_at_the_end = self.is_agent or isinstance(make, Tools)
        self.form: ToolForm | None = None
        if isinstance(make, Tools):
            where = f"environment {self.name!r}"
            self.form = ToolForm(tokenizer, make.schemas, where=where, say=self.options.say)

    def run(
        self, prompts: Prompts, engine: RolloutEngine, sampling: Sampling
    ) -> tuple[Prompts, Rollout]:
        """The episodes as prompts and responses. `Rollout.rewards` has what they earned.

        Raises:
            RewardError: an environment raised, was too late, or returned what is no answer; its
                episode is written to `failure_file` first.
            DataError: an observation that the chat template has no place for.
        """
        episodes = self._open(prompts, sampling.max_new_tokens)
        for turn in range(1, self.max_turns + 1):
            live = [row for row, episode in enumerate(episodes) if episode.finish_reason is None]
            if not live:
                break
            conversations = [episodes[row].conversation for row in live]
            drawn = engine.generate(conversations, sampling)
            texts = decode_completions(self.tokenizer, conversations, drawn.tokens)
            turns: dict[int, Any] = {}
            for place, row in enumerate(live):
                episodes[row].add_turn(texts[place], drawn, place)
                if episodes[row].finish_reason is None:
                    turns[row] = self._read(conversations[place], drawn.tokens[place], texts[place])
            answers = self._answered(self.environments.step(turns, len(episodes)), episodes)
            for row in turns:
                self._take_answer(
                    episodes[row], answers[row], sampling, is_last=turn == self.max_turns
                )
        if self.rewards_at_the_end:
            cut_off = [episode.cut_off for episode in episodes]
            earned = self._answered(self.environments.end(cut_off), episodes)
            for row, episode in enumerate(episodes):
                episode.pay(earned[row])
        # To rewards the prompts are as the dataset has them; their ids are what the policy read.
        ids = [episode.prompt_ids for episode in episodes]
        rollout = _rollout(episodes)
        if self.form is not None:
            rollout.calls = [episode.calls for episode in episodes]
        return Prompts(prompts.prompts, ids, prompts.columns), rollout

    def close(self) -> None:
        """Closes the environments; failures are only reported."""
        self.environments.close()

    def _open(self, prompts: Prompts, max_new_tokens: int) -> list[Episode]:
        """Every episode after its reset."""
        columns = [
            {name: column[row] for name, column in prompts.columns.items()}
            for row in range(len(prompts))
        ]
        rows = zip(prompts.prompts, prompts.token_ids, columns, strict=True)
        episodes = [Episode(prompt, ids, row_columns) for prompt, ids, row_columns in rows]
        openings = self._answered(self.environments.reset(prompts.prompts, columns), episodes)
        for row, episode in enumerate(episodes):
            opening = openings[row]
            if opening is not None:
                if self.form is not None:
                    opening = self.form.opening(opening)
                where = f"environment {self.name!r}, what reset returned"
                episode.prompt = opening
                episode.prompt_ids = encode_prompt(
                    opening, self.tokenizer, where, **self._template_options
                )
            episode.turns = as_turns(episode.prompt, "prompt" if opening is None else ENVIRONMENT)
            if len(episode.prompt_ids) + max_new_tokens > self.context:
                raise DataError(
                    f"environment {self.name!r}: an episode begins with {len(episode.prompt_ids)} "
                    f"tokens, which leave no room for a turn of {max_new_tokens}"
                )
            if is_chat(episode.prompt):
                episode.prompt = copy.deepcopy(list(episode.prompt))
        return episodes

    @property
    def _template_options(self) -> dict[str, Any]:
        """What the chat template is given beside the messages."""
        return {} if self.form is None else {"tools": self.form.schemas}

    def _read(self, conversation: list[int], ids: list[int], text: str) -> Any:
        """A turn of the policy as the environment takes it."""
        if self.is_agent:
            return PolicyTurn(text, len(conversation), len(ids))
        return text if self.form is None else self.form.read(conversation, ids, text)

    def _take_answer(
        self, episode: Episode, answer: Answer, sampling: Sampling, *, is_last: bool
    ) -> None:
        """Pays the turn, and appends the observation or ends the episode."""
        episode.pay(answer.reward)
        if answer.done:
            episode.finish_reason = FINISHED
            return
        # The observation is read even after the last turn: its value is V_next.
        ids = self._observation_ids(episode, answer.observation, sampling.stop_token_ids)
        episode.add_observation(ids, self.context)
        episode.turns += as_turns(answer.observation, ENVIRONMENT)
        if self.form is not None:
            episode.calls += [message["outcome"] for message in answer.observation]
        if is_last:
            episode.finish_reason = OUT_OF_TURNS
        elif len(episode.conversation) + sampling.max_new_tokens > self.context:
            episode.finish_reason = TRUNCATED

    def _observation_ids(
        self, episode: Episode, observation: Any, stop_token_ids: Sequence[int]
    ) -> list[int]:
        """Tokens between the policy's last one and its next turn."""
        where = f"environment {self.name!r}, an observation"
        if is_chat(episode.prompt):
            text = self._chat_text(episode, observation, stop_token_ids, where)
        elif isinstance(observation, str):
            text = observation
        else:
            raise DataError(f"{where}: the prompt is a text, so it must be one too, got messages")
        ids = token_ids(self.tokenizer, text)
        if not ids:
            raise DataError(f"{where}: it has no tokens, so the policy could not see it")
        return ids

    def _chat_text(
        self, episode: Episode, observation: Any, stop_token_ids: Sequence[int], where: str
    ) -> str:
        """What the chat template writes after the policy's last token, up to its next turn."""
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        mark = MARK
        while mark in str(observation):
            mark += MARK[-1]
        marked = [*episode.prompt, {"role": "assistant", "content": mark}, *observation]
        options = {"add_generation_prompt": True, **self._template_options}
        rendered = render_chat(self.tokenizer, marked, where, **options)
        _, found, text = rendered.rpartition(mark)
        if not found:
            raise DataError(f"{where}: the chat template leaves out an assistant's message")
        last_token = self.tokenizer.decode(episode.tokens[-1:])
        if episode.tokens[-1] in stop_token_ids and text.lstrip().startswith(last_token):
            text = text.lstrip().removeprefix(last_token)
        turn = {"role": "assistant", "content": episode.turns[-1]["text"]}
        episode.prompt = [*episode.prompt, turn, *observation]
        return text

    def _answered(
        self, answers: Mapping[int, Any], episodes: Sequence[Episode]
    ) -> Mapping[int, Any]:
        """The answers. Raises RewardError where an environment has none, with its episode saved."""
        failed = [row for row in sorted(answers) if isinstance(answers[row], Failure)]
        if not failed:
            return answers
        episode = episodes[failed[0]]
        failure: Failure = answers[failed[0]]
        saved = self.world.on_main_rank(lambda: self._save(episode, failure))
        raise RewardError(f"environment {self.name!r} {failure.sentence}{saved}")

    def _save(self, episode: Episode, failure: Failure) -> str:
        """Writes a failed episode; the end of a sentence that says where."""
        if self.failure_file is None:
            return ""
        self.failure_file.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "environment": self.name,
            "reason": failure.sentence,
            "traceback": failure.traceback,
            "prompt": episode.prompt,
            "columns": episode.columns,
            "turns": episode.turns,
            "conversation": self.tokenizer.decode(episode.conversation),
        }
        text = json.dumps(record, ensure_ascii=False, indent=2, default=str)
        write_whole(self.failure_file, text)
        return f" (episode saved to {self.failure_file})"


def as_turns(read: Any, role: str) -> list[dict[str, Any]]:
    """What the policy reads, a text of a role or messages, as turns."""
    if isinstance(read, str):
        return [{"role": role, "text": read}]
    return [{"role": message["role"], "text": message["content"]} for message in read]


def _rollout(episodes: Sequence[Episode]) -> Rollout:
    """The episodes as responses. There are no values after those that were cut off: they would be
    of the environment's last words."""
    by_token: dict[str, Any] = {
        name: [torch.cat(episode.by_token[name]) for episode in episodes]
        for name in BY_TOKEN
        if all(name in episode.by_token for episode in episodes)
    }
    versions = [episode.version for episode in episodes if episode.version is not None]
    return Rollout(
        [episode.tokens for episode in episodes],
        [episode.finish_reason or OUT_OF_TURNS for episode in episodes],
        written=[episode.written for episode in episodes],
        rewards=[episode.rewards for episode in episodes],
        turns=[episode.turns for episode in episodes],
        versions=versions or None,
        **by_token,
    )
