"""The interface of rollout engines.

An engine takes prompts and returns tokens, finish reasons, logprobs and values.

An engine may be a loop over the policy, Hugging Face `generate` or a server. It reports whether it
reads the learner's weights directly, and the logprob of each token under the sampling distribution.

Top-k and top-p make the sampler's logprob differ from the policy's. With `m` the probability of the
kept tokens under softmax(z/T),

    sampler_logprob = logprob − log m

so `exp(logprob − sampler_logprob) = m` is the importance weight that corrects for the restriction.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

FINISHED = "stop"
"""Finish reason: the last token is a stop token or completes a stop string."""
TRUNCATED = "length"
"""Finish reason: the response reached `max_new_tokens`, or has no room for another turn."""
OUT_OF_TURNS = "turns"
"""Finish reason: the episode reached `max_turns` before its environment ended it."""


SUCCESS = "success"
FAILURE = "failure"
"""Outcomes of an episode with a goal."""


class RolloutError(RuntimeError):
    """Raised when an engine cannot generate responses.

    The run drops the iteration and ends with a checkpoint. If the error comes from an evaluation,
    after the update, the iteration is kept.
    """


@dataclass(slots=True, frozen=True)
class Sampling:
    """Sampling and stopping options of a call."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens to sample from; 0 disables top-k."""
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    """A response ends when its decoded text contains one of them."""
    greedy: bool = False
    """Take the likeliest token; `sampler_logprobs` are those of sampling it."""
    place: tuple[int, int] | None = None
    """Position of the prompts in a larger batch, as (first row, number of rows)."""
    seed: int | None = None
    """Seed of engines with `draws_by_row`; None draws one from torch's global CPU generator."""

    @property
    def is_restricted(self) -> bool:
        """Whether top-k or top-p restricts sampling."""
        return self.top_k > 0 or self.top_p < 1

    def drawn_seed(self) -> int:
        """Return the seed, or draw one."""
        return int(torch.randint(2**63 - 1, ())) if self.seed is None else self.seed

    def shortened(self, max_new_tokens: int) -> Sampling:
        """Return a copy with `max_new_tokens` lowered to at most this many."""
        return replace(self, max_new_tokens=min(max_new_tokens, self.max_new_tokens))


