"""The trunk of a transformer: token ids in, final hidden states out.

Policy, reference, critic, reward models and supervised fine-tuning all call `hidden_states`, and
the decoder calls `last_states`. Only this module chooses how attention is computed.

Dropout is off everywhere. With dropout the ratio of the first update would not be 1.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastppo.data.batch import Packing
from fastppo.data.image_inputs import ImageInputs
from fastppo.models.attention import (
    has_wrapped_attention,
    mark,
    packed_arguments,
    packs_without_mask,
    window,
)

DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)

TAKES_MARK = "_fastppo_takes_mark"
"""Attribute of a trunk that stores the result of `prepare`."""


def trunk_of(causal_lm: Any) -> Any:
    """Return the trunk of a causal LM.

    Raises:
        ValueError: the model has no trunk.
    """
    trunk = causal_lm.base_model
    if trunk is not causal_lm:
        return trunk
    # Llama 4's `base_model_prefix` names no attribute.
    text_lm = text_lm_of(causal_lm)
    inner = [module for module in text_lm.children() if isinstance(module, PreTrainedModel)]
    if len(inner) != 1:
        raise ValueError(
            f"{type(causal_lm).__name__} cannot be trained: expected a trunk, in its base_model or "
            f"as its only PreTrainedModel, found {len(inner)}"
        )
    return inner[0]


def text_lm_of(causal_lm: Any) -> Any:
    """Return the causal LM of text with the logits and the trunk of a causal LM.

    That is the model itself, except for Llama 4's vision-language model. It wraps a causal LM next
    to a vision tower, and in transformers 5.24 its own forward pass raises an error.
    """
    decoder = causal_lm.get_decoder()
    has_head = decoder is not causal_lm.base_model and decoder.get_output_embeddings() is not None
    return decoder if has_head else causal_lm


def hidden_states(
    trunk: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    packing: Packing | None = None,
    images: ImageInputs | None = None,
) -> Tensor:
    """Return the final hidden states [B, S, H], after the trunk's last norm.

    Args:
        trunk: `trunk_of` a transformers model.
        input_ids, attention_mask: [B, S] int64. No mask is needed for padding on the right.
        packing: bounds of the sequences packed into input_ids [1, S].
        images: what the vision tower returned for the sequences.
    """
    more: dict[str, Any] = {}
    if packing is not None:
        more = packed_arguments(packing)
    if images is not None:
        more |= images.arguments
    if attention_mask is None and _is_markable(trunk, input_ids, packing):
        attention_mask = mark(input_ids.device)
    elif attention_mask is None and packing is None and _is_eager(trunk):
        # Without a mask, transformers would read from the device whether rows are packed.
        attention_mask = torch.ones_like(input_ids)
    output = trunk(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **more)
    return output.last_hidden_state


def states_at(
    trunk: Any,
    positions: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    packing: Packing | None = None,
    images: ImageInputs | None = None,
) -> Tensor:
    """Return the final hidden states [N, H] at `positions` [N], int64 in [0, B·S).

    Args:
        input_ids, attention_mask, packing, images: as for `hidden_states`.
    """
    states = hidden_states(trunk, input_ids, attention_mask, packing, images)
    return states.flatten(0, 1)[positions]


def last_states(
    trunk: Any,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    cache: Any,
    images: ImageInputs | None = None,
) -> Tensor:
    """Return the final hidden states [B, H] of each row's last token, and extend the cache.

    Args:
        input_ids: [B, S] int64, the tokens after those in the cache.
        position_ids: [B, S] int64, or [4, B, S] with M-RoPE.
        attention_mask: [B, cached + S] int64; None without padding.
        cache: a transformers cache of B rows.
        images: what the vision tower returned for these tokens.
    """
    more = {} if images is None else images.arguments
    kind: Any = type(trunk)
    output = trunk(
        input_ids=input_ids,
        attention_mask=attention_mask,
        use_cache=True,
        **{"position_ids": position_ids, _name_of_cache(kind): cache, **more},
    )
    return output.last_hidden_state[:, -1]


@functools.cache
def _name_of_cache(kind: Any) -> str:
    """Return the keyword of the cache, renamed in transformers 5.24."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


def _is_markable(trunk: Any, input_ids: Tensor, packing: Packing | None) -> bool:
    """Return whether a forward pass works without transformers' mask."""
    if not takes_mark(trunk):
        return False
    if packing is not None:
        return packs_without_mask(trunk)
    # Rows longer than the sliding window need a mask.
    seen = window(trunk)
    return seen is None or input_ids.shape[1] <= seen


def _is_eager(trunk: Any) -> bool:
    """Return whether attention is computed in plain PyTorch, which needs every mask."""
    return trunk.config.get_text_config()._attn_implementation == "eager"


def takes_mark(trunk: Any) -> bool:
    """Return the result of `prepare`; False before it."""
    return getattr(trunk, TAKES_MARK, False)


def takes_padding_mask(trunk: Any) -> bool:
    """Return whether the trunk hands a mask [B, 1, S, columns] bool to its attention as it is.

    transformers makes such a mask of one of shape [B, columns] in every forward pass, and waits for
    the device to know whether there is padding at all.
    """
    config = trunk.config.get_text_config()
    return takes_mark(trunk) and config._attn_implementation == "sdpa" and window(trunk) is None


@torch.no_grad()
def prepare(trunk: Any) -> None:
    """Test whether a trunk accepts the mark of `fastppo.models.attention` as a mask.

    A trunk on the meta device is not tested.
    """
    setattr(trunk, TAKES_MARK, False)
    if not has_wrapped_attention(trunk) or trunk.get_input_embeddings().weight.is_meta:
        return
    length = min(8, context_length(trunk) or 8)
    ids = torch.arange(2 * length, device=trunk.device).view(2, length)
    ids %= trunk.get_input_embeddings().weight.shape[0]
    try:
        wanted = hidden_states(trunk, ids, torch.ones_like(ids))
        setattr(trunk, TAKES_MARK, True)
        same = torch.equal(hidden_states(trunk, ids), wanted)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a trunk may fail in any way on a mask of unexpected shape
        same = False
    setattr(trunk, TAKES_MARK, same)


def layers_of(trunk: Any) -> nn.ModuleList:
    """Return the list of a trunk's layers.

    Raises:
        ValueError: the trunk has no single list of all layers.
    """
    total = trunk.config.get_text_config().num_hidden_layers
    # A vision tower may have as many layers.
    modules = trunk.get_decoder().modules()
    lists = [m for m in modules if isinstance(m, nn.ModuleList) and len(m) == total]
    if len(lists) != 1:
        raise ValueError(f"{type(trunk).__name__} has no single list of its {total} layers")
    return lists[0]


def context_length(model: Any) -> int | None:
    """Return the model's longest sequence, in tokens, or None if its config has no limit."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return None
    # Models like RoBERTa start positions after the padding index.
    begins = (
        module.padding_idx + 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    )
    return positions - next(begins, 0)


def switch_dropout_off(model: nn.Module) -> None:
    """Set all dropout probabilities in the model to 0, both in modules and in plain attributes."""
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass, in training mode."""
    # Later versions of transformers 5 renamed the method.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
