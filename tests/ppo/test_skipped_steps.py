"""A step that is not finite is not taken, and too many stop the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastppo.ppo.config import PPOConfig
from fastppo.ppo.skipped_steps import MOST_IN_A_ROW, skip_step
from fastppo.ppo.state import RunState
from runs import first_experience, make_trainer, one_step


def test_a_non_finite_gradient_skips_the_step_and_at_last_stops_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    experience = first_experience(trainer)
    before = [p.detach().clone() for p in trainer.model.causal_lm.parameters()]
    experience.advantages[0] = float("nan")
    assert trainer.update(experience, one_step(trainer))["skipped_steps"] == 1
    for old, parameter in zip(before, trainer.model.causal_lm.parameters(), strict=True):
        assert torch.equal(old, parameter)
    with pytest.raises(FloatingPointError, match=f"{MOST_IN_A_ROW} optimiser steps in a row"):
        trainer.update(experience, one_step(trainer, ppo_epochs=9))


def test_the_sentence_names_what_was_not_finite() -> None:
    state = RunState.of(PPOConfig())
    state.optimizer_step = 17
    numbers = {"loss": 1.0, "grad_norm": float("inf"), "value_grad_norm": 2.0}
    assert skip_step(numbers, state) == "optimiser step 17: grad_norm inf; skipped"
    assert (state.skipped_steps, state.skipped_in_a_row) == (1, 1)
