"""The one weight of a lm-head, whatever PEFT has put around it.

    a layer of its own              W
    trained whole, modules_to_save  the active copy's W
    LoRA                            W + Σ s·B·A
    DoRA                            (m / ‖W + s·B·A‖) ⊙ (W + s·B·A), row by row

The norm of DoRA is a constant for the gradient, as in its paper and in PEFT. What is no product
with one weight, dropout in training above all, is refused: a loss over hidden states would train
another policy than the model's own forward pass samples from.

Source: Hu et al. 2021, section 4.1; Liu et al. 2024 (DoRA), sections 4.1 and 4.3.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def head_weight(lm_head: nn.Module) -> Tensor:
    """The weight [V, H] that a lm-head multiplies by, with its adapters added in.

    For `linear_ppo_loss` and its sisters: PEFT keeps adapters beside a layer's `.weight`, so that
    `lm_head.weight` is the frozen matrix alone. Gradients reach the adapters, LoRA's and DoRA's,
    and a head that is trained whole (`modules_to_save`).

    Args:
        lm_head: `nn.Linear`, or PEFT's layer around one.

    Returns:
        [V, H]: the weight itself where there is no adapter; otherwise W + Σ scale·B·A of the active
        ones, in W's dtype, its rows scaled to DoRA's magnitudes where they have such.

    Raises:
        TypeError: another kind of module, or an adapter that is not a weight: dropout in training
            mode, a bias of its own, another variant of LoRA. The sentence says what to do.
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
            # Of this adapter on the frozen matrix, whatever was added before it.
            norm = magnitude.get_weight_norm(base.weight.detach(), delta.detach(), scaling=1)
            merged = (magnitude.weight / norm).to(weight.dtype).unsqueeze(1) * merged
        weight = merged
    return weight


def why_no_weight(lm_head: nn.Module) -> str | None:
    """What keeps a lm-head from being a product with one weight, and what to do about it, in one
    sentence; None where it is one. Asks for no tensor, which may be sharded."""
    layer = active_copy(lm_head)
    base = _base_layer(layer)
    instead = "or pass the model's logits to ppo_loss"
    if not isinstance(base, nn.Linear):
        return f"lm_head must be nn.Linear or PEFT's layer around one, got {type(base)}; {instead}"
    if getattr(layer, "merged", False) and layer.disable_adapters:
        return (
            "lm_head's adapters are merged and switched off, and PEFT takes them out in its own "
            "forward pass alone: call unmerge_adapter() first"
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
                f"{name} has dropout {p} in training, so no one weight is what it multiplies by: "
                f"set lora_dropout=0, {instead}"
            )
        if layer.lora_bias.get(adapter):
            return (
                f"{name} has a bias of its own, which no weight holds: set lora_bias=False, "
                f"{instead}"
            )
        variant = getattr(layer, "lora_variant", {}).get(adapter)
        if variant is not None and not layer.use_dora.get(adapter):
            return (
                f"{name} must be plain LoRA or DoRA, got {type(variant).__name__}: leave lm_head "
                f"out of its target_modules, {instead}"
            )
    return None


def active_copy(lm_head: nn.Module) -> Any:
    """The layer that multiplies: where PEFT trains a head whole (`modules_to_save`), the active
    adapter's copy of it, or the original while adapters are off."""
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
    """The frozen layer that PEFT's adapters lie around."""
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer


def _adapters_on(layer: Any) -> list[str]:
    """The adapters that a forward pass adds to the frozen layer's product."""
    if _base_layer(layer) is layer or layer.disable_adapters or layer.merged:
        return []
    known = getattr(layer, "lora_A", None)  # without adapters that lie only on other layers
    return [name for name in layer.active_adapters if known is None or name in known]
