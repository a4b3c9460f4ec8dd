"""The value functions.

    shared      a linear head on the policy's trunk; the value loss also trains the trunk if
                `vf_coef` is above 0
    detached    the same head; the value loss does not train the trunk
    critic      a separate transformer, initialized from the policy, a reward model or a critic

Stiennon et al. 2020 (section 3.4) found that a shared trunk can hurt the policy early in training,
when most values are wrong. The other two avoid this, at a higher cost.

Heads are fp32 for any trunk (fp64 for an fp64 trunk), since values need several digits. They start
at zero. A critic from a reward model starts from its scores, as InstructGPT's did (Ouyang et al.
2022, appendix C.4).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastppo.data.batch import Layout
from fastppo.models.head import lm_head_of
from fastppo.models.multimodal import copy_sharing_frozen, frozen_parameters
from fastppo.models.trunk import states_at, trunk_of

ATTENTION = {"self_attn", "attn", "attention"}
"""Names of attention modules in transformers' decoders."""


class ValueFunction(nn.Module, ABC):
    """Base class: a linear fp32 head on hidden states that the subclass provides."""

    reads_final_hidden = False
    """Whether the head reads the policy's final hidden states, so that a decoder can compute
    values."""

    def __init__(self, trunk: Any, width: int) -> None:
        super().__init__()
        dtype = torch.promote_types(trunk.dtype, torch.float32)
        self.head = nn.Linear(width, 1, device=trunk.device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones((), device=trunk.device, dtype=dtype))
        """Factor on the head's output, 0-d. A head that an optimizer trains learns in units of the
        returns' deviation; see `fastppo.ppo.value_head`."""

    def read(self, states: Tensor) -> Tensor:
        """Return the values of states [N, H] in reward units, [N] fp32."""
        with torch.autocast(states.device.type, enabled=False):
            return self.head(states.to(self.head.weight.dtype)).squeeze(-1) * self.scale

    def shared_names(self, causal_lm: PreTrainedModel) -> set[str]:
        """Return the names of the parameters that are the policy's: a critic's vision tower."""
        shared = {id(p) for p in frozen_parameters(causal_lm)}
        return {name for name, p in self.named_parameters() if id(p) in shared}

    @abstractmethod
    def states(self, hidden: Tensor, layout: Layout, positions: Tensor, *, detach: bool) -> Tensor:
        """Return the head's inputs [N, H] at positions [N] of the layout.

        Args:
            hidden: [N, H], the policy's final hidden states at the positions.
            detach: stop gradients into the policy's trunk, for value-only iterations.
        """


class SharedValue(ValueFunction):
    """A linear head on the trunk's final hidden states."""

    reads_final_hidden = True

    def states(self, hidden: Tensor, layout: Layout, positions: Tensor, *, detach: bool) -> Tensor:
        return hidden.detach() if detach else hidden


class DetachedValue(ValueFunction):
    """A linear head on the trunk's final hidden states, detached."""

    reads_final_hidden = True

    def states(self, hidden: Tensor, layout: Layout, positions: Tensor, *, detach: bool) -> Tensor:
        return hidden.detach()


class CriticValue(ValueFunction):
    """A linear head on a separate trunk."""

    def __init__(self, trunk: Any, width: int) -> None:
        super().__init__(trunk, width)
        self.trunk = trunk

    def states(self, hidden: Tensor, layout: Layout, positions: Tensor, *, detach: bool) -> Tensor:
        return states_at(
            self.trunk,
            positions,
            layout.input_ids,
            packing=layout.packing,
            images=layout.images,
        )


def critic_of_policy(causal_lm: PreTrainedModel) -> CriticValue:
    """Return a critic initialized with a copy of the policy's trunk; it shares a vision tower."""
    width = lm_head_of(causal_lm).weight.shape[1]
    return CriticValue(copy_sharing_frozen(trunk_of(causal_lm), causal_lm), width)


def critic_of_file(causal_lm: PreTrainedModel, path: str) -> CriticValue:
    """Load a critic with the policy's architecture from a file that `save_value_function` wrote.

    Raises:
        ValueError: the file cannot be read, or holds another value function.
    """
    critic = critic_of_policy(causal_lm)
    try:
        # Files of version 0.3 have no scale.
        state = {"scale": torch.ones_like(critic.scale)} | load_file(path)
        shared = critic.shared_names(causal_lm)
        if not shared.isdisjoint(state):
            raise RuntimeError("it has a vision tower of its own, and the policy's is used")
        lacking, unknown = critic.load_state_dict(state, strict=False)
        if unknown or not shared.issuperset(lacking):
            raise RuntimeError(f"lacks {lacking}, and has {unknown}")
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(f"critic_model {path} does not fit the policy: {error}") from error
    return critic


def freeze_attention(trunk: nn.Module) -> None:
    """Freeze the attention of all layers.

    Raises:
        ValueError: no module has a known name for attention.
    """
    frozen = [
        parameter for name, parameter in trunk.named_parameters() if ATTENTION & {*name.split(".")}
    ]
    if not frozen:
        raise ValueError(
            f"critic_options: frozen=attention: {type(trunk).__name__} has no module named "
            f"{' or '.join(sorted(ATTENTION))}"
        )
    for parameter in frozen:
        parameter.requires_grad_(False)


def critic_of_reward_model(model: Any, name: str) -> CriticValue:
    """Return a critic initialized from a reward model: the value of a state is the text's score.

    Args:
        name: the model's name, for messages.

    Raises:
        ValueError: the model has several labels, or no `score` layer (an encoder).
    """
    score: Any = getattr(model, "score", None)
    labels = model.config.num_labels
    if score is None or labels != 1:
        raise ValueError(
            f"critic_model {name}: expected a decoder with one label, got {type(model).__name__} "
            f"with {labels}"
        )
    critic = CriticValue(model.base_model, score.weight.shape[1])
    with torch.no_grad():
        critic.head.weight.copy_(score.weight)
        critic.head.bias.fill_(-getattr(model.config, "score_mean", 0.0))
    return critic
