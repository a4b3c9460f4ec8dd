"""Episodes in progress, and their rows.

An episode is one row, a prompt and a response, as long as every turn continues the conversation. An
agent may also send another conversation: it retries a request, starts a sub-agent, or replaces the
history by a summary. Such a request opens another row of the episode. Requests find their row by
the longest common prefix of tokens:

    all turns of a row, then new messages     continues the row
    some turns of a row, then other messages  opens a row whose prompt begins with the row's tokens
    none                                      opens a row

The prefix is compared message by message, with the tools, and consists of the tokens that the
policy has read and sampled: they are never encoded again. A turn is trained on in the row where it
was sampled. In the prompt of another row it is context.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.data.chat import is_chat, text_of
from fastppo.environments.maker import PolicyTurn, StepInfo, TurnFormat
from fastppo.rewards.reward import RewardError
from fastppo.rollout import FINISHED, OUT_OF_TURNS, TRUNCATED, Branch, Rollout

POLICY = "policy"
"""Role of the policy's turns."""

BY_TOKEN = ("sampler_logprobs", "logprobs", "values")
"""Optional fields of an engine's rollout with one value per token."""


class TurnEnd(NamedTuple):
    """The end of a turn in its row."""

    messages: int
    """Messages of the conversation, the turn included."""
    tokens: int
    """Tokens of prompt and response, the turn included."""


@dataclass(slots=True, eq=False)
class Row:
    """A prompt and a response in progress."""

    prompt: Any
    """The text, or the messages of the chat so far."""
    prompt_ids: list[int]
    format: TurnFormat
    number: int = 0
    """Position in the episode."""
    tokens: list[int] = field(default_factory=list)
    """The response: turns and observations."""
    response_mask: list[bool] = field(default_factory=list)
    """Whether the policy wrote each token."""
    rewards: list[float] = field(default_factory=list)
    """Reward of each token that the policy wrote."""
    by_token: dict[str, list[Tensor]] = field(default_factory=dict)
    """The engine's `BY_TOKEN`, one tensor per turn."""
    ends: list[TurnEnd] = field(default_factory=list)
    """Ends of the turns of a chat, in order."""

    @property
    def conversation(self) -> list[int]:
        """Token ids of the whole context."""
        return self.prompt_ids + self.tokens

    def add_message(self, message: dict[str, Any]) -> None:
        """Append the message of the last turn, if the row is a chat."""
        if is_chat(self.prompt):
            self.prompt = [*self.prompt, message]
            self.ends.append(TurnEnd(len(self.prompt), len(self.conversation)))

    def add_observation(self, ids: Sequence[int], limit: int) -> None:
        """Append tokens of an observation, up to the limit of the context."""
        fitting = list(ids)[: max(0, limit - len(self.conversation))]
        self.tokens += fitting
        self.response_mask += [False] * len(fitting)

    def common_end(self, messages: Sequence[Mapping[str, Any]]) -> TurnEnd | None:
        """Return the end of the last turn up to which a conversation has the same messages."""
        pairs = zip(self.prompt, messages, strict=False)
        common = len(list(itertools.takewhile(lambda pair: _is_same(*pair), pairs)))
        return next((end for end in reversed(self.ends) if end.messages <= common), None)

    def rollout(self, finish_reason: str) -> Rollout:
        """Return the response as a rollout of one row."""
        by_token: dict[str, Any] = {
            name: [torch.cat(values)] for name, values in self.by_token.items()
        }
        return Rollout(
            [self.tokens],
            [finish_reason],
            response_mask=[self.response_mask],
            rewards=[self.rewards],
            **by_token,
        )


