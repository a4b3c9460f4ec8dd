"""`learning_rate: auto`: the rate follows the KL of the updates."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastppo.ppo.coefficients import CoefficientControl
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.rate_control import (
    FIRST_RATE,
    LARGEST_RATE,
    LEAST_SHARE,
    MOST_SHARE,
    AdaptiveRate,
)
from fastppo.ppo.step_control import AutoStepControl
from fastppo.ppo.trainer import PPOTrainer
from fastppo.run.log import read_jsonl
from runs import LEARNING, first_experience, first_prompts, make_trainer

TARGET = 0.03


def _update(
    control: AdaptiveRate,
    steps: int,
    right_rate: float,
    noise: float = 0.0,
    entropy: float = 1.0,
    factor: float = 1.0,
) -> None:
    """Simulate an update whose KL grows linearly with the steps and reaches the target at
    `right_rate`."""
    control.begin_update(TARGET, steps)
    path = 0.0
    for step in range(steps):
        kl = TARGET * (path / right_rate) ** 2 / (max(step, 1) * steps)
        control.before_step(kl * random.lognormvariate(-(noise**2) / 2, noise))
        path += factor * control.rate
        control.step_taken(factor)
    control.end_update(entropy)


@pytest.mark.parametrize("steps", [2, 4, 16])
@pytest.mark.parametrize("right_rate", [3e-6, 1e-4, 2e-3])
def test_a_few_updates_find_the_rate(steps: int, right_rate: float) -> None:
    control = AdaptiveRate()
    for _ in range(4):
        _update(control, steps, right_rate)
    assert right_rate / 2 < control.rate < 2 * right_rate


@pytest.mark.parametrize(
    ("steps", "share", "updates"), [(2, 0.1, 4), (2, 0.2, 6), (8, 0.04, 4), (16, 0.04, 6)]
)
@pytest.mark.parametrize("first_rate", [1e-6, FIRST_RATE])
def test_the_search_sees_through_a_kl_of_rounding(
    first_rate: float, steps: int, share: float, updates: int
) -> None:
    """In bf16, any step causes a KL, here a share of the target. Multiplied by the square of 16
    steps, 4 % look like ten times the target."""
    random.seed(0)
    control = AdaptiveRate()
    control.rate = first_rate
    for _ in range(updates):
        control.begin_update(TARGET, steps)
        path = 0.0
        for step in range(steps):
            rounding = share * random.uniform(0.9, 1.1) if step else 0.0
            movement = (path / (1e-4 * steps)) ** 2 * steps / max(step, 1)
            control.before_step(TARGET * (movement + rounding))
            path += control.rate
            control.step_taken()
        control.end_update(entropy=1.0)
    assert 5e-5 < control.rate < 2e-4


def test_an_outlier_that_ends_the_search_does_not_bound_the_rate() -> None:
    control = AdaptiveRate()
    control.begin_update(TARGET, 8)
    control.before_step(0.0)
    control.step_taken()
    control.before_step(0.9 * TARGET)
    control.end_update(entropy=1.0)
    assert not control.is_searching
    for _ in range(20):
        _update(control, 8, 1e-4)
    assert 5e-5 < control.rate < 2e-4


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_the_rate_follows_a_change(factor: float) -> None:
    control = AdaptiveRate()
    for _ in range(5):
        _update(control, 8, 1e-4)
    for _ in range(12):
        _update(control, 8, factor * 1e-4)
    assert factor * 5e-5 < control.rate < factor * 2e-4


@pytest.mark.parametrize(
    ("entropy", "share"),
    [
        (0.25, 0.5),
        (1e-4, LEAST_SHARE),
        (2.25, 1.5),
        (100.0, MOST_SHARE),
        (math.nan, 1.0),
        (0.0, 1.0),
    ],
)
def test_the_target_follows_the_entropy(entropy: float, share: float) -> None:
    control = AdaptiveRate()
    for _ in range(8):
        _update(control, 8, 1e-4, entropy=1.0)
    for _ in range(12):
        _update(control, 8, 1e-4, entropy=entropy)
    assert control.rate == pytest.approx(share**0.5 * 1e-4, rel=0.1)


def test_noise_hardly_changes_the_rate() -> None:
    random.seed(0)
    control = AdaptiveRate()
    rates = []
    for _ in range(300):
        _update(control, 4, 1e-4, noise=1.5)
        rates.append(control.rate)
    assert 5e-5 < statistics.median(rates[100:]) < 1.5e-4
    assert max(rates[100:]) < 5e-4


def test_the_kl_of_an_earlier_policy_is_not_counted() -> None:
    """Responses of a policy that is one update old have a KL before the first step."""
    rates = []
    for start in (0.0, 0.5):
        control = AdaptiveRate()
        control.rate = 1e-4
        control.begin_update(TARGET, 2)
        control.before_step(start)
        control.step_taken()
        control.before_step(start + 0.01)
        control.step_taken()
        control.end_update(entropy=1.0)
        rates.append(control.rate)
    assert rates[0] == pytest.approx(rates[1])


def test_the_rate_is_bounded_if_nothing_moves() -> None:
    control = AdaptiveRate()
    for _ in range(20):
        control.begin_update(TARGET, 8)
        for _ in range(8):
            control.before_step(0.0)
            control.step_taken()
        control.end_update(entropy=1.0)
    assert control.rate == LARGEST_RATE


@pytest.mark.parametrize("kls", [(0.0, math.nan), (math.nan, 0.0), (math.inf, math.nan)])
def test_a_kl_that_is_not_finite_is_ignored(kls: tuple[float, float]) -> None:
    control = AdaptiveRate()
    control.begin_update(TARGET, 2)
    for kl in kls:
        control.before_step(kl)
        control.step_taken()
    control.end_update(entropy=1.0)
    assert FIRST_RATE <= control.rate <= 10 * FIRST_RATE


def test_a_policy_that_has_learned_its_task_does_not_raise_the_rate_for_ever() -> None:
    control = AdaptiveRate()
    for _ in range(6):
        _update(control, 8, 1e-4)
    rate = control.rate
    for _ in range(50):
        _update(control, 8, 1.0)
    assert rate < control.rate <= 4.01 * rate


def test_without_movement_the_rate_is_stuck() -> None:
    control = AdaptiveRate()
    for _ in range(10):
        _update(control, 4, 1e9)
    assert control.is_stuck


@pytest.mark.parametrize("factor", [0.5, 0.01])
def test_a_schedule_does_not_change_the_rate(factor: float) -> None:
    """The KL of an update falls with the square of its factor."""
    control = AdaptiveRate()
    for _ in range(8):
        _update(control, 8, 1e-4)
    rate = control.rate
    for _ in range(8):
        _update(control, 8, 1e-4, factor=factor)
    assert control.rate == pytest.approx(rate, rel=0.05)


def test_the_search_waits_for_the_end_of_a_warm_up() -> None:
    control = AdaptiveRate()
    for update in range(8):
        _update(control, 8, 1e-4, factor=min(1.0, (update + 0.01) / 4))
    assert 5e-5 < control.rate < 2e-4


# --------------------------------------------------------------------------------------- in a run


@pytest.mark.parametrize(
    "options",
    [
        {},
        # A lower target: the largest rate binds for so small a model.
        {"ppo_epochs": 1, "step_kl": 0.005},
        {"lora_rank": 4, "step_kl": 0.01},
        {"value_model": "critic"},
        {"value_head": "gradient"},
        {"param_dtype": "bfloat16", "model_dtype": "bfloat16"},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_updates_reach_step_kl(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, **{**LEARNING, "learning_rate": "auto", "iterations": 7, **options}
    )
    trainer.train()
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    reached = statistics.median(record["update_kl"] for record in records[2:7])
    assert trainer.config.update_target / 4 < reached < 2 * trainer.config.update_target
    share = min(max(records[-2]["entropy"] ** 0.5, LEAST_SHARE), MOST_SHARE)
    assert records[-1]["target_kl"] == pytest.approx(share * trainer.config.update_target)
    assert adaptive_rate(trainer).rate > 10 * FIRST_RATE


def test_no_forward_pass_is_added(tmp_path: Path) -> None:
    counts = []
    for rate in ("auto", 1e-3):
        trainer = make_trainer(tmp_path / str(rate), **{**LEARNING, "learning_rate": rate})
        passes: list[int] = []
        trunk = trainer.model.causal_lm.base_model
        trunk.register_forward_hook(lambda *given, seen=passes: seen.append(1))
        trainer.update(first_experience(trainer), trainer.begin_iteration())
        counts.append(len(passes))
    assert counts[0] == counts[1] > trainer.config.ppo_epochs


def test_equal_rewards_move_nothing(tmp_path: Path) -> None:
    """Neither the policy nor the rate: whitening would amplify the value function's error."""
    equal = False

    def reward(completions: list[str], **columns: Any) -> list[float]:
        return [0.5 if equal else text.split().count("w7") / 8 for text in completions]

    trainer = make_trainer(
        tmp_path,
        **{**LEARNING, "learning_rate": "auto", "value_head": "gradient", "rewards": [reward]},
    )
    for _ in range(3):
        _iterate(trainer)
    rate = adaptive_rate(trainer).rate
    weights = [p.detach().clone() for p in trainer.model.causal_lm.parameters()]
    head = trainer.model.value_function.head.weight.detach().clone()
    equal = True
    metrics = _iterate(trainer)
    assert metrics["no_signal"] == 1
    assert adaptive_rate(trainer).rate == rate
    for before, after in zip(weights, trainer.model.causal_lm.parameters(), strict=True):
        assert torch.equal(before, after)
    assert not torch.equal(head, trainer.model.value_function.head.weight)


