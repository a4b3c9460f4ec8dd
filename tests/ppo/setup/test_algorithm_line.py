"""A run names its algorithm in a line."""

from __future__ import annotations

from typing import Any

import pytest

from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.setup.algorithm_line import algorithm_line


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"kl_coef": 0.0, "vf_coef": 0.5},
            "PPO-clip, GAE(1, 0.95), closed-form value head, value loss on the trunk, adamw at a "
            "rate that follows 0.02 nats per token",
        ),
        (
            {"kl_coef": 0.0},
            "PPO-clip, GAE(1, 0.95), closed-form value head, adamw at a rate that follows 0.02 "
            "nats per token",
        ),
        (
            {"value_head": "gradient", "learning_rate": 1e-5, "lr_schedule": "linear"}
            | {"entropy_coef": 0.01, "kl_coef": 0.0, "schedules": ["kl_coef=linear:0.1"]},
            "PPO-clip, GAE(1, 0.95), value head by gradient, KL in the reward (scheduled), entropy "
            "bonus (0.01), adamw at a rate of 1e-05, linear decay",
        ),
        (
            {"advantage": "group", "samples_per_prompt": 4, "kl_coef": 0.0, "kl_loss_coef": 0.04},
            "PPO-clip, group-normalized rewards (GRPO), KL in the loss (0.04), adamw at a rate "
            "that follows 0.02 nats per token",
        ),
    ],
    ids=["vf_coef", "defaults", "gradient", "group"],
)
def test_the_line_has_the_parts_that_are_used(options: dict[str, Any], line: str) -> None:
    assert algorithm_line(PPOConfig(**options)) == line


@pytest.mark.parametrize("name", ["objective", "advantage", "optimizer"])
def test_a_users_function_is_named(name: str) -> None:
    assert "mine.py:function" in algorithm_line(PPOConfig(**{name: "mine.py:function"}))
