"""What a run remembers: a run that stopped and went on ends in the bits of one that never did."""

from __future__ import annotations

import json
import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import environments
import pytest
import tiny
import torch
from fastppo.ppo.kl_control import AdaptiveKL, FixedKL, PenaltyKL

from fastppo.ppo.evaluation import BestEvaluations
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.state import COUNTERS, MOST_SKIPPED, RunState
from fastppo.ppo.trainer import PPOTrainer
from runs import first_experience, make_trainer, one_step

# ------------------------------------------------------------------------------------- the state


def _used(config: PPOConfig) -> RunState:
    """A state of which nothing is as it was at the start."""
    state = RunState.of(config)
    state.evaluations = BestEvaluations(0.5, 2)
    state.successes = {3: "01", 0: "1"}
    for number, name in enumerate(COUNTERS, 11):
        setattr(state, name, number)
    state.kl_control.coef = 0.7
    state.policy_kl_control.coef = 0.9
    state.score_scale.update(torch.tensor([1.0, 2.0, 6.0]))
    state.usual_scores.add(0.4)
    state.rate_control.rate = 3e-4
    state.has_signal = False
    if state.entropy_control is not None:
        state.entropy_control.update(1.0)
    for kl in (1.0, 2.0, 4.0):
        state.watch({"kl": kl})
    return state


CONTROLLERS = {"fixed": FixedKL, "adaptive": AdaptiveKL, "penalty": PenaltyKL}


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_the_state_round_trips_through_json(controller: str) -> None:
    config = PPOConfig(kl_controller=controller, kl_coef=0.3, schedules=["entropy_coef=target:1.5"])
    used = _used(config)
    assert type(used.kl_control) is CONTROLLERS[controller]
    restored = RunState.of(config)
    fresh = restored.state_dict()
    restored.load_state_dict(json.loads(json.dumps(used.state_dict())))
    for name, value in restored.state_dict().items():
        if (controller, name) != ("fixed", "kl_coef"):  # that of the options
            assert value != fresh[name], f"{name} is as it was at the start"
            assert value == used.state_dict()[name], name
    assert restored.score_scale == used.score_scale
    assert restored.watch.state_dict() == used.watch.state_dict()


def test_every_field_of_the_state_is_saved() -> None:
    """A field that is added to the state is not forgotten in a checkpoint."""
    parts = {"kl_control", "policy_kl_control", "watch", "score_scale", "evaluations"}
    parts |= {"successes", "value_regression", "usual_scores", "rate_control", "has_signal"}
    parts |= {"entropy_control"}
    names = {field.name for field in fields(RunState)}
    assert names == parts | {*COUNTERS}


@pytest.mark.parametrize(
    ("controller", "restored"), [("fixed", 0.3), ("adaptive", 0.7), ("penalty", 0.7)]
)
def test_a_fixed_coefficient_comes_from_the_options(controller: str, restored: float) -> None:
    config = PPOConfig(kl_controller=controller, kl_coef=0.3)
    state = RunState.of(config)
    assert state.kl_control.coef == 0.3
    state.load_state_dict(_used(config).state_dict())
    assert state.kl_control.coef == restored
    assert state.policy_kl_control.coef == 0.9


def test_an_iteration_starts_with_its_scheduled_coefficient() -> None:
    config = PPOConfig(iterations=3, kl_coef=0.2, schedules=["kl_coef=linear:0.1"])
    state = RunState.of(config)
    state.begin_iteration(config.at(1))
    assert state.kl_control.coef == pytest.approx(0.15)
    moving = RunState.of(PPOConfig(kl_controller="adaptive", kl_coef=0.2))
    moving.kl_control.coef = 0.7
    moving.begin_iteration(PPOConfig(kl_controller="adaptive", kl_coef=0.2))
    assert moving.kl_control.coef == 0.7, "a controller moves it by itself"


def test_a_coefficient_is_constant_without_kl_or_during_warm_up() -> None:
    options = PPOConfig(kl_controller="penalty", kl_coef=0.1, value_warmup_iterations=1)
    state = RunState.of(options)
    state.move_coefficients({"kl": 60.0}, 16, options)
    state.iteration += 1
    state.move_coefficients({}, 16, options)
    assert state.kl_control.coef == 0.1
    state.move_coefficients({"kl": 60.0}, 16, options)
    assert state.kl_control.coef == 0.2


