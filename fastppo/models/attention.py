"""Causal attention without a mask: over right-padded rows, and over sequences packed into one row.

transformers makes a mask in every forward pass, and to learn whether one is needed it reads values
off the device, for which the host waits; a mask then keeps SDPA from its fastest kernels. Here it
is known beforehand: no token sees padding on the right, and the borders of packed sequences are at
hand. So a trunk is given a `mark` in a mask's place, four-dimensional, which transformers passes
through unread, and its attention functions, wrapped below through `AttentionInterface`, take the
mark for "causal, nothing masked". Being an argument, the mark is there again when activations are
recomputed. Calls without it, generation's among them, go to transformers' own functions unchanged.

Packed rows go through flash-attn where the model was loaded with it, else through torch's
`varlen_attn`, on a GPU in half precision. Anywhere else they get no mark, and transformers makes a
block-diagonal mask of quadratic size from their position ids: for tests.
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
"""Fewer heads of keys than of queries: torch needs to be told since 2.13."""


def mark(device: torch.device) -> Tensor:
    """A tensor that stands for a mask that masks nothing."""
    return torch.zeros(1, 1, 0, 0, device=device)


def packed_arguments(packing: Packing) -> dict[str, Any]:
    """The keywords of a trunk's forward pass over packed sequences, by transformers' names."""
    return {
        "position_ids": packing.position_ids,
        "cu_seq_lens_q": packing.cu_seqlens,
        "cu_seq_lens_k": packing.cu_seqlens,
        "max_length_q": packing.longest,
        "max_length_k": packing.longest,
    }


def window(trunk: PreTrainedModel) -> int | None:
    """Tokens that the sliding windows of a trunk's layers see, if there are any."""
    return getattr(trunk.config.get_text_config(), "sliding_window", None)


def has_wrapped_attention(trunk: PreTrainedModel) -> bool:
    """Whether a trunk's attention goes through a function that knows the mark."""
    config = trunk.config.get_text_config()
    return (
        trunk._supports_attention_backend
        and config._attn_implementation in WRAPPED
        and getattr(config, "attention_chunk_size", None) is None
    )


def packs_without_mask(trunk: PreTrainedModel) -> bool:
    """Whether flash-attn's and torch's kernels for packed rows take what the trunk computes."""
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
    """[1, S, heads, D] of query [1, heads, S, D], key and value [1, fewer heads, S, D]."""
    config: Any = module.config
    if sliding_window is ABSENT:
        if getattr(config, "sliding_window", None) is not None:
            raise ValueError(
                f"{type(module).__name__} does not pass its sliding window to attention"
            )
        sliding_window = None
    # Under autocast rotary embeddings leave queries and keys in fp32.
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
