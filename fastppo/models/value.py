"""Where values come from: three value functions with one interface.

    shared      a linear head on the policy's trunk; the value loss trains the trunk too
    detached    the same head, and its loss stops there: the trunk belongs to the policy
    critic      a transformer of its own, started from the policy, a reward model or an earlier one

Stiennon et al. 2020 (section 3.4) found that a shared trunk can hurt the policy early in training,
when values are mostly wrong; the other two are the answers to that, in order of their cost.

Heads are fp32 whatever the trunk is (fp64 of one in fp64): values are regressed to a few digits.
They start at zero, no opinion before the first returns are seen; a critic that starts from a reward
model starts from its scores, as InstructGPT's did (Ouyang et al. 2022, appendix C.4).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastppo.data.batch import Layout
from fastppo.models.trunk import states_at

ATTENTION = {"self_attn", "attn", "attention"}
"""What transformers' decoders call the attention of a layer."""


class ValueFunction(nn.Module, ABC):
    """A linear head in fp32 on the states that a subclass gives it."""

    reads_final_hidden = False
    """Whether those states are the trunk's final hidden states, which a decoder has."""

    def __init__(self, trunk: Any, width: int) -> None:
        super().__init__()
        dtype = torch.promote_types(trunk.dtype, torch.float32)
        self.head = nn.Linear(width, 1, device=trunk.device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def read(self, states: Tensor) -> Tensor:
        """[N] fp32 values of the states [N, H] that the head reads."""
        with torch.autocast(states.device.type, enabled=False):
            return self.head(states.to(self.head.weight.dtype)).squeeze(-1)

    @abstractmethod
    def states(self, hidden: Tensor, layout: Layout, positions: Tensor, *, detach: bool) -> Tensor:
        """[N, H]: what the head reads at the positions [N] of the layout.

        Args:
            hidden: [N, H], the policy's final hidden states there.
            detach: no gradient into the policy's trunk (value-only iterations).
        """


class SharedValue(ValueFunction):
    """A linear head on the trunk's final hidden states."""

    reads_final_hidden = True

    def states(self, hidden: Tensor, layout: Layout, positions: Tensor, *, detach: bool) -> Tensor:
        return hidden.detach() if detach else hidden


class DetachedValue(ValueFunction):
    """A linear head on the trunk that does not train the trunk."""

    reads_final_hidden = True

    def states(self, hidden: Tensor, layout: Layout, positions: Tensor, *, detach: bool) -> Tensor:
        return hidden.detach()


class CriticValue(ValueFunction):
    """A linear head on a trunk of its own."""

    def __init__(self, trunk: Any, width: int) -> None:
        super().__init__(trunk, width)
        self.trunk = trunk

    def states(self, hidden: Tensor, layout: Layout, positions: Tensor, *, detach: bool) -> Tensor:
        return states_at(self.trunk, positions, layout.input_ids, packing=layout.packing)


def critic_of_policy(causal_lm: PreTrainedModel) -> CriticValue:
    """A critic that starts as a copy of the policy's trunk."""
    width = causal_lm.get_output_embeddings().weight.shape[1]
    return CriticValue(copy.deepcopy(causal_lm.base_model), width)


def critic_of_file(causal_lm: PreTrainedModel, path: str) -> CriticValue:
    """A critic of the policy's architecture with the weights that `save_value_function` wrote.

    Raises:
        ValueError: they cannot be read, or are of another value function.
    """
    critic = critic_of_policy(causal_lm)
    try:
        critic.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(f"critic_model {path} is no critic of the policy: {error}") from error
    return critic


def freeze_attention(trunk: nn.Module) -> None:
    """Leaves the attention of each layer as it is.

    Raises:
        ValueError: none of the trunk's modules is called an attention.
    """
    frozen = [
        parameter for name, parameter in trunk.named_parameters() if ATTENTION & {*name.split(".")}
    ]
    if not frozen:
        raise ValueError(
            f"critic_frozen=attention: {type(trunk).__name__} has no module of a name "
            f"in {', '.join(sorted(ATTENTION))}"
        )
    for parameter in frozen:
        parameter.requires_grad_(False)


def critic_of_reward_model(model: Any, name: str) -> CriticValue:
    """A critic that starts as the reward model: its value of a state is the score of the text.

    Args:
        name: of the model, for messages.

    Raises:
        ValueError: the model has several labels, or no `score` layer on its trunk (an encoder).
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
