"""What an iteration trains: decided once, when its advantages are known."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trained:
    """What an iteration trains."""

    policy: bool = True
    """Whether the policy is trained."""
    value: bool = True
    """Whether the value function is trained. It is unless all responses are masked, and then there
    is no loss at all."""
    has_signal: bool = True
    """Whether the advantages differ from 0. Without them, only the other terms of the loss
    move the policy: a KL, an entropy bonus, pretraining text, those of a user's objective."""

    @property
    def by_reward(self) -> bool:
        """Whether the advantages move the policy."""
        return self.policy and self.has_signal
