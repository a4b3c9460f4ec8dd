"""Add PEFT's LoRA adapters to a model in place, and merge them when the model is saved."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastppo.models.multimodal import frozen_modules
from fastppo.models.quantized import dequantized_weight, is_quantized


def add_adapters(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    target_modules: Sequence[str] | None = None,
    task_type: str = "CAUSAL_LM",
) -> Any:
    """Add LoRA adapters to the model in place, and return the PEFT model around it.

    Args:
        task_type: CAUSAL_LM, or SEQ_CLS to train the classification head in full.

    Raises:
        ImportError: peft is not installed.
        ValueError: two adapted layers share their weight, so that they cannot be merged.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("lora_rank > 0 needs peft: pip install peft") from error
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=list(target_modules) if target_modules else "all-linear",
        exclude_modules=_left_out(model, by_name=bool(target_modules)) or None,
        # GPT-2's weights are transposed.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        task_type=task_type,
    )
    with warnings.catch_warnings():
        # PEFT reads an attribute under the name it had before transformers renamed it.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        # PEFT itself sets these for experts that share one tensor, by two names.
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match")
        peft = get_peft_model(model, config)
    _check_untied(model)
    return peft


def _check_untied(model: nn.Module) -> None:
    """Raise ValueError if two adapted layers share their weight, as in Zamba."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    names: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            weight = getattr(module.get_base_layer(), "weight", None)
            first = names.setdefault(id(weight), name)
            if weight is not None and first != name:
                raise ValueError(
                    f"lora_rank: {type(model).__name__} has one weight for {first} and {name}, and "
                    "two adapters cannot be merged into it; leave them out of lora_target_modules"
                )


def _left_out(model: PreTrainedModel, *, by_name: bool) -> list[str]:
    """Return the names of the modules without adapters.

    Vision tower and projector are frozen.

    Args:
        by_name: whether the user names the modules with adapters.
    """
    frozen = list(frozen_modules(model))
    return frozen if by_name else [*frozen, *_not_adapted(model)]


def _not_adapted(model: nn.Module) -> list[str]:
    """Return the names of linear layers that would ignore adapters, or fail with them.

    Routers are linear layers that also return scores (Llama 4), or read their weight directly
    (LongCat), as the mixers of Mamba read those of `dt_proj` and `out_proj`. DeepSeek-V4 multiplies
    groups of inputs.
    """
    names = []
    for name, module in model.named_modules():
        if type(module).__name__.endswith(("Router", "GroupedLinear")):
            names += [f"{name}.{child}".removesuffix(".") for child, _ in module.named_modules()]
        if hasattr(module, "A_log") and hasattr(module, "D"):
            names += [f"{name}.dt_proj", f"{name}.out_proj"]
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return [name for name in names if name in linear]


def adapters_of(model: PreTrainedModel, options: Any, task_type: str = "CAUSAL_LM") -> Any:
    """Call `add_adapters` with a run's options, or return None if `lora_rank` is 0."""
    if options.lora_rank == 0:
        return None
    return add_adapters(
        model,
        rank=options.lora_rank,
        alpha=options.lora_alpha,
        target_modules=options.lora_target_modules,
        task_type=task_type,
    )


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the `state_dict` of the current tensors.

    On a gathered FSDP module these are full tensors; its own `state_dict` returns shards.
    """
    state: dict[str, Tensor] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        tensors = [
            *child.named_parameters(recurse=False, remove_duplicate=False),
            *child.named_buffers(recurse=False, remove_duplicate=False),
        ]
        # torch has no public list of the buffers that `state_dict` leaves out.
        left_out = child._non_persistent_buffers_set
        for name, value in tensors:
            if name not in left_out:
                state[f"{prefix}.{name}" if prefix else name] = value.detach()
    return state


def merged_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state of the plain model with merged adapters; the model does not change.

    4-bit matrices are dequantized to fp32.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)
    }
    quantized = {f"{name}.weight": m for name, m in model.named_modules() if is_quantized(m)}
    # Adding the adapters to frozen matrices in half precision would round them away.
    embeddings: Any = model.get_input_embeddings()
    saved_dtype = embeddings.weight.dtype
    state = {}
    for name, value in full_state(model).items():
        if name in quantized:
            value = dequantized_weight(quantized[name])
        value = value.to(torch.promote_types(value.dtype, saved_dtype))
        # Innermost first: adapters on two tensors of one module are nested.
        owners = sorted((x for x in adapted if name.startswith(f"{x}.")), key=len, reverse=True)
        if any(not name.startswith(f"{owner}.base_layer.") for owner in owners):
            continue  # a weight of an adapter
        for owner in owners:
            leaf = name.removeprefix(f"{owner}.base_layer.")
            # Experts in one tensor are adapted by the name of their parameter.
            if leaf == getattr(adapted[owner], "parameter_name", "weight"):
                for adapter in adapted[owner].active_adapters:
                    value = value + adapted[owner].get_delta_weight(adapter).to(value.dtype)
            name = f"{owner}.{leaf}"
        state[name] = value
    return state
