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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastppo.activity import begin_stage
from fastppo.data.chat import (
    decode_completions,
    encodable,
    encode_prompt,
    is_chat,
    token_ids,
)
from fastppo.data.contents import refuse_images
from fastppo.data.datasets import DataError
from fastppo.data.files import write_whole
from fastppo.data.prompts import Prompts
from fastppo.data.world import World
from fastppo.environments.between import text_between
from fastppo.environments.episodes import Episode, Row, TurnEnd, as_turns, rollout_of
from fastppo.environments.failures import RaiseFailures
from fastppo.environments.loading import as_maker
from fastppo.environments.maker import Conversation, StepInfo, TurnFormat
from fastppo.environments.pool import Answer, EnvironmentPool, Failure, as_opening
from fastppo.plugins.calling import CallOptions
from fastppo.rewards.reward import RewardError
from fastppo.rollout import FINISHED, OUT_OF_TURNS, TRUNCATED, Rollout, RolloutEngine, Sampling

ENVIRONMENT = "environment"
"""Role of an environment's texts. Chat messages have their own roles."""


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
        failures: what happens to the episode of an environment that fails; by default it ends the
            run.
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
        failures: RaiseFailures | None = None,
    ) -> None:
        self.failures = failures or RaiseFailures()
        self.tokenizer = tokenizer
        self.max_turns = max_turns
        self.context = 2**31 if context is None else context
        self.options = options or CallOptions()
        self.failure_file = failure_file
        self.world = world or World()
        self.make = as_maker(make)
        self.environments = EnvironmentPool(
            self.make, options=self.options, world=self.world, drops=self.failures.drops
        )
        self.name = self.make.__name__
        self.has_rewards = self.make.has_rewards
        self.format = self.make.turn_format(tokenizer)

    def run(
        self, prompts: Prompts, engine: RolloutEngine, sampling: Sampling, *, held_out: bool = False
    ) -> tuple[Prompts, Rollout]:
        """Run an episode for each prompt.

        Args:
            held_out: whether this is an evaluation; see `DropFailures.kept`.

        Returns:
            the prompts, with the first observations as token ids, and the responses. The rewards of
            the environments are in `Rollout.rewards`. Dropped episodes are left out of both.

        Raises:
            RewardError: an environment raised, exceeded its time limit, or returned an invalid
                answer, or one that the chat template does not accept. Its episode is written to
                `failure_file` first. If failed episodes are dropped, too many have failed.
        """
        with engine.conversations():
            return self._run(prompts, engine, sampling, held_out)

    def _run(
        self, prompts: Prompts, engine: RolloutEngine, sampling: Sampling, held_out: bool
    ) -> tuple[Prompts, Rollout]:
        episodes = self._open(prompts, sampling.max_new_tokens)
        samplings = _by_turn(sampling)
        for turn in range(1, self.max_turns + 1):
            live = [row for row, episode in enumerate(episodes) if episode.is_live]
            if not live:
                break
            begin_stage(f"turn {turn}")
            conversations = [episodes[row].row.conversation for row in live]
            sampled = engine.generate(conversations, next(samplings)).with_tokens()
            texts = decode_completions(self.tokenizer, conversations, sampled.tokens)
            turns: dict[int, Any] = {}
            for place, row in enumerate(live):
                episode = episodes[row]
                episode.add_turn(texts[place], sampled, place)
                if episode.finish_reason is None:
                    turns[row] = self._parse(
                        episode, conversations[place], sampled.tokens[place], texts[place]
                    )
            begin_stage(f"turn {turn}, environment {self.name}")
            answers = self._checked(self.environments.step(turns, len(episodes)), episodes)
            for row, answer in answers.items():
                self._take_answer(episodes[row], answer, sampling, is_last=turn == self.max_turns)
        if self.make.has_end:
            cut_off = {
                row: episode.cut_off for row, episode in enumerate(episodes) if not episode.error
            }
            final_rewards = self._checked(self.environments.end(cut_off, len(episodes)), episodes)
            for row, reward in final_rewards.items():
                episodes[row].add_reward(reward)
        kept = self.failures.kept(episodes, held_out=held_out)
        episodes = [episodes[row] for row in kept]
        prompts = prompts.select(kept)
        # Rewards get the dataset's prompts. The token ids include the first observations.
        ids = [episode.row.prompt_ids for episode in episodes]
        rollout = rollout_of(episodes)
        rollout.rows = list(kept)
        if self.format.has_calls:
            rollout.calls = [episode.calls for episode in episodes]
        return Prompts(prompts.prompts, ids, prompts.columns), rollout

    def prepare(self, following: Prompts, engine: RolloutEngine) -> None:
        """Do nothing: `AsyncTurns` runs episodes ahead."""

    def metrics(self) -> dict[str, float]:
        """End an iteration or an evaluation; see `DropFailures.metrics`."""
        return self.failures.metrics()

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
        episodes = [
            Episode(row_columns, Row(prompt, ids, self.format)) for prompt, ids, row_columns in rows
        ]
        openings = self._checked(self.environments.reset(prompts.prompts, columns), episodes)
        for row, opening in openings.items():
            with self._saving(episodes[row]):
                self._begin(episodes[row], opening, max_new_tokens)
        return episodes

    def _begin(self, episode: Episode, opening: Any, max_new_tokens: int) -> None:
        """Begin an episode with what `reset` returned."""
        where = f"environment {self.name!r}, what reset returned"
        row = episode.row
        if isinstance(opening, Conversation):
            row.format = self.format.of(opening)
            opening = opening.messages
        if isinstance(opening, str):
            if not opening.strip():
                raise DataError(f"{where}: the prompt is empty")
            opening = as_opening(encodable(opening), row.prompt)
        if opening is not None:
            row.prompt = opening if isinstance(opening, str) else _opened(row.format, opening)
            row.prompt_ids = encode_prompt(
                row.prompt, self.tokenizer, where, **row.format.template_options
            )
        episode.turns = as_turns(row.prompt, "prompt" if opening is None else ENVIRONMENT)
        if len(row.prompt_ids) + max_new_tokens > self.context:
            raise DataError(
                f"environment {self.name!r}: an episode begins with {len(row.prompt_ids)} "
                f"tokens, which leave no room for a turn of {max_new_tokens}"
            )
        if is_chat(row.prompt):
            row.prompt = copy.deepcopy(list(row.prompt))

    def _parse(self, episode: Episode, conversation: list[int], ids: list[int], text: str) -> Any:
        """Return a turn in the form for the environment, and append its message to the row."""
        row = episode.row
        turn = row.format.parse(conversation, ids, text)
        row.add_message(row.format.message(turn, text))
        episode.add_info(StepInfo(invalid=row.format.is_malformed(turn)))
        return turn

    def _take_answer(
        self, episode: Episode, answer: Answer, sampling: Sampling, *, is_last: bool
    ) -> None:
        """Add the reward, and append the observation or end the episode."""
        episode.add_reward(answer.reward)
        episode.add_info(answer.info)
        if answer.done:
            episode.finish_reason = FINISHED
            return
        has_room = False
        with self._saving(episode):
            if isinstance(answer.observation, Conversation):
                has_room = self._take_conversation(
                    episode, answer.observation, sampling, is_last=is_last
                )
            else:
                has_room = self._take_observation(episode, answer.observation, sampling)
        if is_last:
            episode.finish_reason = OUT_OF_TURNS
        elif not has_room:
            episode.finish_reason = TRUNCATED

    def _take_observation(self, episode: Episode, observation: Any, sampling: Sampling) -> bool:
        """Append an observation, and return whether there is room for a turn after it.

        It is also appended after the last turn: V_next is the value at the observation.
        """
        row = episode.row
        if is_chat(row.prompt):
            messages = observation
            if isinstance(observation, str):
                messages = [{"role": "user", "content": observation}]
            ids = self._ids_after(row, row.ends[-1], messages, sampling)
            row.prompt = [*row.prompt, *messages]
        elif isinstance(observation, str):
            ids = self._ids_of(observation)
        else:
            raise DataError(
                f"{self._where}: it must be a text because the prompt is one, got messages"
            )
        row.add_observation(ids, self.context)
        episode.add_entries(as_turns(observation, ENVIRONMENT))
        episode.calls += self.format.outcomes(observation)
        return self._has_room(row.conversation, sampling)

    def _take_conversation(
        self, episode: Episode, conversation: Conversation, sampling: Sampling, *, is_last: bool
    ) -> bool:
        """Continue the conversation's row or open one, and return whether a turn has room.

        Without another turn, only the row of the last turn is continued.
        """
        turn_format = self.format.of(conversation)
        messages = _opened(turn_format, conversation.messages)
        found = episode.longest_prefix(messages, turn_format)
        if found is None:
            known = 0
            ids = encode_prompt(
                messages, self.tokenizer, self._where, **turn_format.template_options
            )
        else:
            row, end = found
            known = end.messages
            after = self._ids_after(row, end, messages[known:], sampling)
            ids = row.conversation[: end.tokens] + after
        has_room = self._has_room(ids, sampling)
        if found is not None and end is row.ends[-1]:
            if row is not episode.row and (is_last or not has_room):
                return has_room  # the row of the last turn gets the reward
            row.prompt, row.format = messages, turn_format
            row.add_observation(after, self.context)
            episode.row = row
        elif is_last or not has_room:
            return has_room
        else:
            episode.open_row(Row(messages, ids, turn_format))
        episode.add_entries(as_turns(messages[known:], ENVIRONMENT))
        return has_room

    def _has_room(self, conversation: list[int], sampling: Sampling) -> bool:
        return len(conversation) + sampling.max_new_tokens <= self.context

    @property
    def _where(self) -> str:
        """The start of error messages about an observation."""
        return f"environment {self.name!r}, an observation"

    def _ids_of(self, text: str) -> list[int]:
        """Return the tokens of an observation's text."""
        ids = token_ids(self.tokenizer, encodable(text))
        if not ids:
            raise DataError(f"{self._where}: it has no tokens")
        return ids

    def _ids_after(
        self, row: Row, end: TurnEnd, messages: Sequence[dict[str, Any]], sampling: Sampling
    ) -> list[int]:
        """Return the tokens between the end of a turn and the turn after further messages.

        They are those of the chat template's text.
        """
        refuse_images(messages, self._where)
        last = row.conversation[end.tokens - 1]
        text = text_between(
            self.tokenizer,
            row.prompt[: end.messages],
            messages,
            self._where,
            stop=self.tokenizer.decode([last]) if last in sampling.stop_token_ids else "",
            renders_calls=row.format.renders_calls,
            **row.format.template_options,
        )
        return self._ids_of(text)

    def _checked(self, answers: Mapping[int, Any], episodes: Sequence[Episode]) -> dict[int, Any]:
        """Return the answers by row, in order, without failures. Save the episodes of those."""
        checked = {}
        for row, answer in sorted(answers.items()):
            if isinstance(answer, Failure):
                saved = self._save(episodes[row], answer)
                error = RewardError(f"environment {self.name!r} {answer.sentence}{saved}")
                self.failures.take(episodes[row], error)
            else:
                checked[row] = answer
        return checked

    @contextmanager
    def _saving(self, episode: Episode) -> Iterator[None]:
        """Save the episode, which has failed, if its text cannot be used."""
        try:
            yield
        except DataError as error:
            saved = self._save(episode, Failure(str(error)))
            failure = RewardError(f"{error}{saved}")
            failure.__cause__ = error
            self.failures.take(episode, failure)

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
            "prompt": episode.row.prompt,
            "columns": episode.columns,
            "turns": episode.turns,
            "conversation": self.tokenizer.decode(episode.row.conversation),
        }
        text = json.dumps(record, ensure_ascii=False, indent=2, default=str)
        write_whole(self.failure_file, text)
        return f" (episode saved to {self.failure_file})"


def _by_turn(sampling: Sampling) -> Iterator[Sampling]:
    """Yield the sampling of each turn: with a seed of its own if there is a seed."""
    if sampling.seed is None:
        yield from itertools.repeat(sampling)
    generator = torch.Generator().manual_seed(sampling.seed or 0)
    while True:
        yield replace(sampling, seed=int(torch.randint(2**63 - 1, (), generator=generator)))


def _opened(turn_format: TurnFormat, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages that begin a conversation, as the policy reads them."""
    cleaned = [{**message, "content": encodable(message["content"])} for message in messages]
    return list(turn_format.opening(cleaned))
