"""Weights in bfloat16, trained as fp32 ones are: the optimiser keeps an fp32 master of each.

An update of AdamW is often smaller than 1/256 of its weight, which bfloat16 rounds away; the master
takes it, and the model's weight is the master, rounded. Gradients are added up in fp32, microbatch
by microbatch: torch's autograd does that where a weight says so (`grad_dtype`). The model reads
bfloat16 throughout, so that flash-attn can be used and no product casts a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class MasterWeights:
    """Mixed into an optimiser of torch's interface: `class A(MasterWeights, torch.optim.AdamW)`.

    Its groups hold the masters; a weight that is in fp32 already, or fp64, is its own. `weights`
    are the model's, in the same order.
    """

    weights: list[nn.Parameter]

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        self.weights = [weight for group in groups for weight in group["params"]]
        master_groups = []
        for group in groups:
            master_groups.append({**group, "params": [self._master(p) for p in group["params"]]})
        super().__init__(master_groups, **options)  # type: ignore[call-arg]

    @staticmethod
    def has_master(weight: Tensor) -> bool:
        """Whether a weight that is not in fp32 gets a master."""
        return True

    def _master(self, weight: nn.Parameter) -> nn.Parameter:
        if weight.dtype in (torch.float32, torch.float64):
            return weight
        weight.grad_dtype = torch.float32
        return nn.Parameter(weight.detach().float()) if self.has_master(weight) else weight

    @property
    def masters(self) -> list[nn.Parameter]:
        """What the optimiser steps, in the order of `weights`."""
        groups: Any = self.param_groups  # type: ignore[attr-defined]
        return [master for group in groups for master in group["params"]]

    @property
    def _rounded(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """(weight, master) of the weights that are not their own master."""
        pairs = zip(self.weights, self.masters, strict=True)
        return [(weight, master) for weight, master in pairs if weight is not master]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """A step of the masters on the weights' gradients, and the weights rounded from them."""
        pairs = self._rounded
        for weight, master in pairs:
            master.grad = weight.grad
        loss = super().step(closure)  # type: ignore[misc]
        for _, master in pairs:
            master.grad = None
        self._round()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees the gradients, whatever `set_to_none` is."""
        # Not by torch's own, which groups them first and notes itself for a profile.
        for weight in self.weights:
            weight.grad = None

    def state_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """For each weight, the shapes of what `state_dict` may hold."""
        return [
            {"step": (), "master": tuple(weight.shape), **self.moment_shapes(weight)}
            for weight in self.weights
        ]

    def moment_shapes(self, weight: Tensor) -> dict[str, tuple[int, ...]]:
        """The shapes of a weight's two moments."""
        return dict.fromkeys(("exp_avg", "exp_avg_sq"), tuple(weight.shape))

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's, and with each weight's state its master."""
        state_dict = super().state_dict()  # type: ignore[misc]
        state = {index: dict(entry) for index, entry in state_dict["state"].items()}
        for index, (weight, master) in enumerate(zip(self.weights, self.masters, strict=True)):
            if weight is not master:
                state.setdefault(index, {})["master"] = master.detach()
        return {**state_dict, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` gave, and rounds the weights from their masters."""
        state = {index: dict(entry) for index, entry in state_dict["state"].items()}
        masters = {index: entry.pop("master", None) for index, entry in state.items()}
        state = {index: entry for index, entry in state.items() if entry}
        super().load_state_dict({**state_dict, "state": state})  # type: ignore[misc]
        for index, master in enumerate(self.masters):
            saved = masters.get(index)
            if saved is not None:
                master.copy_(saved)
        self._round()

    def _round(self) -> None:
        for weight, master in self._rounded:
            weight.detach().copy_(master.detach())


class MasterAdamW(MasterWeights, torch.optim.AdamW):
    """AdamW on fp32 masters."""
