"""The scale of the rewards changes nothing, if `kl_coef` is scaled with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runs import LEARNING, make_trainer

TURNS = {"advantage": "turn_gae", "lam": 0.9}
GROUPS = {"samples_per_prompt": 4}
GRADIENT = {"value_head": "gradient"}
CRITIC = {"value_model": "critic", "value_learning_rate": 1e-3}
BATCH = {"iterations": 3, "rollout_batch_size": 16, "microbatch_size": 8, "ppo_epochs": 2}
KINDS: dict[str, dict[str, Any]] = {
    "gae": {},
    "turn_gae": TURNS,
    "sequence": {"advantage": "sequence"},
    "reinforce": {"advantage": "reinforce"},
    "rloo": {"advantage": "rloo", **GROUPS},
    "group": {"advantage": "group", **GROUPS},
    "gae, value loss on the trunk": {"vf_coef": 0.5},
    "gae, gradient": GRADIENT,
    "turn_gae, gradient": TURNS | GRADIENT,
    "sequence, gradient": {"advantage": "sequence", **GRADIENT},
    "gae, critic": CRITIC,
    "turn_gae, critic": TURNS | CRITIC,
    "gae, critic in closed form": CRITIC | {"value_head": "closed_form"},
    "gae, critic with extra epochs": CRITIC | {"critic_options": {"epochs": 2}},
    "gae, detached": GRADIENT | {"value_model": "detached"},
    "user's advantage": {"advantage": f"{Path(__file__)}:reward_to_go_minus_value"},
    "KL in the reward": {"kl_coef": 0.25},
    "KL in the reward, rloo": {"advantage": "rloo", "kl_coef": 0.25, **GROUPS},
    "KL in the reward, gradient": GRADIENT | {"kl_coef": 0.25},
}


def reward_to_go_minus_value(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """An advantage of a user, without the responses' borders."""
    return rewards.flip(0).cumsum(0).flip(0) - values


def _weights(
    folder: Path, scale: float, options: dict[str, Any], rate: float | str
) -> list[Tensor]:
    """Train for three iterations on rewards times a scale, and return the policy's weights."""

    def reward(completions: list[str], **columns: Any) -> list[float]:
        return [scale * (text.split().count("w7") / 8 - 0.25) for text in completions]

    options = {"kl_coef": 0.0} | options
    options["kl_coef"] = scale * options["kl_coef"]
    trainer = make_trainer(
        folder,
        rewards=[reward],
        **{**LEARNING, **BATCH, "learning_rate": rate, **options},
    )
    trainer.train()
    return [weight.detach().clone() for weight in trainer.model.causal_lm.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_of_the_rewards_changes_nothing(kind: str, tmp_path: Path) -> None:
    """Powers of two give the same bits; a thousand gives the same weights but for rounding."""
    once = _weights(tmp_path / "once", 1.0, KINDS[kind], 1e-3)
    for exponent in (-12, 20):
        scaled = _weights(tmp_path / str(exponent), 2.0**exponent, KINDS[kind], 1e-3)
        assert all(torch.equal(a, b) for a, b in zip(once, scaled, strict=True))
    scaled = _weights(tmp_path / "thousand", 1000.0, KINDS[kind], 1e-3)
    for a, b in zip(once, scaled, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_an_adapted_learning_rate_has_the_same_bits(tmp_path: Path) -> None:
    once = _weights(tmp_path / "once", 1.0, {}, "auto")
    scaled = _weights(tmp_path / "scaled", 1024.0, {}, "auto")
    assert all(torch.equal(a, b) for a, b in zip(once, scaled, strict=True))
