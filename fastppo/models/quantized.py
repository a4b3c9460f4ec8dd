"""Frozen bases of 4 bits a weight under LoRA adapters (QLoRA), by bitsandbytes.

transformers loads the linear layers of a model, but for the lm-head, as bitsandbytes' `Linear4bit`:
weights in blocks of 64 with a scale each, scales in 8 bits themselves. A product turns its matrix
into the compute dtype and lets it go again. Adapters, embeddings, norms and the lm-head stay in the
dtype that the model is loaded in, and nothing of 4 bits is trained. What is saved in the end is the
model with dequantized weights and the adapters merged into them.

Source: Dettmers et al. 2023.
"""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

NEEDED = "bitsandbytes>=0.49"

BLOCK = 64
"""Weights that share a scale."""
SCALES = 256
"""Scales of 8 bits that share one of 32."""


def nf4_config(dtype: torch.dtype) -> Any:
    """Return transformers' config for NF4 weights with quantized scales.

    Args:
        dtype: of the matrix products.

    Raises:
        ValueError: bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            f"quantization=nf4 needs bitsandbytes, which is not installed: pip install '{NEEDED}'"
        )
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def is_quantized(module: nn.Module) -> bool:
    """Whether it is a linear layer of 4 bits a weight, adapters around it apart."""
    # PEFT's layer around it has the same name, and no weight that is a parameter of its own.
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return type(module).__name__ == "Linear4bit" and hasattr(weight, "quant_state")


def dequantized_weight(layer: Any) -> Tensor:
    """[out, in] fp32: what a layer of 4 bits a weight multiplies by."""
    from bitsandbytes.functional import dequantize_4bit

    weight = layer.weight
    return dequantize_4bit(weight.data, weight.quant_state).float()


def without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class whose config has no quantization, on the meta device: to save
    dequantized weights with."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    plain.generation_config = model.generation_config
    return plain


def bytes_of(count: int) -> int:
    """Bytes of `count` weights in 4 bits, with their scales and the scales of those."""
    scales = -(-count // BLOCK)
    return -(-count // 2) + scales + 4 * -(-scales // SCALES)


def matrices(model: PreTrainedModel) -> list[Any]:
    """The layers that would be quantized: the linear ones except adapters and the lm-head."""
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if type(m) is nn.Linear and m is not head]
    return [layer for layer in linear if not layer.weight.requires_grad]


def keep_as_loaded(model: PreTrainedModel) -> None:
    """Stops bitsandbytes from packing the weights anew, for a product without a gradient.

    On a CPU with AVX512-BF16 it does so in the first pass without a gradient, for a product in bf16
    that no gradient goes through, and uses that one from then on.

    Raises:
        ValueError: nothing is quantized, weights are held transposed (GPT-2), or rows are no whole
            blocks, which bitsandbytes' product on a CPU gets wrong.
    """
    layers: list[Any] = [module for module in model.modules() if is_quantized(module)]
    if not layers or any(layer.source_cls is not nn.Linear for layer in layers):
        raise ValueError(
            f"quantization: expected a model of torch's linear layers, got {type(model).__name__}, "
            "whose layers are of another kind"
        )
    for layer in layers:
        shape = layer.weight.quant_state.shape
        if shape[1] % BLOCK:
            raise ValueError(
                f"quantization: expected matrices whose rows are whole blocks of {BLOCK} weights, "
                f"got {list(shape)}"
            )
        layer.support_avx512bf16_for_cpu = False
