"""The weight of an lm-head, with PEFT's adapters merged in.

    plain layer                       W
    fully trained, modules_to_save    W of the active copy
    LoRA                              W + Σ s·B·A
    DoRA                              (m / ‖W + s·B·A‖) ⊙ (W + s·B·A), row by row

The norm of DoRA is treated as a constant, as in its paper and in PEFT. A head that is not a product
with one weight, for example because of dropout, raises an error: a loss over hidden states would
train another policy than the model's forward pass samples from.

Source: Hu et al. 2021, section 4.1; Liu et al. 2024 (DoRA), sections 4.1 and 4.3.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def head_weight(lm_head: nn.Module) -> Tensor:
    """Return the weight [V, H] of an lm-head with its adapters merged in.

    `linear_ppo_loss` and the other functions of hidden states need it, because PEFT stores adapters
    next to a layer's `.weight`: `lm_head.weight` is only the frozen matrix. Gradients reach the
    adapters (LoRA, DoRA), and a fully trained head (`modules_to_save`).

    Args:
        lm_head: `nn.Linear`, or PEFT's wrapper of one.

    Returns:
        Tensor [V, H]: the weight itself without adapters. Otherwise W + Σ scale·B·A of the active
        adapters in W's dtype, with rows scaled to DoRA's magnitudes.

    Raises:
        TypeError: the module is of another kind, or an adapter has no single weight because of
            dropout in training mode, a bias, or another variant of LoRA.
    """
    reason = why_no_weight(lm_head)
    if reason is not None:
        raise TypeError(reason)
    layer = active_copy(lm_head)
    base = _base_layer(layer)
    weight: Tensor = base.weight
    for adapter in _adapters_on(layer):
        delta = layer.get_delta_weight(adapter)
        merged = weight + delta.to(weight.dtype)
        if layer.use_dora.get(adapter):
            magnitude = layer.lora_magnitude_vector[adapter]
            # The norm of this adapter on the frozen matrix, without earlier adapters.
            norm = magnitude.get_weight_norm(base.weight.detach(), delta.detach(), scaling=1)
            merged = (magnitude.weight / norm).to(weight.dtype).unsqueeze(1) * merged
        weight = merged
    return weight


def why_no_weight(lm_head: nn.Module) -> str | None:
    """Explain why an lm-head has no single weight, and what to do; None if it has one.

    Reads no tensor, because parameters may be sharded.
    """
    layer = active_copy(lm_head)
    base = _base_layer(layer)
    instead = "or pass the model's logits to ppo_loss"
    if not isinstance(base, nn.Linear):
        return f"lm_head must be nn.Linear or PEFT's layer around one, got {type(base)}; {instead}"
    if getattr(layer, "merged", False) and layer.disable_adapters:
        return (
            "lm_head's adapters are merged and switched off, and only PEFT's own forward pass "
            "removes them: call unmerge_adapter() first"
        )
    for adapter in _adapters_on(layer):
        name = f"lm_head's adapter {adapter!r}"
        if adapter not in getattr(layer, "lora_A", {}):
            return (
                f"{name} must be LoRA or DoRA, got {type(layer)}: leave lm_head out of its "
                f"target_modules, {instead}"
            )
        p = getattr(layer.lora_dropout[adapter], "p", 0.0)
        if layer.training and p > 0:
            return (
                f"{name} has dropout {p} in training, and therefore no single weight: "
                f"set lora_dropout=0, {instead}"
            )
        if layer.lora_bias.get(adapter):
            return (
                f"{name} has its own bias, which no weight contains: set lora_bias=False, {instead}"
            )
        variant = getattr(layer, "lora_variant", {}).get(adapter)
        if variant is not None and not layer.use_dora.get(adapter):
            return (
                f"{name} must be plain LoRA or DoRA, got {type(variant).__name__}: leave lm_head "
                f"out of its target_modules, {instead}"
            )
    return None


def active_copy(lm_head: nn.Module) -> Any:
    """Return the layer that computes the logits.

    With `modules_to_save`, the active adapter's copy, or the original if adapters are disabled.
    """
    layer: Any = lm_head
    copies = getattr(layer, "modules_to_save", None)
    if copies is None:
        return layer
    if layer.disable_adapters:
        return layer.original_module
    for adapter in layer.active_adapters:
        if adapter in copies:
            return copies[adapter]
    return layer.original_module


def _base_layer(layer: Any) -> Any:
    """Return the frozen layer inside PEFT's wrapper."""
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer


def _adapters_on(layer: Any) -> list[str]:
    """Return the adapters that a forward pass adds to the frozen layer's output."""
    if _base_layer(layer) is layer or layer.disable_adapters or layer.merged:
        return []
    known = getattr(layer, "lora_A", None)  # excludes adapters of other layers only
    return [name for name in layer.active_adapters if known is None or name in known]
