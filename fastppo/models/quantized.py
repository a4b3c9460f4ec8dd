"""Frozen 4-bit weights under LoRA adapters (QLoRA), by bitsandbytes.

transformers loads all linear layers except the lm-head as bitsandbytes' `Linear4bit`: weights in
blocks of 64 with an 8-bit scale each. A product dequantizes its matrix to the compute dtype, and
frees it afterwards. Adapters, embeddings, norms and the lm-head keep the dtype of the model, and
only adapters are trained. The saved policy has dequantized weights with merged adapters.

Source: Dettmers et al. 2023.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastppo.models.multimodal import auto_class, frozen_modules

NEEDED = "bitsandbytes>=0.49"

BLOCK = 64
"""Number of weights per scale."""
SCALES = 256
"""Number of 8-bit scales per 32-bit scale."""


def nf4_config(dtype: torch.dtype, left_out: Sequence[str] | None = None) -> Any:
    """Return transformers' config for NF4 weights with quantized scales.

    Args:
        dtype: the dtype of the matrix products.
        left_out: names of modules that keep their dtype; None for the lm-head alone.

    Raises:
        ValueError: bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError("quantization=nf4 needs bitsandbytes: pip install 'bitsandbytes>=0.49'")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=None if left_out is None else list(left_out),
    )


def is_quantized(module: nn.Module) -> bool:
    """Return whether the module is a 4-bit linear layer."""
    # PEFT's wrapper has the same class name, but does not hold the weight itself.
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return type(module).__name__ == "Linear4bit" and hasattr(weight, "quant_state")


def dequantized_weight(layer: Any) -> Tensor:
    """Return the dequantized matrix of a 4-bit layer, [out, in] fp32."""
    from bitsandbytes.functional import dequantize_4bit

    weight = layer.weight
    return dequantize_4bit(weight.data, weight.quant_state).float()


def without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """Return an unquantized model of the same class on the meta device, to save weights with."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = auto_class(config).from_config(config, dtype=model.dtype)
    plain.generation_config = model.generation_config
    return plain


def bytes_of(count: int) -> int:
    """Return the bytes of `count` 4-bit weights with their scales."""
    scales = -(-count // BLOCK)
    return -(-count // 2) + scales + 4 * -(-scales // SCALES)


def matrices(model: PreTrainedModel) -> list[Any]:
    """Return the layers to quantize: linear ones of the language model, except adapters."""
    left_out = [model.get_output_embeddings(), *frozen_modules(model).values()]
    linear = [m for m in model.modules() if type(m) is nn.Linear and m not in left_out]
    return [layer for layer in linear if not layer.weight.requires_grad]


def keep_as_loaded(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from repacking weights, and check that it supports the layers.

    On a CPU with AVX512-BF16, the first pass without gradients would repack them for a product that
    has no backward pass.

    Raises:
        ValueError: no layer is quantized, weights are transposed (GPT-2), or rows are not whole
            blocks, for which bitsandbytes' CPU product is wrong.
    """
    layers: list[Any] = [module for module in model.modules() if is_quantized(module)]
    if not layers or any(layer.source_cls is not nn.Linear for layer in layers):
        raise ValueError(
            f"quantization: expected a model with torch's linear layers, got "
            f"{type(model).__name__} with other layers"
        )
    for layer in layers:
        shape = layer.weight.quant_state.shape
        if shape[1] % BLOCK:
            raise ValueError(
                f"quantization: expected matrices with rows of whole blocks of {BLOCK} weights, "
                f"got {list(shape)}"
            )
        layer.support_avx512bf16_for_cpu = False
