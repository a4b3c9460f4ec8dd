"""The trainer learns: the reward rises, with a value function and without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from runs import LEARNING, assert_learns, make_trainer

WITHOUT_VALUES: dict[str, Any] = {"vf_coef": 0.0, "samples_per_prompt": 4}


@pytest.mark.parametrize(
    ("advantage", "options"),
    [
        ("gae", {}),
        ("rloo", WITHOUT_VALUES),
        pytest.param("reinforce", WITHOUT_VALUES, marks=pytest.mark.slow),
        pytest.param(
            "group", WITHOUT_VALUES | {"whiten_advantages": False}, marks=pytest.mark.slow
        ),
    ],
)
def test_the_reward_rises(advantage: str, options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.CONFIGS["llama"]())
    trainer = make_trainer(tmp_path, causal_lm=model, advantage=advantage, **LEARNING, **options)
    trainer.train()
    assert_learns(trainer)
