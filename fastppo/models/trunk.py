"""The trunk of a transformer: token ids in, final hidden states out.

`hidden_states` is the one place of the program that runs a trunk: policy, reference, critic, reward
models and supervised fine-tuning all come through here. How attention is computed, and over how
many devices, is decided here and nowhere else.

Dropout is off everywhere: with it the ratio of the first update would not be 1.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def hidden_states(trunk: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """[B, S, H] final hidden states, after the trunk's own last norm.

    Args:
        trunk: `model.base_model` of a transformers model.
        input_ids, attention_mask: [B, S] int64; without a mask every position is a token.
    """
    output = trunk(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    return output.last_hidden_state


def context_length(model: Any) -> int | None:
    """The longest sequence that a model takes, tokens, if its config says."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def switch_dropout_off(model: nn.Module) -> None:
    """Sets every dropout probability in the model to 0, modules and plain attributes alike."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recomputes activations in the backward pass, in training mode."""
    # The method's name changed in the course of transformers 5.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
