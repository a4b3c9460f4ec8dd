"""One small interface for rollouts: prompts in; tokens, lengths, finish reasons, logprobs out.

It says nothing about how tokens are made, so an engine may be Hugging Face `generate` (the
default), a compiled decoder or a server: anything with this `generate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

FINISHED = "stop"
"""The response ended with a stop token, which is its last token."""
TRUNCATED = "length"
"""The response was cut off at `max_new_tokens`."""


@dataclass(slots=True, frozen=True)
class Sampling:
    """How tokens are drawn. Logprobs are those of softmax(z/T), before top-k and top-p."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    greedy: bool = False
    extra: dict[str, object] = field(default_factory=dict)
    """Engine-specific options."""

    def shortened(self, max_new_tokens: int) -> Sampling:
        """The same, of at most so many tokens."""
        return replace(self, max_new_tokens=min(max_new_tokens, self.max_new_tokens))


@dataclass(slots=True)
class Rollout:
    """One response per prompt, in the prompts' order."""

    tokens: list[list[int]]
    """Response tokens, a stop token included."""
    finish_reasons: list[str]
    """`stop` or `length`."""
    logprobs: list[Tensor]
    """Each [length] fp32, nats, as the sampler saw them."""

    @property
    def lengths(self) -> list[int]:
        """[B] response tokens."""
        return [len(tokens) for tokens in self.tokens]

    @property
    def truncated(self) -> list[bool]:
        """[B] whether a response was cut off."""
        return [reason == TRUNCATED for reason in self.finish_reasons]

    def extend(self, other: Rollout) -> None:
        """Appends the responses of another batch of prompts."""
        self.tokens += other.tokens
        self.finish_reasons += other.finish_reasons
        self.logprobs += other.logprobs


class RolloutEngine(Protocol):
    """What the trainer asks of an engine."""

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout: ...
