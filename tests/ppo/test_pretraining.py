"""Pretraining text: its gradient is added to each optimizer step."""

from __future__ import annotations

from pathlib import Path

import tiny
import torch

from runs import ONE_STEP, experience_of, first_experience, make_trainer


def test_ptx_adds_its_gradient_in_the_same_step(tmp_path: Path) -> None:
    data = tiny.saved_text(tmp_path / "text.jsonl")
    gradients = {}
    for coef in (0.0, 2.5):
        more = {"ptx_coef": coef, "ptx_data": data} if coef else {}
        more["microbatch_size"] = 3  # of the 8 blocks, so the parts are unequal
        trainer = make_trainer(tmp_path, max_grad_norm=1e9, **ONE_STEP, **more)
        torch.manual_seed(0)
        trainer.update(first_experience(trainer), trainer.begin_iteration())
        gradients[coef] = {n: p.grad.clone() for n, p in trainer.model.causal_lm.named_parameters()}
    fresh = tiny.model().eval()
    blocks = trainer.parts.pretraining.at(0, trainer.config.ptx_batch_size, trainer.config.seed)
    fresh(input_ids=blocks, labels=blocks).loss.backward()
    for name, parameter in fresh.named_parameters():
        wanted = gradients[0.0][name] + 2.5 * parameter.grad
        torch.testing.assert_close(gradients[2.5][name], wanted, rtol=1e-3, atol=1e-5)


def test_each_step_reads_the_next_blocks(tmp_path: Path) -> None:
    """An iteration that does not train the policy reads none."""
    data = tiny.saved_text(tmp_path / "text.jsonl")
    options = {"ptx_coef": 1.0, "ptx_data": data, "ptx_batch_size": 3}
    for warmup, steps in ((1, 0), (0, 4)):
        trainer = make_trainer(tmp_path, **options, value_warmup_iterations=warmup)
        batch = tiny.random_batch()
        experience, _ = experience_of(trainer, batch, torch.ones(len(batch)))
        metrics = trainer.update(experience, trainer.begin_iteration())
        assert trainer.state.ptx_seen == 3 * steps
        assert ("ptx_loss" in metrics) == (steps > 0)