def adaptive_rate(trainer: PPOTrainer) -> AdaptiveRate:
    """The rate of a trainer with learning_rate=auto."""
    assert isinstance(trainer.step_control, AutoStepControl)
    return trainer.step_control.adaptive


def _iterate(trainer: PPOTrainer) -> dict[str, float]:
    prompts = first_prompts(trainer, trainer.config.rollout_batch_size)
    metrics = trainer.iterate(prompts, trainer.begin_iteration()).metrics
    trainer.state.iteration += 1
    return metrics


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ppo_epochs": 1, "minibatches": 1}, "minibatches must be > 1"),
        ({"objective": "penalty"}, "objective=penalty"),
        ({"learning_rate": "fast"}, "learning_rate must be a finite number or auto, got 'fast'"),
        (
            {"value_model": "critic", "value_warmup_iterations": 2},
            "value_warmup_iterations needs value_learning_rate",
        ),
    ],
)
def test_combinations_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**options)


@pytest.mark.parametrize(("responses", "expected"), [(16, 0.01), (64, 0.02), (256, 0.04)])
def test_step_kl_grows_with_the_batch_up_to_a_bound(responses: int, expected: float) -> None:
    config = PPOConfig(rollout_batch_size=responses)
    assert config.update_target == expected
    assert replace(config, rollout_batch_size=4096).update_target == 0.04
    assert replace(config, learning_rate=1e-5).step_kl is None
    assert replace(config, step_kl=0.01).update_target == 0.01
    falling = replace(config, iterations=3, schedules=["step_kl=linear:0.001"])
    control = CoefficientControl(falling)
    assert control.at(0).step_kl == pytest.approx(expected)
    assert control.at(2).step_kl == pytest.approx(0.001)
