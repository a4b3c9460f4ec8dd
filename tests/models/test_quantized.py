"""4-bit weights: only adapters train, the policy is saved in full, and unsupported models raise."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from fastppo.models import quantized
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.plan.plan import make_plan
from fastppo.ppo.trainer import PPOTrainer
from runs import records

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)

NF4: dict[str, Any] = {"quantization": "nf4", "lora_rank": 4, "lora_alpha": 8.0}


def save(directory: Path, width: int = 64) -> None:
    """Save a Llama; by default its rows are whole blocks."""
    config = tiny.CONFIGS["llama"]()
    config.hidden_size, config.intermediate_size, config.head_dim = width, 2 * width, width // 4
    tiny.model_of(config).save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)


def _trainer(directory: Path, **options: Any) -> PPOTrainer:
    model = directory / "model"
    if not model.exists():
        save(model)
    config = PPOConfig(**tiny.options(directory, model=str(model), **{**NF4, **options}))
    return PPOTrainer(config, prompts=tiny.PROMPTS, rewards=[tiny.count_w7])


def _matrices(trainer: PPOTrainer) -> dict[str, Any]:
    modules = trainer.model.causal_lm.named_modules()
    return {name: module for name, module in modules if quantized.is_quantized(module)}


@needs_bitsandbytes
def test_a_run_trains_only_the_adapters(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, learning_rate=1e-2)
    matrices = _matrices(trainer)
    assert len(matrices) == 14, "seven per layer, without the lm-head"
    for module in matrices.values():
        assert module.weight.dtype == torch.uint8
        assert module.weight.quant_state.quant_type == "nf4"
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or "value_function" in name for name in trained)
    before = {name: quantized.dequantized_weight(module) for name, module in matrices.items()}
    trainer.train()
    for name, module in _matrices(trainer).items():
        assert torch.equal(quantized.dequantized_weight(module), before[name])
    lines = records(trainer)
    assert abs(lines[0]["kl"]) < 1e-3, "the reference is the quantized base"
    assert abs(lines[1]["kl"]) > 1e-3


@needs_bitsandbytes
def test_the_policy_is_saved_in_full(tmp_path: Path) -> None:
    """The saved model, loaded without bitsandbytes, has the policy's logits."""
    trainer = _trainer(tmp_path, learning_rate=1e-2)
    trainer.train()
    policy = tmp_path / "run" / "policy"
    assert "quantization_config" not in json.loads((policy / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(policy)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.arange(3, 23).view(2, 10)
    with torch.no_grad():
        wanted = trainer.model.causal_lm(ids).logits
        # Merged and separate adapters differ by fp32's rounding of logits of about 10.
        torch.testing.assert_close(loaded(ids).logits, wanted, rtol=1e-4, atol=1e-3)
        assert (base(ids).logits - wanted).abs().max() > 0.1


@needs_bitsandbytes
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    uninterrupted = _trainer(tmp_path / "whole", iterations=3)
    uninterrupted.train()
    _trainer(tmp_path / "parts", iterations=2).train()
    resumed = _trainer(tmp_path / "parts", iterations=3, resume=True)
    resumed.train()
    torch.testing.assert_close(
        resumed.model.state_dict(), uninterrupted.model.state_dict(), rtol=0, atol=0
    )


@needs_bitsandbytes
@pytest.mark.parametrize(
    ("save_model", "named"),
    [
        (partial(tiny.saved_model, architecture="gpt2"), "GPT2LMHeadModel"),  # transposed weights
        (partial(save, width=32), r"64 .*\[32, 32\]"),
    ],
)
def test_unsupported_matrices_are_refused(save_model, named, tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    with pytest.raises(ValueError, match=named):
        _trainer(tmp_path)


def test_a_model_passed_in_cannot_be_quantized(tmp_path: Path) -> None:
    config = PPOConfig(**tiny.options(tmp_path, **NF4))
    with pytest.raises(ValueError, match=r"quantization=nf4.* model"):
        PPOTrainer(config, model=tiny.model(), tokenizer=tiny.tokenizer())


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_a_plan_counts_4_bit_weights(param_dtype: str, tmp_path: Path) -> None:
    tiny.saved_model(tmp_path / "model")
    options = {"model": str(tmp_path / "model"), "lora_rank": 4, "param_dtype": param_dtype}
    plans = {
        kind: make_plan(PPOConfig(**tiny.options(tmp_path, **options, quantization=kind)), 8)
        for kind in ("none", "nf4")
    }
    layers = [layer for layer in tiny.model().model.layers.modules() if hasattr(layer, "weight")]
    counts = [layer.weight.numel() for layer in layers if isinstance(layer, torch.nn.Linear)]
    size = 4 if param_dtype == "float32" else 2
    saved = sum(count * size - quantized.bytes_of(count) for count in counts)
    for whole, small in zip(plans["none"].phases, plans["nf4"].phases, strict=True):
        assert whole.parts["policy weights"] - small.parts["policy weights"] == saved
        assert small.parts["dequantized"] == max(counts) * size
