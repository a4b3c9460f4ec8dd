"""Causal attention without a mask, for right-padded rows and for packed sequences.

transformers builds a mask in every forward pass. It synchronizes with the GPU to decide whether one
is needed, and a mask keeps SDPA from its fastest kernels. Training needs no mask: tokens do not see
padding on their right, and the bounds of packed sequences are known.

So the trunk gets a `mark`, an empty four-dimensional mask that transformers passes on unread.
Attention functions registered with `AttentionInterface` read it as "causal, without masked tokens".
The mark is an argument, so it is present when activations are recomputed. Calls without it, such as
generation, use transformers' functions unchanged.

Packed rows use flash-attn if the model was loaded with it, else torch's `varlen_attn`; both need a
GPU and half precision. Otherwise they get no mark, and transformers builds a block-diagonal mask of
quadratic size from the position ids, which is good enough for tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastppo.data.batch import Packing

WRAPPED = ("sdpa", "flash_attention_2")
ABSENT = object()
GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
"""Keywords for grouped-query attention, which needs a flag in torch 2.13 and later."""


def mark(device: torch.device) -> Tensor:
    """Return the placeholder that stands for a purely causal mask."""
    return torch.zeros(1, 1, 0, 0, device=device)


def packed_arguments(packing: Packing) -> dict[str, Any]:
    """Return transformers' keywords for a forward pass over packed sequences."""
    return {
        "position_ids": packing.position_ids,
        "cu_seq_lens_q": packing.cu_seqlens,
        "cu_seq_lens_k": packing.cu_seqlens,
        "max_length_q": packing.longest,
        "max_length_k": packing.longest,
    }


def window(trunk: PreTrainedModel) -> int | None:
    """Return the size of the trunk's sliding windows, tokens, or None."""
    return getattr(trunk.config.get_text_config(), "sliding_window", None)


def has_wrapped_attention(trunk: PreTrainedModel) -> bool:
    """Return whether the trunk's attention functions know the mark."""
    config = trunk.config.get_text_config()
    return (
        trunk._supports_attention_backend
        and config._attn_implementation in WRAPPED
        and getattr(config, "attention_chunk_size", None) is None
    )


def packs_without_mask(trunk: PreTrainedModel) -> bool:
    """Return whether the kernels for packed rows support the trunk's device and dtype."""
    device = trunk.device.type
    dtype = trunk.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return device == "cuda" and dtype in (torch.float16, torch.bfloat16)


def _knowing_the_mark(name: str, original: Callable) -> Callable:
    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        is_mark = attention_mask is not None and attention_mask.shape[-2:] == (0, 0)
        if not is_mark:
            return original(module, query, key, value, attention_mask, **keywords)
        if "cu_seq_lens_q" in keywords:
            return _packed(module, query, key, value, flash=name != "sdpa", **keywords), None
        return original(module, query, key, value, None, **keywords)

    return attention


def _packed(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    flash: bool,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: Any = ABSENT,
    softcap: float | None = None,
    **keywords: Any,
) -> Tensor:
    """Attend from query [1, heads, S, D] to key and value [1, kv_heads, S, D].

    Returns:
        [1, S, heads, D].
    """
    config: Any = module.config
    if sliding_window is ABSENT:
        if getattr(config, "sliding_window", None) is not None:
            raise ValueError(
                f"{type(module).__name__} does not pass its sliding window to attention"
            )
        sliding_window = None
    # Under autocast, rotary embeddings leave queries and keys in fp32.
    q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))
    left = -1 if sliding_window is None else sliding_window - 1
    if flash:
        from flash_attn import flash_attn_varlen_func

        attended = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=cu_seq_lens_q,
            cu_seqlens_k=cu_seq_lens_q,
            max_seqlen_q=max_length_q,
            max_seqlen_k=max_length_q,
            softmax_scale=scaling,
            causal=True,
            window_size=(left, 0),
            **({} if softcap is None else {"softcap": softcap}),
        )
    else:
        attended = varlen_attn(
            q,
            k,
            v,
            cu_seq_q=cu_seq_lens_q,
            cu_seq_k=cu_seq_lens_q,
            max_q=max_length_q,
            max_k=max_length_q,
            scale=scaling,
            window_size=(left, 0),
            **GROUPED_HEADS,
        )
    return attended.unsqueeze(0)


for _name in WRAPPED:
    AttentionInterface.register(_name, _knowing_the_mark(_name, ALL_ATTENTION_FUNCTIONS[_name]))
