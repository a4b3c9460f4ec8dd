"""One interface for rollouts: prompts in; tokens, finish reasons, logprobs and values out.

It says nothing about how tokens are made, so an engine may be a loop over the policy itself,
Hugging Face `generate` or a server. What it must say is whether it reads the learner's own weights,
and for each token the logprob under the distribution that the token was drawn from.

Two logprobs differ where sampling is restricted (top-k, top-p). With `m` the probability that
softmax(z/T) has on the tokens that were left,

    sampler_logprob = logprob − log m

so `exp(logprob − sampler_logprob) = m` is the importance weight that corrects for the restriction.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fastppo.functional.scalars import describe

FINISHED = "stop"
"""The response ended with a stop token, which is its last token, or completed a stop string."""
TRUNCATED = "length"
"""The response was cut off at `max_new_tokens`, or there is no room for another turn."""
OUT_OF_TURNS = "turns"
"""The response has as many turns as it may have, and its environment would go on."""


class RolloutError(RuntimeError):
    """The engine can generate no more responses: the run ends with a checkpoint. The iteration is
    dropped, unless the responses were of an evaluation after its update."""


@dataclass(slots=True, frozen=True)
class Sampling:
    """How tokens are drawn and when a response ends."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    """A response ends with the token that completes one of them in its decoded text."""
    greedy: bool = False
    """The likeliest token; `sampler_logprobs` are then those of drawing it."""
    place: tuple[int, int] | None = None
    """(first row, rows): which rows of a larger batch the prompts are."""
    seed: int | None = None
    """Seed of the draws, for engines with `draws_by_row`; None takes one from torch's global CPU
    generator."""

    @property
    def is_restricted(self) -> bool:
        """Whether tokens are drawn from less than softmax(z/T)."""
        return self.top_k > 0 or self.top_p < 1

    def drawn_seed(self) -> int:
        """The seed, or one that is drawn."""
        return int(torch.randint(2**63 - 1, ())) if self.seed is None else self.seed

    def shortened(self, max_new_tokens: int) -> Sampling:
        """A copy with at most so many tokens."""
        return replace(self, max_new_tokens=min(max_new_tokens, self.max_new_tokens))


@dataclass(slots=True)
class Rollout:
    """One response per prompt, in the prompts' order; tensors are fp32 on the CPU. A field is None
    where the engine does not know it."""

    tokens: list[list[int]]
    """Response tokens, a stop token included."""
    finish_reasons: list[str]
    """`stop`, `length` or `turns`."""
    sampler_logprobs: list[Tensor] | None = None
    """Each [length], nats, of the distribution that the token was drawn from: after temperature and
    every restriction. Every engine gives them; responses from elsewhere have none."""
    logprobs: list[Tensor] | None = None
    """Each [length], nats, of softmax(z/T) over the whole vocabulary."""
    values: list[Tensor] | None = None
    """Each [length], of the state before the token."""
    final_values: Tensor | None = None
    """[B], of the state after the last token where the response was cut off; 0 elsewhere."""
    written: list[list[bool]] | None = None
    """Each [length], True on tokens that the policy wrote; None means all. The per-token fields
    above have entries for those alone."""
    rewards: list[list[float]] | None = None
    """Each [tokens that the policy wrote], reward units: what an environment paid."""
    turns: list[list[dict[str, Any]]] | None = None
    """The turns of each episode of an environment, from the first that the policy reads, for people
    to read: `role` (prompt, policy, environment, or that of a message, such as system), `text`, and
    the `reward` of a turn of the policy."""
    calls: list[list[str]] | None = None
    """The outcomes of the tool calls of each episode: `answered`, `unknown`, `malformed` or
    `raised`."""
    versions: list[int] | None = None
    """[B] number of the weights that drew each response, as the engine counts them."""

    @property
    def lengths(self) -> list[int]:
        """[B] response tokens."""
        return [len(tokens) for tokens in self.tokens]

    @property
    def written_lengths(self) -> list[int]:
        """[B] tokens that the policy wrote."""
        return self.lengths if self.written is None else [sum(row) for row in self.written]

    @property
    def written_tokens(self) -> list[list[int]]:
        """[B] the tokens that the policy wrote."""
        if self.written is None:
            return self.tokens
        return [
            list(itertools.compress(tokens, written))
            for tokens, written in zip(self.tokens, self.written, strict=True)
        ]

    @property
    def truncated(self) -> list[bool]:
        """[B] whether a response was cut off."""
        return [reason != FINISHED for reason in self.finish_reasons]

    def turns_record(self, row: int) -> dict[str, Any]:
        """The turns of a response as a record has them; nothing where there is no environment."""
        return {} if self.turns is None else {"turns": self.turns[row]}

    @classmethod
    def joined(cls, parts: Sequence[Rollout]) -> Rollout:
        """The responses of several batches of prompts, one batch after the other."""
        joined: dict[str, Any] = {}
        for name in (x.name for x in fields(cls)):
            values = [getattr(part, name) for part in parts]
            if any(value is None for value in values):
                joined[name] = None
            elif name == "final_values":
                joined[name] = torch.cat(values) if values else None
            else:
                joined[name] = [row for value in values for row in value]
        return cls(**joined)


def check_rollout(rollout: Rollout, vocabulary: int, longest: int) -> None:
    """Checks responses that come from outside of the process, from a server or a file.

    Args:
        longest: tokens of a response at most.

    Raises:
        ValueError: one is empty or too long, or has what is no token of the vocabulary, no reason
            to finish or no finite logprob for each token.
    """
    for row, tokens in enumerate(rollout.tokens):
        is_token = (isinstance(token, int) and 0 <= token < vocabulary for token in tokens)
        if not 0 < len(tokens) <= longest or not all(is_token):
            raise ValueError(
                f"response {row} must be 1 to {longest} token ids in [0, {vocabulary}), got "
                f"{describe(tokens)}"
            )
    reasons = rollout.finish_reasons
    known = [FINISHED, TRUNCATED]  # not a set: a reason may be a list
    if len(reasons) != len(rollout.tokens) or not all(reason in known for reason in reasons):
        raise ValueError(
            f"a response must finish with {FINISHED} or {TRUNCATED}, got {describe(reasons)}"
        )
    for logprobs in (rollout.sampler_logprobs, rollout.logprobs):
        if logprobs is None:
            continue
        has_one_each = [len(row) for row in logprobs] == rollout.lengths
        if not has_one_each or not all(row.isfinite().all() for row in logprobs):
            raise ValueError("a response must have a finite logprob for each token")


class RolloutEngine(ABC):
    """What the trainer needs of an engine; subclasses implement at least `generate`."""

    same_weights: bool = False
    """Whether it reads the learner's own weights: in fp32 its logprobs are then the learner's."""
    draws_by_row: bool = False
    """Whether a row's random numbers depend on its place in the batch (`Sampling.place`) alone."""
    holds_weights: bool = False
    """Whether it decodes with a copy of the weights that `weights_changed` hands over, and does not
    read the learner's in between."""
    ranks_together: int = 1
    """How many neighbouring processes decode the same prompts together."""

    @abstractmethod
    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        """One response per prompt, from the policy's weights as they are now. All that is random
        follows from torch's global CPU generator."""

    # These do nothing for an engine that reads the learner's own weights and has no threads.

    def weights_changed(self, policy: Any) -> None:  # noqa: B027
        """Called after an update and after a checkpoint was loaded: `policy` (the trainer's
        `ActorCritic`) has new weights; copies and caches of the old ones must be replaced."""

    def release(self) -> None:  # noqa: B027
        """Called before an update: frees memory that the learner needs."""

    def close(self) -> None:  # noqa: B027
        """Called at the end of a run: what it does in other threads ends. It may be used again."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it, as JSON has it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restores what `state_dict` gave."""


def as_engine(engine: Any) -> RolloutEngine:
    """The engine; an object that has only `generate` is wrapped as one with weights of its own.

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
    """An object with `generate`, about which nothing else is known."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        return self.engine.generate(prompt_ids, sampling)
