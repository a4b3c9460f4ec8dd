"""Multi-turn episodes with an environment.

`fastppo.environments.pool` defines the interface of an environment. `prompt` is the dataset's text
or chat messages. `text` is the turn without special tokens. An observation is a text (a user
message in a chat) or chat messages, ignored if `done` is true. The reward goes to the last token of
the turn.

Sampled tokens are never re-encoded. In a chat, the tokens between two turns are what the chat
template writes between an assistant's message and the next turn, without the stop token if the
policy sampled it.

For environments with tools see `fastppo.environments.tools`, for agents that request turns by HTTP
`fastppo.environments.agents`.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastppo.activity import begin_stage
from fastppo.data.chat import (
    decode_completions,
    encodable,
    encode_prompt,
    is_chat,
    render_chat,
    text_of,
    token_ids,
)
from fastppo.data.datasets import DataError
from fastppo.data.files import write_whole
from fastppo.data.prompts import Prompts
from fastppo.data.world import World
from fastppo.environments.loading import as_maker
from fastppo.environments.maker import PolicyTurn
from fastppo.environments.pool import Answer, EnvironmentPool, Failure, as_opening
from fastppo.plugins.calling import CallOptions
from fastppo.rewards.reward import RewardError
from fastppo.rollout import FINISHED, OUT_OF_TURNS, TRUNCATED, Rollout, RolloutEngine, Sampling

PLACEHOLDER = "assistantturn"
"""Assistant message that marks its place in a rendered chat."""

POLICY = "policy"
"""Role of the policy's turns."""

ENVIRONMENT = "environment"
"""Role of an environment's texts. Chat messages have their own roles."""

BY_TOKEN = ("sampler_logprobs", "logprobs", "values")
"""Optional fields of an engine's rollout with one value per token."""


@dataclass(slots=True, eq=False)
class Episode:
    """A response in progress. Every rank has all of them."""

    prompt: Any
    """The text, or the messages of the chat so far."""
    prompt_ids: list[int]
    columns: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    """The response: turns and observations."""
    response_mask: list[bool] = field(default_factory=list)
    """Whether the policy wrote each token."""
    rewards: list[float] = field(default_factory=list)
    """Reward of each token that the policy wrote."""
    by_token: dict[str, list[Tensor]] = field(default_factory=dict)
    """The engine's `BY_TOKEN`, one tensor per turn."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Entry of `Rollout.turns`."""
    calls: list[str] = field(default_factory=list)
    """Entry of `Rollout.calls`."""
    finish_reason: str | None = None
    """None while the episode continues."""
    version: int | None = None
    """Version of the sampler's weights."""

    @property
    def conversation(self) -> list[int]:
        """Token ids of the whole context."""
        return self.prompt_ids + self.tokens

    @property
    def cut_off(self) -> PolicyTurn | None:
        """The policy's last turn if it was truncated, which the environment has not read."""
        last = self.turns[-1]
        if self.finish_reason != TRUNCATED or last["role"] != POLICY:
            return None
        generated = len(list(itertools.takewhile(bool, reversed(self.response_mask))))
        return PolicyTurn(last["text"], len(self.conversation) - generated, generated)

    def add_turn(self, text: str, rollout: Rollout, row: int) -> None:
        """Append a turn of the policy. A truncated turn ends the episode."""
        tokens = rollout.tokens[row]
        self.tokens += tokens
        self.response_mask += [True] * len(tokens)
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

    def add_reward(self, reward: float) -> None:
        """Add a reward to the last token of the policy's last turn."""
        self.rewards[-1] += reward
        turn = next(turn for turn in reversed(self.turns) if turn["role"] == POLICY)
        turn["reward"] += reward

    def add_observation(self, ids: Sequence[int], limit: int) -> None:
        """Append tokens of an observation, up to the limit of the context."""
        fitting = list(ids)[: max(0, limit - len(self.conversation))]
        self.tokens += fitting
        self.response_mask += [False] * len(fitting)


