"""Where values come from: four value functions with one interface.

    shared      a linear head on the policy's trunk; the value loss trains the trunk too
    detached    the same head, and its loss stops there: the trunk belongs to the policy
    branch      a copy of the trunk's last k layers of its own, on the trunk below them
    critic      a transformer of its own, started from the policy or from a reward model

Stiennon et al. 2020 (section 3.4) found that a shared trunk can hurt the policy early in training,
when values are mostly wrong; the other three are the answers to that, in order of their cost.

Heads are fp32 whatever the trunk is (fp64 of one in fp64): values are regressed to a few digits.
They start at zero, no opinion before the first returns are seen; a critic that starts from a reward
model starts from its scores, as InstructGPT's did (Ouyang et al. 2022, appendix C.4).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from fastppo.data.batch import Layout
from fastppo.models.last_layer import states_at
from fastppo.models.layers import layers_of
from fastppo.models.pretrained import load_whole
from fastppo.models.trunk import hidden_states


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

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the trunk's forward pass: what the value function needs to see of it."""
        yield

    def forward(
        self,
        hidden: Tensor,
        layout: Layout,
        positions: Tensor,
        *,
        detach: bool = False,
    ) -> Tensor:
        """[N] fp32 values at the positions [N] of the layout.

        Args:
            hidden: [N, H], the trunk's final hidden states there.
            detach: no gradient into the policy's trunk (value-only iterations).
        """
        return self.read(self.states(hidden, layout, positions, detach))

    def read(self, states: Tensor) -> Tensor:
        """[N] fp32 values of the states [N, H] that the head reads."""
        with torch.autocast(states.device.type, enabled=False):
            return self.head(states.to(self.head.weight.dtype)).squeeze(-1)

    @abstractmethod
    def states(self, hidden: Tensor, layout: Layout, positions: Tensor, detach: bool) -> Tensor:
        """[N, H]: what the head reads."""


class SharedValue(ValueFunction):
    """A linear head on the trunk's final hidden states."""

    reads_final_hidden = True

    def states(self, hidden: Tensor, layout: Layout, positions: Tensor, detach: bool) -> Tensor:
        return hidden.detach() if detach else hidden


class DetachedValue(ValueFunction):
    """A linear head on the trunk that does not train the trunk."""

    reads_final_hidden = True

    def states(self, hidden: Tensor, layout: Layout, positions: Tensor, detach: bool) -> Tensor:
        return hidden.detach()


class BranchValue(ValueFunction):
    """A copy of the trunk's last layers and final norm, on the trunk's hidden states below them.

    The copied layers are called as the trunk called its own (masks, positions, rotary embeddings):
    `watching` records those calls, so any architecture whose trunk is a list of layers will do.

    Raises:
        ValueError: the trunk is not built that way, or has fewer layers.
    """

    def __init__(self, trunk: Any, width: int, layers: int) -> None:
        super().__init__(trunk, width)
        last, after = _last_layers(trunk, layers)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for layer in last)
        self.after = nn.ModuleList(copy.deepcopy(module) for module in after)
        self._watched = [last]  # in a list, so that the trunk's layers are not registered here
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._calls = []
        hooks = [
            layer.register_forward_pre_hook(
                lambda module, args, keywords: self._calls.append((args, keywords)),
                with_kwargs=True,
            )
            for layer in self._watched[0]
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def states(self, hidden: Tensor, layout: Layout, positions: Tensor, detach: bool) -> Tensor:
        calls, self._calls = self._calls, []
        args, keywords = calls[0]
        x = args[0] if args else keywords["hidden_states"]
        x = x.detach() if detach else x
        for layer, (args, keywords) in zip(self.layers, calls, strict=True):
            rest = {name: value for name, value in keywords.items() if name != "hidden_states"}
            output = layer(x, *args[1:], **rest)
            x = output[0] if isinstance(output, tuple) else output
        for module in self.after:
            x = module(x)
        return x.flatten(0, 1)[positions]


class CriticValue(ValueFunction):
    """A trunk of its own. `score`, a reward model's head [1, H], is where the head starts."""

    def __init__(
        self, trunk: Any, width: int, score: Tensor | None = None, offset: float = 0.0
    ) -> None:
        super().__init__(trunk, width)
        self.trunk = trunk
        if score is not None:
            with torch.no_grad():
                self.head.weight.copy_(score)
                self.head.bias.fill_(-offset)

    def states(self, hidden: Tensor, layout: Layout, positions: Tensor, detach: bool) -> Tensor:
        return states_at(self.trunk, positions, layout.input_ids, packing=layout.packing)


def critic_of_policy(causal_lm: PreTrainedModel) -> CriticValue:
    """A critic that starts as a copy of the policy's trunk."""
    width = causal_lm.get_output_embeddings().weight.shape[1]
    return CriticValue(copy.deepcopy(causal_lm.base_model), width)


def critic_of_reward_model(
    name: str, *, dtype: torch.dtype, device: torch.device | str
) -> CriticValue:
    """A critic that starts as the reward model: its value of a state is the score of the text.

    Raises:
        ValueError: the model has several labels, or no `score` layer on its trunk (an encoder).
    """
    model, _ = load_whole(AutoModelForSequenceClassification, name, "critic_model", dtype=dtype)
    model = model.to(device)  # type: ignore[arg-type]
    score = getattr(model, "score", None)
    if score is None or model.config.num_labels != 1:
        raise ValueError(
            f"critic_model {name}: expected a decoder with one label, got "
            f"{type(model).__name__} with {model.config.num_labels}"
        )
    offset = getattr(model.config, "score_mean", 0.0)
    return CriticValue(model.base_model, score.weight.shape[1], score.weight, offset)


def _last_layers(trunk: PreTrainedModel, count: int) -> tuple[list[nn.Module], list[nn.Module]]:
    """(the last `count` layers, the modules that the trunk calls after them, in order)."""
    try:
        owner, layers = layers_of(trunk)
    except ValueError as error:
        raise ValueError(f"value_model=branch: {error}; use value_model=critic") from error
    total = len(layers)
    if not 1 <= count <= total:
        raise ValueError(f"value_branch_layers must be in [1, {total}], got {count}")
    order: list[nn.Module] = []
    hooks = [
        module.register_forward_hook(lambda called, args, output: order.append(called))
        for module in [*(child for child in owner.children() if child is not layers), layers[-1]]
    ]
    with torch.no_grad():
        hidden_states(trunk, torch.zeros(1, 2, dtype=torch.int64, device=trunk.device))
    for hook in hooks:
        hook.remove()
    return list(layers[-count:]), order[order.index(layers[-1]) + 1 :]
