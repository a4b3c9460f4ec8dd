"""fp32 masters of bfloat16 weights: small updates add up, gradients too, and a resume is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from fastppo.models.policy import ActorCritic
from fastppo.ppo.optimizer import make_optimizer
from fastppo.ppo.options.config import PPOConfig
from fastppo.run.optimizer import Optimizer
from runs import adamw, first_experience, make_trainer


def _pair(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Parameter, nn.Parameter, Optimizer]:
    """A weight of the dtype, one of fp32, and their optimizer."""
    torch.manual_seed(0)
    rounded = nn.Parameter(torch.randn(3, 4).to(dtype))
    in_fp32 = nn.Parameter(torch.randn(5))
    groups: list[dict[str, Any]] = [{"params": [rounded]}, {"params": [in_fp32], "lr": 0.5}]
    return rounded, in_fp32, adamw(groups, lr=1e-4, fused=True)


def _step(rounded: nn.Parameter, in_fp32: nn.Parameter, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    (rounded.float().sum() + in_fp32.sum()).backward()
    optimizer.step()


def test_updates_below_bf16_resolution_accumulate() -> None:
    """1e-4 on weights near 1: bfloat16 alone would round each of them away."""
    rounded, in_fp32, optimizer = _pair()
    start = rounded.detach().float().clone()
    for _ in range(100):
        _step(rounded, in_fp32, optimizer)
    exact = nn.Parameter(start.clone())
    plain = torch.optim.AdamW([exact], lr=1e-4, fused=True)
    for _ in range(100):
        exact.grad = torch.ones_like(exact)
        plain.step()
    (master,) = optimizer.param_groups[0]["params"]
    assert torch.equal(master, exact), "AdamW on the fp32 weight, bit for bit"
    assert torch.equal(rounded, master.bfloat16())
    assert (rounded.float() - start).abs().max() > 0.005
    assert rounded.dtype == torch.bfloat16


def test_gradients_accumulate_in_fp32() -> None:
    """256 + 1 is 256 in bfloat16."""
    rounded, _, optimizer = _pair()
    (rounded * 256).sum().backward()
    for _ in range(3):
        (rounded * 1).sum().backward()
    assert rounded.grad is not None
    assert rounded.grad.dtype == torch.float32
    assert (rounded.grad == 259).all()
    optimizer.zero_grad()
    assert rounded.grad is None


def test_clipping_scales_the_models_gradients() -> None:
    model = ActorCritic(tiny.model().bfloat16())
    config = PPOConfig(max_grad_norm=0.5)
    optimizer = make_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape)
    count = sum(p.numel() for p in model.parameters())
    norms = optimizer.clip_gradients(config.max_grad_norm)
    assert norms["grad_norm"].item() == pytest.approx(count**0.5)
    after = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert after.item() == pytest.approx(0.5, rel=1e-4)


# ----------------------------------------------------------------------------------- in a trainer


def _bf16(tmp_path: Path, **options: Any) -> Any:
    """A trainer whose trunk was loaded in bfloat16."""
    trainer = make_trainer(tmp_path, param_dtype="bfloat16", model_dtype="bfloat16", **options)
    dtypes = {p.dtype for p in trainer.model.causal_lm.parameters()}
    assert dtypes == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.value_function.head.parameters()} == {torch.float32}
    return trainer


@pytest.mark.parametrize("value_model", ["shared", "critic"])
def test_every_trained_weight_has_an_fp32_master(value_model, tmp_path: Path) -> None:
    trainer = _bf16(tmp_path, value_model=value_model)
    masters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in masters} == {torch.float32}
    trained = {id(p) for p in trainer.model.parameters() if p.requires_grad}
    assert {id(p) for p in trainer.optimizer.weights} == trained
    experience = first_experience(trainer)
    before = [p.detach().clone() for p in masters]
    metrics = trainer.update(experience, trainer.begin_iteration())
    assert metrics["skipped_steps"] == 0
    assert all((p != q).any() for p, q in zip(masters, before, strict=True) if p.dim() >= 2)
    for weight, master in zip(trainer.optimizer.weights, masters, strict=True):
        assert torch.equal(weight, master.to(weight.dtype))
