"""LoRA adapters by PEFT: put on a model in place, and merged into what is saved."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastppo.models.quantized import is_quantized, whole_weight


def add_adapters(
    model: PreTrainedModel,
    rank: int,
    alpha: float,
    target_modules: Sequence[str] | None,
    task_type: str = "CAUSAL_LM",
) -> Any:
    """LoRA adapters on the model, in place: returns the PEFT model around it.

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


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """`state_dict` of a module whose tensors are whole now: under FSDP that method gives shards. Of
    a module whose tensors are shards now, shards."""
    state: dict[str, Tensor] = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        for name, value in (*each._parameters.items(), *each._buffers.items()):
            if value is not None and name not in each._non_persistent_buffers_set:
                state[f"{prefix}.{name}" if prefix else name] = value.detach()
    return state


def merged_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """State of the plain model with each adapter's weights added in; the model is left as it is.
    Matrices of 4 bits a weight are there as fp32."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: dict[str, Any] = {
        name: m for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)
    }
    state = {}
    # Frozen matrices may be in half precision, which would round the adapters away.
    embeddings: Any = model.get_input_embeddings()
    whole = embeddings.weight.dtype
    of_four_bits = {f"{name}.weight": m for name, m in model.named_modules() if is_quantized(m)}
    for name, value in whole_state(model).items():
        if name in of_four_bits:
            value = whole_weight(of_four_bits[name])
        value = value.to(torch.promote_types(value.dtype, whole))
        owner = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if owner is None:
            state[name] = value
        elif name.startswith(f"{owner}.base_layer."):
            leaf = name.removeprefix(f"{owner}.base_layer.")
            if leaf == "weight":
                layer = layers[owner]
                for adapter in layer.active_adapters:
                    delta = layer.get_delta_weight(adapter)
                    value = value + delta.to(value.dtype)
            state[f"{owner}.{leaf}"] = value
    return state
