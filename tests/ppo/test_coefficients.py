"""The coefficients of an iteration: the options, the schedules and the controllers."""

from __future__ import annotations

from typing import Any

import pytest

from fastppo.ppo.coefficients import FIRST_POLICY_BETA, NAMES, CoefficientControl
from fastppo.ppo.controllers import KL_CONTROLLERS, AdaptiveKL, FixedKL, PenaltyKL
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.trained import Trained

TRAINED = Trained()
ENTROPY_TARGET: dict[str, Any] = {
    "entropy_coef": 0.01,
    "schedules": ["entropy_coef=target:1.5"],
}


def test_without_schedules_the_coefficients_are_the_options() -> None:
    config = PPOConfig(
        clip_ratio=0.1,
        dual_clip=2.5,
        vf_coef=0.7,
        entropy_coef=0.02,
        kl_coef=0.3,
        kl_loss_coef=0.4,
        missing_eos_penalty=1.5,
        early_stop_kl=0.5,
    )
    coefficients = CoefficientControl(config).at(3)
    for name in NAMES - {"step_kl"}:
        assert getattr(coefficients, name) == getattr(config, name), name
    assert coefficients.step_kl == config.update_target
    assert coefficients.policy_kl_coef == 0.0
    assert (coefficients.iteration, coefficients.metrics) == (3, {})


@pytest.mark.parametrize(("high", "wanted"), [(None, (0.1, 0.1)), (0.3, (0.1, 0.3))])
def test_one_clip_ratio_is_both_sides_of_the_range(
    high: float | None, wanted: tuple[float, float]
) -> None:
    config = PPOConfig(clip_ratio=0.1, clip_ratio_high=high)
    assert CoefficientControl(config).at(0).clip_range == wanted


def test_the_schedules_apply_to_each_iteration() -> None:
    options: dict[str, Any] = {"iterations": 5, "value_head": "gradient"}
    config = PPOConfig(
        **options, entropy_coef=0.4, schedules=["entropy_coef=linear:0", "vf_coef=cosine:0.1"]
    )
    steady = CoefficientControl(PPOConfig(**options, schedules=["vf_coef=constant:0.1"]))
    assert [steady.at(i).vf_coef for i in (0, 3)] == [0.5, 0.5]
    control = CoefficientControl(config)
    scheduled = [control.at(i) for i in range(7)]
    assert [c.entropy_coef for c in scheduled] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0, 0, 0])
    assert [c.vf_coef for c in scheduled[::2]] == pytest.approx([0.5, 0.3, 0.1, 0.1])
    assert scheduled[1].metrics == {
        "schedule/entropy_coef": pytest.approx(0.3),
        "schedule/vf_coef": scheduled[1].vf_coef,
    }
    assert control.config.entropy_coef == 0.4, "the options of the run do not change"
    for name in NAMES - {"entropy_coef", "vf_coef", "step_kl"}:
        assert getattr(scheduled[3], name) == getattr(config, name), name


def test_the_weight_of_the_value_loss_depends_on_the_head() -> None:
    closed_form = {"value_head": "closed_form"}
    wanted = [
        ({}, 0.0),
        ({"vf_coef": 0.2}, 0.2),
        ({"schedules": ["vf_coef=linear:0"]}, 0.5),
        ({"value_head": "gradient"}, 0.5),
        ({"value_model": "critic"}, 0.5),
        ({"value_model": "critic", **closed_form}, 0.5),
        ({"value_model": "detached", "value_head": "gradient"}, 0.5),
    ]
    for options, weight in wanted:
        assert CoefficientControl(PPOConfig(**options)).at(0).vf_coef == weight, options


def test_kl_coef_follows_its_schedule_or_its_controller() -> None:
    scheduled = CoefficientControl(
        PPOConfig(iterations=3, kl_coef=0.2, schedules=["kl_coef=linear:0.1"])
    )
    assert scheduled.at(1).kl_coef == pytest.approx(0.15)
    controlled = CoefficientControl(PPOConfig(kl_controller="adaptive", kl_coef=0.2))
    assert controlled.at(1).kl_coef == 0.2
    controlled.controllers["kl_coef"].coef = 0.7
    assert controlled.at(1).kl_coef == 0.7


