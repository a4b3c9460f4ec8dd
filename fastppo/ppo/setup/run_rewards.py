"""The rewards and the environment of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastppo.data.prompts import Prompts
from fastppo.environments.loading import load_environment
from fastppo.plugins.loading import Plugin
from fastppo.ppo.options.config import PPOConfig
from fastppo.rewards.ensemble import RewardEnsemble
from fastppo.rewards.loading import make_terms
from fastppo.rewards.reward import Reward, RewardTerm


@dataclass(frozen=True, slots=True, eq=False)
class RewardTerms:
    """Rewards of a run."""

    trained: list[RewardTerm]
    """With their weights, an ensemble last."""
    monitored: list[RewardTerm]
    environment: Plugin | None
    """An `EnvironmentMaker`, for multi-turn responses."""

    @property
    def all(self) -> list[RewardTerm]:
        """Trained and monitored rewards."""
        return [*self.trained, *self.monitored]

    def check(self, source: str, prompts: Prompts, processes: int) -> None:
        """Check that rewards and environment can be called with the columns of the prompts.

        Args:
            source: name of the prompts in error messages.
            processes: number of processes.

        Raises:
            ValueError: a column is missing, or a signature does not fit.
        """
        for term in self.all:
            term.check(source, prompts)
        if self.environment is not None:
            maker: Any = self.environment.function
            maker.check(source, prompts.columns.keys(), processes)

    def loaded(self, device: torch.device) -> RewardTerms:
        """Return the rewards with the weights of reward models on a device."""
        return replace(
            self,
            trained=[term.loaded(device) for term in self.trained],
            monitored=[term.loaded(device) for term in self.monitored],
        )

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of rewards and environment, by option."""
        fingerprints = {f"rewards/{term.name}": term.fingerprint for term in self.trained}
        if self.environment is not None:
            fingerprints["environment"] = self.environment.fingerprint
        return fingerprints


def load_rewards(
    config: PPOConfig,
    rewards: Sequence[str | Reward] | None = None,
    monitored: Sequence[str | Reward] | None = None,
    environment: Callable[[], Any] | None = None,
) -> RewardTerms:
    """Load rewards, without the weights of reward models, and the environment.

    Args:
        rewards, monitored, environment: passed to `PPOTrainer` in place of the options.

    Raises:
        ValueError: one does not exist.
    """

    def load(these: Sequence[str | Reward], weights: Any = None) -> list[RewardTerm]:
        return make_terms(these, weights, device=None, timeout=config.reward_timeout)

    rewards = rewards or config.rewards
    weights = config.reward_weights
    ensemble_weight = 1.0
    if config.reward_ensemble and weights is not None and len(weights) == len(rewards) + 1:
        ensemble_weight = weights[-1]
        weights = weights[:-1]
    trained = load(rewards, weights)
    if config.reward_ensemble:
        if any(term.name == "ensemble" for term in trained):
            raise ValueError(
                "a reward is called 'ensemble', which is the name of reward_ensemble: rename it"
            )
        ensemble = RewardEnsemble(
            config.reward_ensemble,
            config.reward_ensemble_by,
            device=None,
            timeout=config.reward_timeout,
        )
        trained.append(
            RewardTerm("ensemble", ensemble, ensemble.fingerprint(), weight=ensemble_weight)
        )
    return RewardTerms(
        trained=trained,
        monitored=load(monitored or config.monitor_rewards),
        environment=load_environment(environment or config.environment),
    )