class Turns:
    """Run the episodes of a batch of prompts in parallel, turn by turn.

    Args:
        make: an `EnvironmentMaker`, or a user's class or function.
        tokenizer: the policy's.
        max_turns: maximum number of turns per episode.
        context: maximum number of tokens of prompt and response. None means no limit.
        options: options of calls to the environments.
        failure_file: receives the episode of a failed environment.
        world: the ranks. Each holds the environments of its local rows.
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
        self.make = as_maker(make)
        self.environments = EnvironmentPool(self.make, options=self.options, world=self.world)
        self.name = self.make.__name__
        self.has_rewards = self.make.has_rewards
        self.format = self.make.turn_format(tokenizer)

    def run(
        self, prompts: Prompts, engine: RolloutEngine, sampling: Sampling
    ) -> tuple[Prompts, Rollout]:
        """Run an episode for each prompt.

        Returns:
            the prompts, with the first observations as token ids, and the responses. The rewards of
            the environments are in `Rollout.rewards`.

        Raises:
            RewardError: an environment raised, exceeded its time limit, or returned an invalid
                answer, or one that the chat template does not accept. Its episode is written to
                `failure_file` first.
        """
        with engine.conversations():
            return self._run(prompts, engine, sampling)

    def _run(
        self, prompts: Prompts, engine: RolloutEngine, sampling: Sampling
    ) -> tuple[Prompts, Rollout]:
        episodes = self._open(prompts, sampling.max_new_tokens)
        for turn in range(1, self.max_turns + 1):
            live = [row for row, episode in enumerate(episodes) if episode.finish_reason is None]
            if not live:
                break
            begin_stage(f"turn {turn}")
            conversations = [episodes[row].conversation for row in live]
            sampled = engine.generate(conversations, sampling).with_tokens()
            texts = decode_completions(self.tokenizer, conversations, sampled.tokens)
            turns: dict[int, Any] = {}
            for place, row in enumerate(live):
                episodes[row].add_turn(texts[place], sampled, place)
                if episodes[row].finish_reason is None:
                    turns[row] = self.format.parse(
                        conversations[place], sampled.tokens[place], texts[place]
                    )
            answers = self._checked(self.environments.step(turns, len(episodes)), episodes)
            for row in turns:
                self._take_answer(
                    episodes[row], answers[row], sampling, is_last=turn == self.max_turns
                )
        if self.make.has_end:
            cut_off = [episode.cut_off for episode in episodes]
            final_rewards = self._checked(self.environments.end(cut_off), episodes)
            for row, episode in enumerate(episodes):
                episode.add_reward(final_rewards[row])
        # Rewards get the dataset's prompts. The token ids include the first observations.
        ids = [episode.prompt_ids for episode in episodes]
        rollout = _rollout(episodes)
        if self.format.has_calls:
            rollout.calls = [episode.calls for episode in episodes]
        return Prompts(prompts.prompts, ids, prompts.columns), rollout

    def close(self) -> None:
        """Close the environments. Errors are reported as messages."""
        self.environments.close()

    def _open(self, prompts: Prompts, max_new_tokens: int) -> list[Episode]:
        """Reset the environments and return the new episodes."""
        columns = [
            {name: column[row] for name, column in prompts.columns.items()}
            for row in range(len(prompts))
        ]
        rows = zip(prompts.prompts, prompts.token_ids, columns, strict=True)
        episodes = [Episode(prompt, ids, row_columns) for prompt, ids, row_columns in rows]
        openings = self._checked(self.environments.reset(prompts.prompts, columns), episodes)
        for row, episode in enumerate(episodes):
            with self._saving(episode):
                self._begin(episode, openings[row], max_new_tokens)
        return episodes

    def _begin(self, episode: Episode, opening: Any, max_new_tokens: int) -> None:
        """Begin an episode with what `reset` returned."""
        where = f"environment {self.name!r}, what reset returned"
        if isinstance(opening, str):
            if not opening.strip():
                raise DataError(f"{where}: the prompt is empty")
            opening = as_opening(encodable(opening), episode.prompt)
        elif opening is not None:
            opening = [{**m, "content": encodable(m["content"])} for m in opening]
        if opening is not None:
            opening = self.format.opening(opening)
            episode.prompt = opening
            episode.prompt_ids = encode_prompt(
                opening, self.tokenizer, where, **self.format.template_options
            )
        episode.turns = as_turns(episode.prompt, "prompt" if opening is None else ENVIRONMENT)
        if len(episode.prompt_ids) + max_new_tokens > self.context:
            raise DataError(
                f"environment {self.name!r}: an episode begins with {len(episode.prompt_ids)} "
                f"tokens, which leave no room for a turn of {max_new_tokens}"
            )
        if is_chat(episode.prompt):
            episode.prompt = copy.deepcopy(list(episode.prompt))

    def _take_answer(
        self, episode: Episode, answer: Answer, sampling: Sampling, *, is_last: bool
    ) -> None:
        """Add the reward, and append the observation or end the episode."""
        episode.add_reward(answer.reward)
        if answer.done:
            episode.finish_reason = FINISHED
            return
        # Also after the last turn: V_next is the value at the observation.
        with self._saving(episode):
            ids = self._observation_ids(episode, answer.observation, sampling.stop_token_ids)
        episode.add_observation(ids, self.context)
        episode.turns += as_turns(answer.observation, ENVIRONMENT)
        episode.calls += self.format.outcomes(answer.observation)
        if is_last:
            episode.finish_reason = OUT_OF_TURNS
        elif len(episode.conversation) + sampling.max_new_tokens > self.context:
            episode.finish_reason = TRUNCATED

    def _observation_ids(
        self, episode: Episode, observation: Any, stop_token_ids: Sequence[int]
    ) -> list[int]:
        """Return the tokens between the policy's last token and its next turn."""
        where = f"environment {self.name!r}, an observation"
        if is_chat(episode.prompt):
            text = self._chat_text(episode, observation, stop_token_ids, where)
        elif isinstance(observation, str):
            text = observation
        else:
            raise DataError(f"{where}: it must be a text because the prompt is one, got messages")
        ids = token_ids(self.tokenizer, encodable(text))
        if not ids:
            raise DataError(f"{where}: it has no tokens")
        return ids

    def _chat_text(
        self, episode: Episode, observation: Any, stop_token_ids: Sequence[int], where: str
    ) -> str:
        """Return the chat template's text between the policy's last token and its next turn."""
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        mark = PLACEHOLDER
        while mark in str(observation):
            mark += PLACEHOLDER[-1]
        marked = [*episode.prompt, {"role": "assistant", "content": mark}, *observation]
        options = {"add_generation_prompt": True, **self.format.template_options}
        rendered = render_chat(self.tokenizer, marked, where, **options)
        _, found, text = rendered.rpartition(mark)
        if not found:
            raise DataError(f"{where}: the chat template ignores an assistant's message")
        last_token = self.tokenizer.decode(episode.tokens[-1:])
        if episode.tokens[-1] in stop_token_ids and text.lstrip().startswith(last_token):
            text = text.lstrip().removeprefix(last_token)
        turn = {"role": "assistant", "content": episode.turns[-1]["text"]}
        episode.prompt = [*episode.prompt, turn, *observation]
        return text

    def _checked(
        self, answers: Mapping[int, Any], episodes: Sequence[Episode]
    ) -> Mapping[int, Any]:
        """Return the answers. For a failure, save its episode and raise RewardError."""
        failed = [row for row in sorted(answers) if isinstance(answers[row], Failure)]
        if not failed:
            return answers
        failure: Failure = answers[failed[0]]
        saved = self._save(episodes[failed[0]], failure)
        raise RewardError(f"environment {self.name!r} {failure.sentence}{saved}")

    @contextmanager
    def _saving(self, episode: Episode) -> Iterator[None]:
        """Save the episode, and raise RewardError, if its text cannot be used."""
        try:
            yield
        except DataError as error:
            saved = self._save(episode, Failure(str(error)))
            raise RewardError(f"{error}{saved}") from error

    def _save(self, episode: Episode, failure: Failure) -> str:
        """Write a failed episode on the first rank. Return the end of the error message."""
        saved: str = self.world.on_main_rank(lambda: self._write(episode, failure))
        return saved

    def _write(self, episode: Episode, failure: Failure) -> str:
        """Write a failed episode. Return the end of the message, which names the file."""
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
    """Convert a text or messages to entries of `Rollout.turns`."""
    if isinstance(read, str):
        return [{"role": role, "text": read}]
    return [{"role": message["role"], "text": text_of(message["content"])} for message in read]


def _rollout(episodes: Sequence[Episode]) -> Rollout:
    """Convert the episodes to a rollout.

    Truncated episodes have no bootstrap value: it would be the value at the last observation.
    """
    by_token: dict[str, Any] = {
        name: [torch.cat(episode.by_token[name]) for episode in episodes]
        for name in BY_TOKEN
        if all(name in episode.by_token for episode in episodes)
    }
    versions = [episode.version for episode in episodes if episode.version is not None]
    return Rollout(
        [episode.tokens for episode in episodes],
        [episode.finish_reason or OUT_OF_TURNS for episode in episodes],
        response_mask=[episode.response_mask for episode in episodes],
        rewards=[episode.rewards for episode in episodes],
        turns=[episode.turns for episode in episodes],
        versions=versions or None,
        **by_token,
    )
