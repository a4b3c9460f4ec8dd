"""8-bit moments: what they take, how near they are, and that a step below bf16's grid is taken."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from fastppo.ppo.eight_bit import NEEDED, adamw_8bit, empty_moments, is_quantized
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.plan.plan import make_plan
from fastppo.ppo.trainer import PPOTrainer
from runs import LEARNING, assert_learns, make_trainer

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


def _weights(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Parameter, nn.Parameter, Any]:
    """A matrix, a vector and their optimiser."""
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.ones(64, 128, dtype=dtype))
    vector = nn.Parameter(torch.ones(64, dtype=dtype))
    groups = [{"params": [matrix, vector], "lr": 1e-4, "peak_lr": 1e-4, "weight_decay": 0.0}]
    return matrix, vector, adamw_8bit()(groups, bf16_stochastic_round=True)


def _step(optimizer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    for weight in optimizer.weights:
        weight.grad = 1 + 0.1 * torch.randn(weight.shape, generator=generator)
    optimizer.step()


def test_without_torchao_the_option_is_refused(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    adamw_8bit.cache_clear()
    with pytest.raises(ValueError, match=f"optimizer=adamw8bit needs torchao.*{NEEDED}"):
        adamw_8bit()


@needs_torchao
def test_moments_take_two_bytes_and_matrices_have_no_master() -> None:
    matrix, vector, optimizer = _weights()
    _step(optimizer, 0)
    kept, master = optimizer.param_groups[0]["params"]
    assert kept is matrix
    assert master is not vector
    assert master.dtype == torch.float32
    assert matrix.grad.dtype == vector.grad.dtype == torch.float32
    for weight in (kept, master):
        held = optimizer.state[weight]
        codes = [
            x
            for name in ("exp_avg", "exp_avg_sq")
            for x in ([held[name].codes, held[name].scale] if weight is kept else [held[name]])
        ]
        counted = empty_moments(weight)
        assert sorted(x.nbytes for x in codes) == sorted(x.nbytes for x in counted)


@needs_torchao
def test_steps_below_the_weights_resolution_are_taken_on_average() -> None:
    """50 steps of 1e-4 from 1, where bf16's grid below is 1/256: rounded to nearest, none moves."""
    matrix, _, optimizer = _weights()
    for seed in range(50):
        _step(optimizer, seed)
    moved = 1 - matrix.detach().float()
    assert set(moved.unique().tolist()) > {0.0, 2**-8}
    # Each weight is moved by about 0.005; the mean of 8192 tells that to 2 %.
    assert moved.mean().item() == pytest.approx(0.005, rel=0.05)
    assert (optimizer.param_groups[0]["params"][1] - 1).mean().item() == pytest.approx(-0.005, 0.05)


@needs_torchao
def test_steps_on_fp32_weights_are_adamws_to_the_moments_digits() -> None:
    matrix, _, optimizer = _weights(torch.float32)
    exact = nn.Parameter(matrix.detach().clone())
    plain = torch.optim.AdamW([exact], lr=1e-4, weight_decay=0.0)
    for seed in range(50):
        _step(optimizer, seed)
        exact.grad = matrix.grad.clone()
        plain.step()
    off = (matrix - exact).detach().norm() / (exact - 1).detach().norm()
    assert 0 < off < 0.05


def _config() -> Any:
    """Its MLPs are large enough for blocks; they are most of its weights."""
    config = tiny.CONFIGS["llama"]()
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16
    return config


@needs_torchao
def test_the_reward_rises_and_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    def run(folder: str, iterations: int, **more: Any) -> PPOTrainer:
        torch.manual_seed(0)
        trainer = make_trainer(
            tmp_path / folder,
            causal_lm=tiny.AutoModelForCausalLM.from_config(_config()).bfloat16(),
            param_dtype="bfloat16",
            optimizer="adamw8bit",
            **LEARNING | more | {"iterations": iterations},
        )
        trainer.train()
        return trainer

    uninterrupted = run("whole", 20)
    assert any(map(is_quantized, uninterrupted.optimizer.weights))
    assert_learns(uninterrupted)
    run("parts", 18)
    resumed = run("parts", 20, resume=True)
    torch.testing.assert_close(
        resumed.model.state_dict(), uninterrupted.model.state_dict(), rtol=0, atol=0
    )


@needs_torchao
def test_a_plan_counts_two_bytes_a_weight(tmp_path: Path) -> None:
    model_config = _config()
    model_config.hidden_size, model_config.intermediate_size = 512, 1024
    model_config.save_pretrained(tmp_path / "model")
    config = PPOConfig(
        model=str(tmp_path / "model"),
        device="cpu",
        param_dtype="bfloat16",
        optimizer="adamw8bit",
        max_new_tokens=4,
    )
    parts = make_plan(config, 4).peak.parts
    with torch.device("meta"):
        model = tiny.AutoModelForCausalLM.from_config(model_config)
    count = sum(p.numel() for p in model.parameters())
    assert 2 * count < parts["optimiser states"] < 2.1 * count
    assert parts["fp32 masters"] < 0.01 * count
