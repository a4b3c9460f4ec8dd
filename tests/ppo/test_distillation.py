"""On-policy distillation: a run without rewards that learns a teacher's distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from processes import ROOT

from fastppo.ppo.options.config import PPOConfig
from fastppo.run.options import read_yaml
from runs import make_trainer, records


def _teacher(scale: float) -> Any:
    """A model with other weights and larger logits."""
    teacher = tiny.model(seed=1)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(scale)
    return teacher


@pytest.mark.slow
def test_distillation_reaches_its_teacher(tmp_path: Path) -> None:
    """`examples/distill.yaml` ends within 0.05 nats per token of a teacher."""
    options = read_yaml(ROOT / "examples" / "distill.yaml", PPOConfig)
    for name in ("model", "prompts", "reference_model", "output_dir"):
        del options[name]
    options |= {"iterations": 80, "minibatches": 4, "microbatch_size": 64}
    options |= {"learning_rate": 5e-3, "lr_schedule": "cosine"}
    trainer = make_trainer(tmp_path, **options, reference=_teacher(4))
    trainer.train()
    lines = records(trainer)
    assert lines[0]["kl_loss"] > 0.5
    assert sum(line["kl_loss"] for line in lines[-5:]) / 5 < 0.05


def test_the_kl_to_a_teacher_is_a_reward_of_its_own(tmp_path: Path) -> None:
    options = {"kl_coef": 1.0, "gamma": 0.0, "iterations": 10, "rollout_batch_size": 64}
    trainer = make_trainer(
        tmp_path, rewards=[], reference=_teacher(8), learning_rate=3e-3, **options
    )
    trainer.train()
    lines = records(trainer)
    assert lines[-1]["kl_per_token"] < 0.8 * lines[0]["kl_per_token"]


def test_a_run_without_rewards_needs_a_teacher(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="or reference_model as a teacher"):
        make_trainer(tmp_path, rewards=[], kl_coef=0.1).train()
    options = {"kl_coef": 0.0, "kl_loss_coef": 1.0, "learning_rate": "auto"}
    with pytest.raises(ValueError, match="with kl_coef=0 it must be a number"):
        make_trainer(tmp_path, rewards=[], reference=tiny.model(seed=1), **options).train()