def test_only_user_thresholds_warn_about_absent_metrics() -> None:
    assert RunState.of(PPOConfig()).watch.expected == []
    watch = RunState.of(PPOConfig(warn_if=["kl > 50", "klx > 3"], stop_if=["y < 1"])).watch
    assert [str(threshold) for threshold in watch.expected] == ["klx > 3", "y < 1"]
    assert [str(threshold) for threshold in watch.warn_if] == ["kl > 50", "klx > 3"]
    assert [str(threshold) for threshold in watch.stop_if] == ["y < 1"]
    assert RunState.of(PPOConfig(iterations=2)).watch.absent_after == 2


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
    """The same run in one go, and in two with a new trainer for the second."""
    uninterrupted = make_trainer(tmp_path / "whole", iterations=iterations, **options)
    uninterrupted.train()
    make_trainer(tmp_path / "cut", iterations=cut, **options).train()
    random.seed(99)  # whatever stands there is replaced
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
    """A refreshed reference, a value function of its own, a running scale, a moving β, the fp32
    masters of bf16 weights, the place in a pretraining text, the generator that an environment
    draws from."""
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
    """Rates, decay and β of the config, not those that the checkpoint was written under."""
    _trainer(tmp_path, iterations=2).train()
    options = {"learning_rate": 1e-6, "weight_decay": 0.1, "kl_coef": 0.5}
    options |= {"kl_controller": "fixed"}
    resumed = _trainer(tmp_path, resume=True, iterations=3, lr_schedule="constant", **options)
    metrics = resumed.train()
    assert metrics["learning_rate"] == pytest.approx(1e-6)
    assert metrics["kl_coef"] == 0.5
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(1e-6)
    assert resumed.optimizer.param_groups[0]["weight_decay"] == 0.1


# ------------------------------------------------------------------------- steps that are not taken


def test_nonfinite_gradients_skip_steps_and_finally_stop_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    experience = first_experience(trainer)
    before = [p.detach().clone() for p in trainer.model.causal_lm.parameters()]
    experience.advantages[0] = float("nan")
    assert trainer.update(experience, one_step(trainer))["skipped_steps"] == 1
    torch.testing.assert_close(before, [*trainer.model.causal_lm.parameters()], rtol=0, atol=0)
    with pytest.raises(FloatingPointError, match=f"{MOST_SKIPPED} optimizer steps in a row"):
        trainer.update(experience, one_step(trainer, ppo_epochs=9))


def test_the_message_names_the_nonfinite_numbers() -> None:
    state = RunState.of(PPOConfig())
    state.optimizer_step = 17
    numbers = {"loss": 1.0, "grad_norm": float("inf"), "value_grad_norm": 2.0}
    assert state.skip_step(numbers) == "optimizer step 18: grad_norm inf; skipped"
    assert (state.skipped_steps, state.skipped_in_a_row) == (1, 1)


def test_the_entropy_coefficient_follows_its_target_and_resumes() -> None:
    options = PPOConfig(entropy_coef=0.01, schedules=["entropy_coef=target:1.5"])
    state = RunState.of(options)
    assert state.begin_iteration(options.at(0)).entropy_coef == 0
    state.move_coefficients({"entropy": 1.2}, 16, options)
    assert state.begin_iteration(options.at(1)).entropy_coef == pytest.approx(0.015)
    resumed = RunState.of(options)
    resumed.load_state_dict(state.state_dict())
    assert resumed.entropy_control == state.entropy_control
    resumed.move_coefficients({"entropy": 0.0}, 16, options, False)
    assert resumed.entropy_control.is_low == state.entropy_control.is_low
    resumed.move_coefficients({"entropy": 1.6}, 16, options)
    assert resumed.begin_iteration(options.at(2)).entropy_coef == 0
    changed = replace(options, schedules=["entropy_coef=target:2"])
    resumed = RunState.of(changed)
    resumed.load_state_dict(state.state_dict())
    assert resumed.entropy_control.target == 2, "the options' target"
    with pytest.raises(ValueError, match="the shape must be one of constant, linear, cosine"):
        PPOConfig(schedules=["kl_coef=target:1"])
