"""fp16 with a loss scale: the gradient is fp32's to rounding, and a step that overflows is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from fastppo.ppo.trainer import PPOTrainer
from fastppo.run.optimizer import LEAST_SCALE
from runs import first_experience, make_trainer, update_gradients

FP16: dict[str, Any] = {"precision": "fp16"}
ONE_STEP = {"iterations": 1, "ppo_epochs": 1, "minibatches": 1}


def _set_scale(trainer: PPOTrainer, scale: float) -> None:
    optimizer = trainer.optimizer
    optimizer.load_loss_scale(optimizer.loss_scale_state() | {"scale": scale})


def _weights(trainer: PPOTrainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.causal_lm.parameters()]


@pytest.mark.parametrize("more", [{}, {"ptx_coef": 0.5}, {"value_model": "detached"}])
def test_the_fp16_gradient_equals_fp32_up_to_rounding(more: dict, tmp_path: Path) -> None:
    """fp16 rounds to 2⁻¹¹ of a number, a few layers deep; the scale of 65536 is gone."""
    if "ptx_coef" in more:
        more = more | {"ptx_data": tiny.saved_text(tmp_path / "text.jsonl")}
    actual, wanted = (
        update_gradients(tmp_path / name, **more, precision=name) for name in ("fp16", "fp32")
    )
    for name, gradient in wanted.items():
        if gradient is not None and gradient.norm() > 0:
            off = (actual[name] - gradient).norm() / gradient.norm()
            assert off < 0.05, (name, off)


def test_products_and_frozen_matrices_are_fp16(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, lora_rank=4, **FP16)
    layer = trainer.model.causal_lm.model.layers[0].self_attn.q_proj  # type: ignore[union-attr]
    assert layer.base_layer.weight.dtype == torch.float16
    assert layer.lora_A["default"].weight.dtype == torch.float32
    with trainer.model.autocast():
        assert layer(torch.ones(2, 32)).dtype == torch.float16


def test_an_overflow_skips_the_step_and_halves_the_scale(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **FP16, **ONE_STEP)
    _set_scale(trainer, 2.0**60)
    before = _weights(trainer)
    metrics = trainer.train()
    assert metrics["overflowed_steps"] == 1
    assert metrics["skipped_steps"] == 0
    assert metrics["loss_scale"] == 2.0**59
    assert "grad_norm" not in metrics, "it is the scale's"
    torch.testing.assert_close(before, [*trainer.model.causal_lm.parameters()], rtol=0, atol=0)
    assert trainer.step_control.optimizer_step == 1


def test_gradients_are_clipped_after_unscaling(tmp_path: Path) -> None:
    """Were it clipped before, every norm would be 65536 times as large."""
    norms = {
        name: make_trainer(tmp_path / name, precision=name, **ONE_STEP).train()["grad_norm"]
        for name in ("fp16", "fp32")
    }
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.05)


@pytest.mark.parametrize("broken", ["gradient under the least scale", "loss"])
def test_a_nonfinite_number_without_overflow_skips_the_step(broken: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **FP16, **ONE_STEP)
    experience = first_experience(trainer)
    if broken == "loss":
        experience.advantages[0] = float("nan")
    else:
        _set_scale(trainer, LEAST_SCALE)
        weight = trainer.model.causal_lm.lm_head.weight
        weight.register_hook(lambda gradient: gradient * float("inf"))
    metrics = trainer.update(experience, trainer.begin_iteration())
    assert (metrics["skipped_steps"], metrics["overflowed_steps"]) == (1, 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_trained_weights_must_be_fp32(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="scales gradients of fp32 weights, so trained weights"):
        make_trainer(tmp_path, model_dtype=dtype, **FP16)
