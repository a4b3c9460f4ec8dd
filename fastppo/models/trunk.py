"""The trunk of a transformer: token ids in, final hidden states out.

`hidden_states` is the one place of the program that runs a trunk: policy, reference, critic, reward
models and supervised fine-tuning all come through here; `last_states` is the same with a cache, for
decoding. How attention is computed is decided here and nowhere else.

Dropout is off everywhere: with it the ratio of the first update would not be 1.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastppo.data.batch import Packing
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
"""The attribute of a trunk that says what `prepare` found."""


def hidden_states(
    trunk: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """[B, S, H] final hidden states, after the trunk's own last norm.

    Args:
        trunk: `model.base_model` of a transformers model.
        input_ids, attention_mask: [B, S] int64; without a mask every position is a token, or
            padding on the right that no token sees.
        packing: where sequences begin, for input_ids [1, S] that hold several.
    """
    more: dict[str, Any] = {}
    if packing is not None:
        more = packed_arguments(packing)
    if attention_mask is None and _is_markable(trunk, input_ids, packing):
        attention_mask = mark(input_ids.device)
    output = trunk(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **more)
    return output.last_hidden_state


def states_at(
    trunk: Any,
    positions: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """[N, H] final hidden states at `positions` [N], int64 in [0, B·S), of input_ids [B, S].

    Args:
        attention_mask, packing: as for `hidden_states`.
    """
    states = hidden_states(trunk, input_ids, attention_mask, packing)
    return states.flatten(0, 1)[positions]


def last_states(
    trunk: Any,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    cache: Any,
) -> Tensor:
    """[B, H] final hidden states of each row's last token; the rows continue those of a cache, to
    which they are added.

    Args:
        input_ids, position_ids: [B, S] int64.
        attention_mask: of cache and tokens together, [B, cached + S] int64; None where every
            position is a token.
        cache: a transformers cache of B rows.
    """
    kind: Any = type(trunk)
    output = trunk(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=True,
        **{_name_of_cache(kind): cache},
    )
    return output.last_hidden_state[:, -1]


@functools.cache
def _name_of_cache(kind: Any) -> str:
    """The keyword for a cache, which transformers 5.24 renamed."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


def _is_markable(trunk: Any, input_ids: Tensor, packing: Packing | None) -> bool:
    """Whether transformers' own mask can be left out of a forward pass."""
    if not takes_mark(trunk):
        return False
    if packing is not None:
        return packs_without_mask(trunk)
    # Rows longer than a sliding window need its mask.
    seen = window(trunk)
    return seen is None or input_ids.shape[1] <= seen


def takes_mark(trunk: Any) -> bool:
    """What `prepare` found; False before it."""
    return getattr(trunk, TAKES_MARK, False)


@torch.no_grad()
def prepare(trunk: Any) -> None:
    """Finds out whether a trunk takes the mark of `fastppo.models.attention` for a mask; nothing of
    one that has no weights yet."""
    setattr(trunk, TAKES_MARK, False)
    if not has_wrapped_attention(trunk) or trunk.get_input_embeddings().weight.is_meta:
        return
    length = min(8, context_length(trunk) or 8)
    ids = torch.arange(2 * length, device=trunk.device).view(2, length)
    ids %= trunk.get_input_embeddings().weight.shape[0]
    wanted = hidden_states(trunk, ids, torch.ones_like(ids))
    setattr(trunk, TAKES_MARK, True)
    try:
        same = torch.equal(hidden_states(trunk, ids), wanted)
    except Exception:  # whatever a trunk does with a mask of a shape that it does not expect
        same = False
    setattr(trunk, TAKES_MARK, same)


def layers_of(trunk: Any) -> nn.ModuleList:
    """The list of a trunk's layers.

    Raises:
        ValueError: the trunk is not built that way.
    """
    total = trunk.config.get_text_config().num_hidden_layers
    lists = [m for m in trunk.modules() if isinstance(m, nn.ModuleList) and len(m) == total]
    if len(lists) != 1:
        raise ValueError(f"{type(trunk).__name__} is not one list of {total} layers")
    return lists[0]


def context_length(model: Any) -> int | None:
    """The longest sequence that a model takes, tokens, if its config says."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return None
    # RoBERTa's kind counts positions from behind its padding token on.
    begins = (
        module.padding_idx + 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    )
    return positions - next(begins, 0)


def switch_dropout_off(model: nn.Module) -> None:
    """Sets every dropout probability in the model to 0, modules and plain attributes alike."""
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recomputes activations in the backward pass, in training mode."""
    # The method's name changed in the course of transformers 5.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
