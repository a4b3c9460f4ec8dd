"""A step that is not finite is not taken, and its batch is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastppo.data.world import World
from fastppo.ppo.skipped_steps import MOST_IN_A_ROW, skip_step
from fastppo.ppo.state import RunState
from fastppo.run.skipped import load_batch
from runs import first_experience, make_trainer, one_step


def test_a_non_finite_gradient_skips_the_step_and_at_last_stops_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    experience = first_experience(trainer)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    experience.advantages[0] = float("nan")
    assert trainer.update(experience, one_step(trainer))["skipped_steps"] == 1
    for old, parameter in zip(before, trainer.model.parameters(), strict=True):
        assert torch.equal(old, parameter)
    tensors, record = load_batch(tmp_path / "run" / "skipped" / "step-000000.safetensors")
    assert record["non_finite"] == "loss"
    assert "causal_lm.lm_head.weight" in record["parameters"]
    assert tensors["advantages"].isnan().sum() == 1
    assert {"tokens", "old_logprobs", "returns", "response_lengths"} <= tensors.keys()
    with pytest.raises(FloatingPointError, match=f"{MOST_IN_A_ROW} optimiser steps in a row"):
        trainer.update(experience, one_step(trainer, ppo_epochs=9))


def test_the_sentence_names_what_was_not_finite_and_where_its_batch_is(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    state = RunState.of(trainer.config)
    state.iteration = 4
    state.optimizer_step = 17
    experience = first_experience(trainer)
    sentence = skip_step(
        experience,
        {"loss": 1.0, "grad_norm": float("inf"), "value_grad_norm": 2.0},
        state,
        model=trainer.model,
        output_dir=trainer.config.output_dir,
        world=World(),
    )
    path = tmp_path / "run" / "skipped" / "step-000017.safetensors"
    assert sentence == f"optimiser step 17: grad_norm inf; skipped, batch in {path}"
    assert (state.skipped_steps, state.skipped_in_a_row) == (1, 1)
    tensors, record = load_batch(path)
    assert record == {"iteration": 4, "step": 17, "non_finite": "grad_norm", "parameters": []}
    assert torch.equal(tensors["tokens"], experience.batch.tokens)
