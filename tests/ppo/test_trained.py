"""What an iteration trains, and why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastppo.ppo.coefficients import CoefficientControl
from fastppo.ppo.estimators import what_to_train
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.trained import Trained

SIGNAL = True
NO_SIGNAL = False
SOME = torch.tensor([True, False])
ALL = torch.tensor([True, True])
WARM_UP = {"value_warmup_iterations": 2}
KL = {"kl_loss_coef": 0.1}
ENTROPY = {"entropy_coef": 0.5}
TEXT = {"ptx_coef": 1.0, "ptx_data": "text.jsonl"}
OBJECTIVE = {"objective": "mine.py:objective"}


@pytest.mark.parametrize(
    ("has_signal", "masked", "options", "wanted"),
    [
        (SIGNAL, None, {}, Trained(policy=True, value=True, has_signal=True)),
        (SIGNAL, SOME, {}, Trained(policy=True, value=True, has_signal=True)),
        (SIGNAL, None, WARM_UP, Trained(policy=False, value=True, has_signal=True)),
        (SIGNAL, None, WARM_UP | KL, Trained(policy=False, value=True, has_signal=True)),
        (NO_SIGNAL, None, {}, Trained(policy=False, value=True, has_signal=False)),
        (NO_SIGNAL, None, KL, Trained(policy=True, value=True, has_signal=False)),
        (NO_SIGNAL, None, WARM_UP | KL, Trained(policy=False, value=True, has_signal=False)),
        (NO_SIGNAL, None, ENTROPY, Trained(policy=True, value=True, has_signal=False)),
        (NO_SIGNAL, None, TEXT, Trained(policy=True, value=True, has_signal=False)),
        (NO_SIGNAL, None, OBJECTIVE, Trained(policy=True, value=True, has_signal=False)),
        (NO_SIGNAL, ALL, {}, Trained(policy=False, value=False, has_signal=False)),
        (NO_SIGNAL, ALL, KL, Trained(policy=True, value=False, has_signal=False)),
    ],
    ids=[
        "signal",
        "some masked",
        "warm-up",
        "warm-up, KL in the loss",
        "no signal",
        "no signal, KL in the loss",
        "no signal, warm-up, KL in the loss",
        "no signal, entropy bonus",
        "no signal, pretraining text",
        "no signal, user's objective",
        "all masked",
        "all masked, KL in the loss",
    ],
)
def test_what_an_iteration_trains(
    has_signal: bool, masked: torch.Tensor | None, options: dict[str, Any], wanted: Trained
) -> None:
    config = PPOConfig(**options)
    coefficients = CoefficientControl(config).at(1)
    trained = what_to_train(has_signal, masked, config, coefficients)
    assert trained == wanted
    assert trained.by_reward == (wanted.policy and wanted.has_signal)


def test_the_policy_joins_after_the_warm_up() -> None:
    config = PPOConfig(**WARM_UP)
    control = CoefficientControl(config)
    policies = [what_to_train(SIGNAL, None, config, control.at(i)).policy for i in range(4)]
    assert policies == [False, False, True, True]


def test_a_kl_in_the_loss_counts_while_its_schedule_has_a_coefficient() -> None:
    config = PPOConfig(iterations=3, kl_loss_coef=0.1, schedules=["kl_loss_coef=linear:0"])
    control = CoefficientControl(config)
    policies = [what_to_train(NO_SIGNAL, None, config, control.at(i)).policy for i in range(3)]
    assert policies == [True, True, False]
