"""A resumed run ends in the same bits as an uninterrupted one, because its state is saved."""

from __future__ import annotations

import json
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import environments
import pytest
import tiny
import torch

from fastppo.ppo import state as state_module
from fastppo.ppo import step_control
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.state import RunState
from fastppo.ppo.trained import Trained
from fastppo.ppo.trainer import PPOTrainer
from runs import fresh_state, make_trainer

# ------------------------------------------------------------------------------------- the state

CONFIG = PPOConfig(
    kl_controller="adaptive", kl_coef=0.3, entropy_coef=0.01, schedules=["entropy_coef=target:1.5"]
)


def _used(config: PPOConfig) -> RunState:
    """Return a state that differs from the initial one everywhere."""
    state = fresh_state(config)
    state.best_evaluation = 0.5
    state.successes = {3: "01", 0: "1"}
    for number, name in enumerate(state_module.COUNTERS, 11):
        setattr(state, name, number)
    for number, name in enumerate(step_control.COUNTERS, 21):
        setattr(state.step_control, name, number)
    assert isinstance(state.step_control, step_control.AutoStepControl)
    state.step_control.adaptive.rate = 3e-4
    state.coefficient_control.update({"kl": 60.0, "entropy": 1.0}, 16, Trained())
    state.score_scale.update(torch.tensor([1.0, 2.0, 6.0]))
    for kl in (1.0, 2.0, 4.0):
        state.watch({"kl": kl})
    return state


def test_the_state_round_trips_through_json() -> None:
    used = _used(CONFIG)
    restored = fresh_state(CONFIG)
    fresh = restored.state_dict()
    restored.load_state_dict(json.loads(json.dumps(used.state_dict())))
    for name, value in restored.state_dict().items():
        assert value != fresh[name], f"{name} is as it was at the start"
        assert value == used.state_dict()[name], name
    assert restored.score_scale == used.score_scale
    assert restored.watch.state_dict() == used.watch.state_dict()


def test_every_field_of_the_state_is_saved() -> None:
    """A field that is added to the state is not forgotten in a checkpoint."""
    names = {field.name for field in fields(RunState)}
    assert names == fresh_state(CONFIG).state_dict().keys()


def test_an_evaluation_is_the_best_above_all_before_it() -> None:
    state = fresh_state(CONFIG)
    assert [state.take_evaluation(reward) for reward in (-2.0, -3.0, -2.0, -1.0)] == [
        True,
        False,
        False,
        True,
    ]
    assert state.best_evaluation == -1.0


def test_only_user_thresholds_warn_about_absent_metrics() -> None:
    assert fresh_state(PPOConfig()).watch.expected == []
    watch = fresh_state(PPOConfig(warn_if=["kl > 50", "klx > 3"], stop_if=["y < 1"])).watch
    assert [str(threshold) for threshold in watch.expected] == ["klx > 3", "y < 1"]
    assert [str(threshold) for threshold in watch.warn_if] == ["kl > 50", "klx > 3"]
    assert [str(threshold) for threshold in watch.stop_if] == ["y < 1"]
    assert fresh_state(PPOConfig(iterations=2)).watch.absent_after == 2


# ------------------------------------------------------------------------------- a run that goes on


def _trainer(directory: Path, **options: Any) -> PPOTrainer:
    chosen = {
        "checkpoint_interval": 1,
        "lr_schedule": "cosine",
        "warmup_steps": 3,
        "kl_controller": "adaptive",
    }
    return make_trainer(directory, **chosen | options)


def _same_weights(one: PPOTrainer, other: PPOTrainer) -> bool:
    both = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in both)


def _whole_and_resumed(
    tmp_path: Path, cut: int, iterations: int, **options: Any
) -> tuple[PPOTrainer, PPOTrainer]:
    """Train without interruption, and with a new trainer that resumes after `cut` iterations."""
    uninterrupted = make_trainer(tmp_path / "whole", iterations=iterations, **options)
    uninterrupted.train()
    make_trainer(tmp_path / "cut", iterations=cut, **options).train()
    random.seed(99)  # the checkpoint replaces it
    resumed = make_trainer(tmp_path / "cut", iterations=iterations, resume=True, **options)
    resumed.train()
    return uninterrupted, resumed


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": "auto"},
        {"learning_rate": "auto", "value_model": "critic", "ppo_epochs": 4},
        {"reference_refresh": 2, "learning_rate": 1e-2, "kl_coef": 0.5},
        {"reference_refresh": 2, "learning_rate": 1e-2, "kl_coef": 0.5, "lora_rank": 4},
        {"value_model": "critic"},
        {"score_normalization": "running"},
        {"objective": "penalty", "learning_rate": 1e-2},
        {"param_dtype": "bfloat16", "model_dtype": "bfloat16"},
        {"ptx_coef": 1.0, "ptx_batch_size": 3},
        {
            **environments.OPTIONS,
            "environment": environments.Calculator,
            "prompts": environments.PROMPTS,
            "rewards": [],
        },
    ],
    ids="-".join,
)
def test_a_resumed_run_ends_in_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    """The cases cover a refreshed reference, a critic, a running scale, a controlled β, the fp32
    masters of bf16 weights, the position in pretraining text and the random numbers of an
    environment."""
    if "ptx_coef" in options:
        options = options | {"ptx_data": tiny.saved_text(tmp_path / "text.jsonl")}
    uninterrupted, resumed = _whole_and_resumed(tmp_path, 3, 5, checkpoint_interval=3, **options)
    assert _same_weights(uninterrupted, resumed)
    assert uninterrupted.state.state_dict() == resumed.state.state_dict()


def test_an_existing_checkpoint_is_not_rewritten(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    files = [*trainer.save_checkpoint().iterdir()]
    before = [path.stat().st_mtime_ns for path in files]
    trainer.checkpoints.finish()
    assert [path.stat().st_mtime_ns for path in files] == before


def test_a_resumed_run_follows_its_own_options(tmp_path: Path) -> None:
    """Rates, decay and β come from the config, not from the checkpoint."""
    _trainer(tmp_path, iterations=2).train()
    options = {"learning_rate": 1e-6, "weight_decay": 0.1, "kl_coef": 0.5}
    options |= {"kl_controller": "fixed", "lr_schedule": "constant"}
    resumed = _trainer(tmp_path, resume=True, iterations=3, **options)
    metrics = resumed.train()
    assert metrics["learning_rate"] == pytest.approx(1e-6)
    assert metrics["kl_coef"] == 0.5
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(1e-6)
    assert resumed.optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_run_resumes_without_an_option_that_had_no_effect(tmp_path: Path) -> None:
    """The advice "set, but not used" can be followed in the middle of a run."""
    make_trainer(tmp_path, iterations=1, kl_loss_estimator="k1").train()
    make_trainer(tmp_path, iterations=2, resume=True).train()
    with pytest.raises(ValueError, match="kl_loss_estimator was 'k3' and is 'k1'"):
        make_trainer(
            tmp_path, iterations=3, resume=True, kl_loss_coef=0.1, kl_loss_estimator="k1"
        ).train()


def test_max_turns_of_an_environment_that_is_passed_in_stay_the_same(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        **environments.OPTIONS,
        "environment": environments.Calculator,
        "prompts": environments.PROMPTS,
    }
    make_trainer(tmp_path, iterations=1, **options).train()
    options |= {"max_turns": 3, "iterations": 2, "resume": True}
    with pytest.raises(ValueError, match="max_turns was 2 and is 3"):
        make_trainer(tmp_path, **options).train()
