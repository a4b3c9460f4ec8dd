"""LoRA adapters by PEFT: put on a model in place, and merged into what is saved."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastppo.models.quantized import dequantized_weight, is_quantized


def add_adapters(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    target_modules: Sequence[str] | None = None,
    task_type: str = "CAUSAL_LM",
) -> Any:
    """Puts LoRA adapters on the model, in place, and returns the PEFT model around it.

    Args:
        task_type: CAUSAL_LM, or SEQ_CLS, which trains the classifier's head in full.

    Raises:
        ImportError: peft is not installed.
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
        # GPT-2 has its weights transposed, which PEFT has to know.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        task_type=task_type,
    )
    with warnings.catch_warnings():
        # peft's use of an attribute that transformers renamed: nothing that a user can mend.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        return get_peft_model(model, config)


def adapters_of(model: PreTrainedModel, options: Any, task_type: str = "CAUSAL_LM") -> Any:
    """`add_adapters` as options ask for them; None where their `lora_rank` is 0."""
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
    """`state_dict` of the tensors as they are now: of a sharded module that is gathered, the whole
    tensors, where under FSDP `state_dict` gives shards."""
    state: dict[str, Tensor] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        tensors = [
            *child.named_parameters(recurse=False, remove_duplicate=False),
            *child.named_buffers(recurse=False, remove_duplicate=False),
        ]
        # torch says nowhere else which buffers it leaves out of `state_dict`.
        left_out = child._non_persistent_buffers_set
        for name, value in tensors:
            if name not in left_out:
                state[f"{prefix}.{name}" if prefix else name] = value.detach()
    return state


def merged_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """State of the plain model with each adapter's weights added in; the model is left as it is.
    Matrices of 4 bits a weight become fp32."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)
    }
    quantized = {f"{name}.weight": m for name, m in model.named_modules() if is_quantized(m)}
    # Frozen matrices may be in half precision, which would round the adapters away.
    embeddings: Any = model.get_input_embeddings()
    saved_dtype = embeddings.weight.dtype
    state = {}
    for name, value in full_state(model).items():
        if name in quantized:
            value = dequantized_weight(quantized[name])
        value = value.to(torch.promote_types(value.dtype, saved_dtype))
        owner = next((prefix for prefix in adapted if name.startswith(f"{prefix}.")), None)
        if owner is None:
            state[name] = value
        elif name.startswith(f"{owner}.base_layer."):
            leaf = name.removeprefix(f"{owner}.base_layer.")
            if leaf == "weight":
                for adapter in adapted[owner].active_adapters:
                    value = value + adapted[owner].get_delta_weight(adapter).to(value.dtype)
            state[f"{owner}.{leaf}"] = value
    return state
