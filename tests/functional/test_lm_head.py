"""The weight of an lm-head is the one its layer multiplies by, with any of PEFT's wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastppo
from fastppo.functional.lm_head import head_weight, why_no_weight

peft = pytest.importorskip("peft")
H, V, N = 6, 11, 5


def wrapped(**options: Any) -> Any:
    """Return an lm-head in PEFT's wrapper, as after some training."""
    torch.manual_seed(0)
    options = {"r": 2, "target_modules": ["lm_head"], "lora_alpha": 8} | options
    model = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(H, V)})
    layer = peft.inject_adapter_in_model(peft.LoraConfig(**options), model)["lm_head"].train()
    stir(layer)
    return layer


def stir(layer: Any) -> None:
    """Change LoRA's B, which starts at 0, and DoRA's magnitude, which starts at the norm of the
    rows."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
            if "magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)


def assert_is_the_weight(layer: Any, *, trained: int) -> None:
    """Compare logits, and the loss's gradient of every trained parameter, with the layer's own."""
    hidden, tokens, zeros = torch.randn(N, H), torch.arange(N), torch.zeros(N)
    weight = head_weight(layer)
    assert weight.shape == (V, H)
    expected = layer(hidden)
    # fp32, sums of 6 products in another order
    torch.testing.assert_close(hidden @ weight.T + layer.bias, expected, rtol=1e-5, atol=1e-5)
    per_token = (tokens, zeros - 2, zeros + 1)
    fastppo.linear_ppo_loss(hidden, weight, *per_token, bias=layer.bias).loss.backward()
    actual = {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    fastppo.ppo_loss(expected, *per_token).loss.backward()
    assert len(actual) == trained
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(actual[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_plain_head_is_its_own_weight() -> None:
    plain = torch.nn.Linear(H, V)
    assert head_weight(plain) is plain.weight
    assert fastppo.head_weight is head_weight


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_are_merged_and_get_gradients(dora: bool) -> None:
    """Dropout is inactive outside training."""
    layer = wrapped(use_dora=dora, lora_dropout=0.5).eval()
    assert (head_weight(layer) - layer.weight).abs().max() > 0.1, "what `.weight` lacks"
    assert_is_the_weight(layer, trained=2 + dora)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_several_adapters_are_merged(dora: bool) -> None:
    layer = wrapped(use_dora=dora)
    config = peft.LoraConfig(r=3, target_modules=["lm_head"], use_dora=dora)
    layer.update_layer("other", r=3, lora_alpha=3, config=config)
    stir(layer)
    layer.set_adapter(["default", "other"])
    assert_is_the_weight(layer, trained=2 * (2 + dora))


def test_an_active_adapter_of_other_layers_is_ignored() -> None:
    layer = wrapped()
    layer.set_adapter(["default"])
    merged = head_weight(layer).detach()
    layer._active_adapter = ["default", "elsewhere"]
    torch.testing.assert_close(head_weight(layer), merged, rtol=0, atol=0)
    layer._active_adapter = ["elsewhere"]
    assert head_weight(layer) is layer.get_base_layer().weight


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_merged_or_disabled_adapters_leave_the_base_layers_weight(dora: bool) -> None:
    layer = wrapped(use_dora=dora)
    merged = head_weight(layer).detach()
    layer.merge()
    assert head_weight(layer) is layer.get_base_layer().weight
    torch.testing.assert_close(layer.weight, merged)
    layer.enable_adapters(False)
    with pytest.raises(TypeError, match="unmerge_adapter"):
        head_weight(layer)
    layer.unmerge()
    assert head_weight(layer) is layer.get_base_layer().weight


def test_a_fully_trained_head_is_the_active_copy() -> None:
    from peft.utils import ModulesToSaveWrapper

    original = torch.nn.Linear(H, V)
    wrapper = ModulesToSaveWrapper(original, "default")
    copy = wrapper.modules_to_save["default"]
    assert copy.weight is not original.weight
    assert head_weight(wrapper) is copy.weight
    assert_is_the_weight(wrapper, trained=2)
    wrapper.enable_adapters(False)
    assert head_weight(wrapper) is original.weight


@pytest.mark.parametrize(
    ("options", "at_fault"),
    [
        ({"lora_dropout": 0.5}, "lora_dropout"),
        ({"use_dora": True, "lora_dropout": 0.5}, "lora_dropout"),
        ({"lora_bias": True}, "lora_bias"),
        (
            {"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"},
            "ALoraLinearVariant",
        ),
    ],
    ids=["dropout", "dora with dropout", "bias", "variant"],
)
def test_a_head_without_a_single_weight_raises_an_error_with_a_fix(
    options: dict[str, Any], at_fault: str
) -> None:
    layer = wrapped(**options)
    with pytest.raises(TypeError, match=f"lm_head.*{at_fault}"):
        head_weight(layer)
    assert why_no_weight(layer)


def test_another_kind_of_layer_raises_an_error() -> None:
    with pytest.raises(TypeError, match=r"lm_head.*Embedding"):
        head_weight(torch.nn.Embedding(3, 2))
    model = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(H, V)})
    loha = peft.inject_adapter_in_model(peft.LoHaConfig(r=2, target_modules=["lm_head"]), model)
    with pytest.raises(TypeError, match=r"lm_head.*loha"):
        head_weight(loha["lm_head"])