@pytest.mark.parametrize(
    ("name", "kind"), [("fixed", FixedKL), ("adaptive", AdaptiveKL), ("penalty", PenaltyKL)]
)
def test_kl_controller_chooses_the_controller(name: str, kind: type) -> None:
    """A fixed coefficient needs none, so that a schedule can change it."""
    assert KL_CONTROLLERS[name] is kind
    controllers = CoefficientControl(PPOConfig(kl_controller=name, kl_coef=0.3)).controllers
    if name == "fixed":
        assert controllers == {}
    else:
        assert type(controllers["kl_coef"]) is kind


@pytest.mark.parametrize(
    ("controller", "restored"), [("fixed", 0.3), ("adaptive", 0.7), ("penalty", 0.7)]
)
def test_a_fixed_coefficient_comes_from_the_options(controller: str, restored: float) -> None:
    """Those of a checkpoint come from its controllers."""
    options: dict[str, Any] = {"objective": "penalty", "learning_rate": 1e-5}
    moved = CoefficientControl(PPOConfig(kl_controller="penalty", kl_coef=0.3, **options))
    moved.controllers["kl_coef"].coef = 0.7
    moved.controllers["policy_kl_coef"].coef = 0.9
    control = CoefficientControl(PPOConfig(kl_controller=controller, kl_coef=0.3, **options))
    assert control.at(0).kl_coef == 0.3
    control.load_state_dict(moved.state_dict())
    assert control.at(0).kl_coef == restored
    assert control.at(0).policy_kl_coef == 0.9


def test_a_coefficient_stays_without_its_metric_or_during_the_warm_up() -> None:
    control = CoefficientControl(PPOConfig(kl_controller="penalty", kl_coef=0.1))
    control.update({"kl": 60.0}, 16, Trained(policy=False))
    control.update({}, 16, TRAINED)
    assert control.at(0).kl_coef == 0.1
    control.update({"kl": 60.0}, 16, TRAINED)
    assert control.at(0).kl_coef == 0.2


def test_masked_responses_count_for_the_kl_to_the_reference_alone() -> None:
    """The KL to the reference is that of all responses. The metrics of an update without a token in
    the loss are not measurements."""
    options = {**ENTROPY_TARGET, "learning_rate": 1e-5, "objective": "penalty"}
    control = CoefficientControl(PPOConfig(kl_controller="penalty", kl_coef=0.1, **options))
    all_masked = Trained(value=False, has_signal=False)
    control.update({"kl": 60.0, "policy_kl": 0.0, "entropy": 0.0}, 16, all_masked)
    coefficients = control.at(1)
    assert coefficients.kl_coef == 0.2
    assert coefficients.policy_kl_coef == FIRST_POLICY_BETA
    assert coefficients.entropy_coef == 0


def test_only_objective_penalty_has_a_coefficient_of_the_policy_kl() -> None:
    control = CoefficientControl(PPOConfig(objective="penalty", learning_rate=1e-5))
    assert control.at(0).policy_kl_coef == FIRST_POLICY_BETA
    assert control.at(0).metrics == {"policy_kl_coef": FIRST_POLICY_BETA}
    control.update({"policy_kl": 1.0}, 16, TRAINED)
    assert control.at(1).policy_kl_coef == 2 * FIRST_POLICY_BETA


def test_the_entropy_coefficient_follows_its_target_and_resumes() -> None:
    control = CoefficientControl(PPOConfig(**ENTROPY_TARGET))
    assert control.at(0).entropy_coef == 0
    control.update({"entropy": 1.2}, 16, TRAINED)
    assert control.at(1).entropy_coef == pytest.approx(0.015)
    resumed = CoefficientControl(PPOConfig(**ENTROPY_TARGET))
    resumed.load_state_dict(control.state_dict())
    assert resumed.controllers == control.controllers
    resumed.update({"entropy": 1.6}, 16, TRAINED)
    assert resumed.at(2).entropy_coef == 0
    changed = ENTROPY_TARGET | {"schedules": ["entropy_coef=target:2"]}
    resumed = CoefficientControl(PPOConfig(**changed))
    resumed.load_state_dict(control.state_dict())
    resumed.update({"entropy": 1.8}, 16, TRAINED)
    assert resumed.at(2).entropy_coef == pytest.approx(0.02), "the target of the options"
    with pytest.raises(ValueError, match="schedules"):
        PPOConfig(schedules=["kl_coef=target:1"])
