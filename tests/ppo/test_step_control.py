"""The optimizer steps of an update: their rate, those that are skipped, and an early end."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastppo_kernels.records import SUMS
from torch import nn

from fastppo.data.batch import Batch
from fastppo.ppo.coefficients import CoefficientControl
from fastppo.ppo.experience import Experience
from fastppo.ppo.metrics import LossSums
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.step_control import (
    MOST_SKIPPED,
    STILL,
    AutoStepControl,
    SkippedStepsError,
    StepControl,
    make_step_control,
)
from fastppo.ppo.trained import Trained
from runs import ONE_STEP, adamw, first_experience, make_trainer

TRAINED = Trained()
EXPERIENCE = Experience(Batch.of([[4]] * 4, [[5, 6]] * 4))


class Update:
    """An update of one weight, with gradients and KLs that the test chooses."""

    def __init__(self, trained: Trained = TRAINED, **options: Any) -> None:
        self.weight = nn.Parameter(torch.zeros(1))
        self.said: list[str] = []
        options = {"learning_rate": 1e-3, "ppo_epochs": 3, "minibatches": 2, **options}
        config = PPOConfig(**options)
        group = {"params": [self.weight], "lr": 1e-3, "peak_lr": 1e-3}
        optimizer = adamw([group | {"adaptive": config.is_adaptive}])
        self.coefficients = CoefficientControl(config).at(0)
        self.experience = replace(EXPERIENCE, trained=trained)
        self.control = make_step_control(config, optimizer, lambda text, where: self.note(text))
        self.begin()

    def note(self, text: str) -> None:
        self.said.append(text)

    def begin(self) -> None:
        self.control.begin_update(self.experience, self.coefficients)
        self.control.begin_epoch()

    def step(self, gradient: float | None, *, kl: float = 0.0, loss: float = 1.0) -> Any:
        policy = torch.zeros(len(SUMS))
        policy[SUMS.index("approx_kl")] = 4 * kl
        policy[SUMS.index("tokens")] = 4
        one = torch.tensor(loss)
        self.weight.grad = None if gradient is None else torch.tensor([gradient])
        return self.control.step(LossSums(policy, one, one, torch.tensor(0.0), computed=8))


def test_learning_rate_chooses_the_control() -> None:
    assert type(Update().control) is StepControl
    assert type(Update(learning_rate="auto", ppo_epochs=4).control) is AutoStepControl


# ------------------------------------------------------------------------- steps that are not taken


def test_a_nonfinite_number_skips_the_step_and_is_named() -> None:
    update = Update()
    update.control.optimizer_step = 17
    metrics = update.step(math.inf)
    assert update.weight.item() == 0
    (sentence,) = update.said
    assert "18" in sentence
    assert "grad_norm inf" in sentence
    assert "loss" not in sentence
    assert metrics.keys() == {"loss", "learning_rate"}, "means leave out what is not finite"
    control = update.control
    assert (control.skipped_steps, control.skipped_in_a_row) == (1, 1)
    update.step(1.0, loss=math.nan)
    assert (control.skipped_steps, control.skipped_in_a_row) == (2, 2)
    assert update.weight.item() == 0
    update.step(1.0)
    assert (control.skipped_steps, control.skipped_in_a_row) == (2, 0)
    assert update.weight.item() != 0
    assert control.optimizer_step == 20, "skipped steps count"


def test_many_skipped_steps_in_a_row_end_the_run() -> None:
    update = Update()
    for _ in range(MOST_SKIPPED - 1):
        update.step(math.nan)
    with pytest.raises(SkippedStepsError, match="grad_norm nan") as error:
        update.step(math.nan)
    assert error.value.metrics == {"skipped_steps": MOST_SKIPPED}


def test_nonfinite_gradients_skip_steps_and_finally_stop_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **ONE_STEP)
    experience = first_experience(trainer)
    before = [p.detach().clone() for p in trainer.model.causal_lm.parameters()]
    experience.advantages[0] = float("nan")
    assert trainer.update(experience, trainer.begin_iteration())["skipped_steps"] == 1
    torch.testing.assert_close(before, [*trainer.model.causal_lm.parameters()], rtol=0, atol=0)
    longer = make_trainer(tmp_path, ppo_epochs=9, minibatches=1)
    with pytest.raises(FloatingPointError, match=f"{MOST_SKIPPED} optimizer steps in a row"):
        longer.update(experience, longer.begin_iteration())


def test_without_gradients_there_is_no_step_but_the_schedule_goes_on() -> None:
    update = Update(warmup_steps=4, lr_schedule="constant")
    rates = [update.step(None)["learning_rate"] for _ in range(2)]
    rates.append(update.step(1.0)["learning_rate"])
    assert rates == sorted({*rates}), "each step has a higher rate of the warm-up"
    assert update.control.optimizer_step == 1


# ---------------------------------------------------------------------------- the end of an update


def test_early_stop_kl_ends_the_update_after_an_epoch() -> None:
    update = Update(early_stop_kl=0.1)
    update.step(1.0, kl=0.0)
    update.step(1.0, kl=0.3)
    assert update.control.exceeds_limit, "the mean over the epoch's steps is 0.15"
    update.control.begin_epoch()
    update.step(1.0, kl=0.05)
    assert not update.control.exceeds_limit, "an epoch has its own mean"
    ended = update.control.end_update({"approx_kl": 0.1})
    assert ended["early_stopped"] == 0
    assert ended["optimizer_steps"] == 3


def test_early_stop_kl_ends_the_update_of_a_run(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, early_stop_kl=1e-4, learning_rate=3e-2, iterations=1, ppo_epochs=4
    )
    assert trainer.train()["early_stopped"] == 1
    assert trainer.step_control.optimizer_step == 2, "the minibatches of one epoch"


def test_iterations_that_do_not_move_the_policy_are_counted_in_a_row() -> None:
    update = Update()
    counts = []
    for kl in (STILL / 2, STILL / 2, 2 * STILL, STILL / 2):
        update.begin()
        update.step(1.0)
        counts.append(update.control.end_update({"approx_kl": kl})["still_iterations"])
    assert counts == [1, 2, 0, 1]


@pytest.mark.parametrize("trained", [Trained(has_signal=False), Trained(policy=False)])
def test_only_updates_by_rewards_count_as_still(trained: Trained) -> None:
    update = Update(trained)
    update.step(1.0)
    ended = update.control.end_update({"approx_kl": 0.0})
    assert ended["still_iterations"] == 0
    assert ended["no_signal"] == (not trained.has_signal)


def test_objective_penalty_reports_the_mean_kl_of_the_last_epoch() -> None:
    """The next coefficient follows from it."""
    update = Update(objective="penalty")
    update.step(1.0, kl=0.5)
    update.control.begin_epoch()
    update.step(1.0, kl=0.1)
    update.step(1.0, kl=0.3)
    assert update.control.end_update({"approx_kl": 0.3})["policy_kl"] == pytest.approx(0.2)
    update = Update()
    update.step(1.0, kl=0.5)
    assert "policy_kl" not in update.control.end_update({"approx_kl": 0.5})


# ------------------------------------------------------------------------------------ a checkpoint


def test_the_state_of_the_control_round_trips() -> None:
    used = Update(learning_rate="auto", ppo_epochs=4).control
    used.optimizer_step, used.skipped_steps, used.skipped_in_a_row = 3, 2, 1
    used.still_iterations = 4
    assert isinstance(used, AutoStepControl)
    used.adaptive.rate = 3e-4
    restored = Update(learning_rate="auto", ppo_epochs=4).control
    restored.load_state_dict(used.state_dict())
    assert restored.state_dict() == used.state_dict()
    assert restored.rate == 3e-4
    fixed = Update().control
    fixed.load_state_dict(used.state_dict())
    assert fixed.rate is None, "a number as the rate comes from the options"
    again = Update(learning_rate="auto", ppo_epochs=4).control
    again.load_state_dict(fixed.state_dict())
    assert again.optimizer_step == 3