@dataclass(slots=True, eq=False)
class Episode:
    """An episode in progress. Every rank has all of them."""

    columns: dict[str, Any]
    row: Row
    """The row of the current turn."""
    rows: list[Row] = field(default_factory=list)
    """All rows in the order in which they were opened."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Entry of `Rollout.turns`."""
    calls: list[str] = field(default_factory=list)
    """Entry of `Rollout.calls`."""
    finish_reason: str | None = None
    """None while the episode continues."""
    version: int | None = None
    """Version of the sampler's weights."""
    outcome: str | None = None
    """Entry of `Rollout.outcomes`."""
    invalid: int | None = None
    """Entry of `Rollout.invalid`."""
    error: RewardError | None = None
    """Error of the environment, which ended the episode."""

    @property
    def is_live(self) -> bool:
        """Whether the episode continues."""
        return self.finish_reason is None and self.error is None

    def __post_init__(self) -> None:
        self.rows.append(self.row)

    @property
    def cut_off(self) -> PolicyTurn | None:
        """The policy's last turn if it was truncated, which the environment has not read."""
        last = self.turns[-1]
        if self.finish_reason != TRUNCATED or last["role"] != POLICY:
            return None
        generated = len(list(itertools.takewhile(bool, reversed(self.row.response_mask))))
        return PolicyTurn(last["text"], len(self.row.conversation) - generated, generated)

    def add_turn(self, text: str, rollout: Rollout, place: int) -> None:
        """Append a turn of the policy. A truncated turn ends the episode.

        Args:
            place: position of the turn in the engine's rollout.
        """
        row = self.row
        tokens = rollout.tokens[place]
        row.tokens += tokens
        row.response_mask += [True] * len(tokens)
        row.rewards += [0.0] * len(tokens)
        self.add_entries([{"role": POLICY, "text": text, "reward": 0.0}])
        for name in BY_TOKEN:
            values = getattr(rollout, name)
            if values is not None:
                row.by_token.setdefault(name, []).append(values[place])
        if rollout.versions is not None:
            self.version = rollout.versions[place]
        if rollout.truncated[place]:
            self.finish_reason = TRUNCATED

    def add_reward(self, reward: float) -> None:
        """Add a reward to the last token of the policy's last turn."""
        self.row.rewards[-1] += reward
        turn = next(turn for turn in reversed(self.turns) if turn["role"] == POLICY)
        turn["reward"] += reward

    def add_info(self, info: StepInfo) -> None:
        """Count an invalid action, and take the outcome."""
        if info.invalid is not None:
            self.invalid = (self.invalid or 0) + info.invalid
        self.outcome = info.outcome or self.outcome

    def add_entries(self, entries: Sequence[dict[str, Any]]) -> None:
        """Append entries of `turns`, with the number of their row after the first."""
        number = {"row": self.row.number} if self.row.number else {}
        self.turns += [{**entry, **number} for entry in entries]

    def open_row(self, row: Row) -> None:
        """Make a new row the current one."""
        row.number = len(self.rows)
        self.rows.append(row)
        self.row = row

    def longest_prefix(
        self, messages: Sequence[Mapping[str, Any]], turn_format: TurnFormat
    ) -> tuple[Row, TurnEnd] | None:
        """Return the row with the longest common prefix of tokens, and the prefix's end.

        Args:
            messages: of a conversation.
            turn_format: the format of its next turn. Rows with other tools have no common prefix.

        Returns:
            None if no row has a turn in common with the conversation.
        """
        found = [
            (row, end)
            for row in self.rows
            if row.format.has_tools_of(turn_format) and (end := row.common_end(messages))
        ]
        return max(found, key=lambda pair: pair[1].tokens, default=None)


def as_turns(read: Any, role: str) -> list[dict[str, Any]]:
    """Convert a text or messages to entries of `Rollout.turns`."""
    if isinstance(read, str):
        return [{"role": role, "text": read}]
    return [{"role": message["role"], "text": text_of(message["content"])} for message in read]


def rollout_of(episodes: Sequence[Episode]) -> Rollout:
    """Convert finished episodes to a rollout.

    Truncated episodes have no bootstrap value: it would be the value at the last observation.
    """
    rollout = Rollout.joined(
        [episode.row.rollout(episode.finish_reason or OUT_OF_TURNS) for episode in episodes]
    )
    versions = [episode.version for episode in episodes if episode.version is not None]
    rollout.versions = versions or None
    rollout.turns = [episode.turns for episode in episodes]
    if any(episode.outcome is not None for episode in episodes):
        rollout.outcomes = [episode.outcome for episode in episodes]
    if any(episode.invalid is not None for episode in episodes):
        rollout.invalid = [episode.invalid or 0 for episode in episodes]
    rollout.branches = [
        [
            Branch(row.prompt_ids, row.rollout(FINISHED))
            for row in episode.rows
            if row is not episode.row
        ]
        for episode in episodes
    ]
    return rollout


def _is_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Compare two messages. Clients may strip an answer, and number its tool calls anew."""
    if before["role"] == "assistant" and now["role"] == "assistant":
        return _said(before) == _said(now)
    return before == now


def _said(message: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return the text and the calls of an assistant's message."""
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    return text_of(message["content"]).strip(), calls
