"""LoRA adapters: only they are trained, and the saved policy is a plain model."""

from __future__ import annotations

import sys

import architectures
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from fastppo.data.batch import Batch
from fastppo.models.adapters import add_adapters, merged_state
from fastppo.models.device import cast_frozen
from fastppo.models.policy import ActorCritic, LanguageModel

BATCH = Batch.of([[5, 9], [7, 8, 6, 12]], [[10, 11, 1], [13, 3]])


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_a_policy_with_adapters_saves_a_plain_model_and_is_its_own_reference(
    architecture: str, tmp_path
) -> None:
    plain = tiny.model(architecture)
    before = {name: p.clone() for name, p in plain.state_dict().items()}
    peft = add_adapters(plain, rank=4, alpha=8.0)
    actor = ActorCritic(plain, peft)
    trained = [name for name, p in plain.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    untouched = actor.response_logprobs(BATCH)
    tiny.stir_adapters(plain)
    adapted = actor.response_logprobs(BATCH)
    with actor.adapters_off() as reference:
        assert torch.equal(reference.response_logprobs(BATCH), untouched)
    assert (adapted - untouched).abs().max() > 1e-2

    actor.save_policy(tmp_path / "policy")
    loaded = LanguageModel(AutoModelForCausalLM.from_pretrained(tmp_path / "policy"))
    assert loaded.causal_lm.state_dict().keys() == before.keys()
    torch.testing.assert_close(loaded.response_logprobs(BATCH), adapted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "adapted"),
    [
        ("qwen3_moe", "experts, gate, k_proj, o_proj, q_proj, v_proj"),  # experts share two tensors
        ("mamba", "in_proj, x_proj"),
        ("llama4_text", "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
    ],
)
def test_adapters_of_other_layers_merge(model_type: str, adapted: str) -> None:
    assert architectures.adapted_layers(model_type) == adapted


def test_adapters_on_tied_layers_are_refused() -> None:
    """Zamba's attention blocks share one set of weights."""
    with pytest.raises(ValueError, match="lora_target_modules"):
        add_adapters(architectures.model("zamba2"), rank=2, alpha=4.0)


def test_adapters_on_frozen_weights_in_bf16_are_merged_in_fp32() -> None:
    """bf16 would round adapters of this size away."""
    model = tiny.model()
    add_adapters(model, rank=2, alpha=8.0, target_modules=["q_proj"])
    tiny.stir_adapters(model, 1e-4)
    cast_frozen(model.base_model, torch.bfloat16)
    merged = merged_state(model)
    assert {value.dtype for value in merged.values()} == {torch.float32}
    layer = model.base_model.layers[0].self_attn.q_proj
    wanted = layer.base_layer.weight.float() + layer.get_delta_weight("default")
    assert torch.equal(merged["model.layers.0.self_attn.q_proj.weight"], wanted)
    assert layer.base_layer.weight.dtype == torch.bfloat16


def test_rank_alpha_and_target_modules() -> None:
    model = tiny.model()
    config = add_adapters(model, rank=3, alpha=6.0, target_modules=["q_proj"]).peft_config[
        "default"
    ]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (3, 6.0, 0.0)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(".q_proj.lora_" in name for name in trained)
    assert len(trained) == 2 * 2, "A and B in both layers"
    assert {min(p.shape) for p in trained.values()} == {3}


def test_without_peft_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"lora_rank.* pip install peft"):
        add_adapters(tiny.model(), rank=2, alpha=4.0)