@dataclass(slots=True)
class Rollout:
    """One response per prompt, in the order of the prompts.

    Tensors are fp32 and on the CPU. Fields that the engine does not know are None.
    """

    tokens: list[list[int]]
    """Response tokens, including the stop token."""
    finish_reasons: list[str]
    """Finish reason of each response: `stop`, `length` or `turns`."""
    sampler_logprobs: list[Tensor] | None = None
    """Logprobs under the sampling distribution, after temperature, top-k and top-p: [length] per
    response, in nats. None for responses passed to `step`."""
    logprobs: list[Tensor] | None = None
    """Logprobs under softmax(z/T) over the whole vocabulary: [length] per response, in nats."""
    values: list[Tensor] | None = None
    """Values of the state before each token: [length] per response."""
    final_values: Tensor | None = None
    """Values of the state after the last token of truncated responses, [B]; 0 for the others."""
    response_mask: list[list[bool]] | None = None
    """Each [length], True on tokens of the policy and False on those of an environment; None means
    all True. The per-token fields above have entries only for tokens of the policy."""
    rewards: list[list[float]] | None = None
    """Rewards of an environment: [tokens of the policy] per response, in units of the reward."""
    turns: list[list[dict[str, Any]]] | None = None
    """Readable turns of each episode: `role` (prompt, policy, environment, or a message's, such as
    system), `text`, and the `reward` of a policy turn."""
    calls: list[list[str]] | None = None
    """Outcomes of each episode's tool calls: `answered`, `unknown`, `malformed` or `raised`."""
    outcomes: list[str | None] | None = None
    """Outcome of each episode, such as `success`, if its environment says so, [B]."""
    invalid: list[int] | None = None
    """Invalid actions of each episode, [B]. None if the environment does not count them."""
    versions: list[int] | None = None
    """Version of the weights that generated each response, [B], as the engine counts versions."""
    prompt_ids: list[list[int]] | None = None
    """Token ids of each prompt with an environment's first observation, where they are kept with
    the responses."""
    branches: list[list[Branch]] | None = None
    """Further rows of each episode; see `Branch`."""
    rows: list[int] | None = None
    """Place of each episode's prompt in its batch, since failed episodes may be left out, [B]."""

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each response, [B]."""
        return [len(tokens) for tokens in self.tokens]

    @property
    def generated_lengths(self) -> list[int]:
        """[B] number of tokens of the policy."""
        return (
            self.lengths if self.response_mask is None else [sum(row) for row in self.response_mask]
        )

    @property
    def generated_tokens(self) -> list[list[int]]:
        """[B] the tokens of the policy."""
        if self.response_mask is None:
            return self.tokens
        return [
            list(itertools.compress(tokens, mask))
            for tokens, mask in zip(self.tokens, self.response_mask, strict=True)
        ]

    @property
    def episode_lengths(self) -> list[int]:
        """[B] number of tokens of the policy in all rows of each episode."""
        lengths = self.generated_lengths
        if self.branches is None:
            return lengths
        return [
            length + sum(sum(branch.rollout.generated_lengths) for branch in branches)
            for length, branches in zip(lengths, self.branches, strict=True)
        ]

    @property
    def truncated(self) -> list[bool]:
        """Whether each response was cut short instead of finishing, [B]."""
        return [reason != FINISHED for reason in self.finish_reasons]

    def with_tokens(self) -> Rollout:
        """Return this rollout; raise RolloutError if a response has no token for its reward."""
        lengths = self.lengths
        if 0 in lengths:
            raise RolloutError(
                f"response {lengths.index(0)} of {len(lengths)} (counted from 0) is empty: an "
                "engine must return at least one token per prompt, such as the stop token"
            )
        return self

    def turns_record(self, row: int) -> dict[str, Any]:
        """Return the turns of a response for a log record; empty without an environment."""
        return {} if self.turns is None else {"turns": self.turns[row]}

    def select(self, rows: Sequence[int]) -> Rollout:
        """Return the responses of the given rows, in that order."""
        selected: dict[str, Any] = {x.name: getattr(self, x.name) for x in fields(self)}
        for name, value in selected.items():
            if isinstance(value, Tensor):
                selected[name] = value[list(rows)]
            elif value is not None:
                selected[name] = [value[row] for row in rows]
        return Rollout(**selected)

    @classmethod
    def joined(cls, parts: Sequence[Rollout]) -> Rollout:
        """Concatenate the responses of several batches of prompts."""
        joined: dict[str, Any] = {}
        for name in (x.name for x in fields(cls)):
            values = [getattr(part, name) for part in parts]
            if name in REPORTED and any(value is not None for value in values):
                default = REPORTED[name]
                lists = zip(values, parts, strict=True)
                values = [[default] * len(p.tokens) if v is None else v for v, p in lists]
            if any(value is None for value in values):
                joined[name] = None
            elif name == "final_values":
                joined[name] = torch.cat(values) if values else None
            else:
                joined[name] = [row for value in values for row in value]
        return cls(**joined)


REPORTED: dict[str, int | None] = {"outcomes": None, "invalid": 0}
"""Fields that an environment may leave out for a whole batch, with the entry of an episode."""


class Branch(NamedTuple):
    """A row of an episode that does not contain the episode's last turn.

    An episode has several rows if its agent does not repeat the whole conversation in each request:
    the rows are its conversations. The row with the last turn is the episode's response.
    """

    prompt_ids: list[int]
    rollout: Rollout
    """One response."""


class RolloutEngine(ABC):
    """Base class of rollout engines. Subclasses implement at least `generate`."""

    same_weights: bool = False
    """Whether the engine reads the learner's weights. In fp32 its logprobs then equal the
    learner's."""
    draws_by_row: bool = False
    """Whether a row's random numbers depend only on the seed and the row's position in the
    batch."""
    holds_weights: bool = False
    """Whether the engine keeps a copy of the weights, which `weights_changed` replaces."""
    is_quantized: bool = False
    """Whether the engine computes in fewer bits than the learner, so that its logprobs differ by
    more than rounding errors of the learner's dtype."""
    ranks_together: int = 1
    """Number of neighboring ranks that decode the same prompts together."""

    @abstractmethod
    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        """Generate one response of at least one token per prompt with the current weights.

        All randomness must come from torch's global CPU generator or `sampling.seed`.
        """

    # Engines that read the learner's weights and start no threads need none of these methods.

    def weights_changed(self, policy: Any) -> None:  # noqa: B027
        """Replace copies and caches of old weights by those of `policy`, the trainer's
        `ActorCritic`. Called after an update and after loading a checkpoint."""

    def conversations(self) -> AbstractContextManager[None]:
        """Return a block in which prompts continue earlier prompts and responses, with the same
        weights, so that an engine may keep what it has computed."""
        return nullcontext()

    def prepare(self, prompt_ids: list[list[int]]) -> None:  # noqa: B027
        """Start to generate responses to the next iteration's prompts, if the engine can."""

    def release(self) -> None:  # noqa: B027
        """Free memory for the learner. The trainer calls this before an update."""

    def close(self) -> None:  # noqa: B027
        """End work in other threads. Called at the end of a run; the engine can be used again."""

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's state for a checkpoint, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore the state that `state_dict` returned."""


def as_engine(engine: Any) -> RolloutEngine:
    """Return a `RolloutEngine`; an object that only has `generate` is wrapped.

    Raises:
        TypeError: it has no `generate`.
    """
    if isinstance(engine, RolloutEngine):
        return engine
    if not callable(getattr(engine, "generate", None)):
        raise TypeError(
            f"engine must have generate(prompt_ids, sampling) -> Rollout, got "
            f"{type(engine).__name__}; fastppo.rollout.RolloutEngine is its base class"
        )
    return _GenerateAlone(engine)


class _GenerateAlone(RolloutEngine):
    """Wraps an object with a `generate` method."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        return self.engine.generate(prompt_ids, sampling)
