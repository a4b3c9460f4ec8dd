"""The optimizer of every stage: fp32 master weights, fp16 loss scaling, clipping and schedule.

`Optimizer` wraps an optimizer of `torch.optim`, or one with its interface.

Master weights. An AdamW update is often smaller than 1/256 of its weight, and bfloat16 rounds it
away. The wrapped optimizer therefore steps an fp32 copy of each 16-bit weight, and the model's
weight is that copy, rounded. Gradients accumulate in fp32 over microbatches (`grad_dtype`). The
model itself is bfloat16 throughout, so flash-attn works and no product casts a weight.

Loss scaling. Gradients below 6e-8 vanish in fp16. With `precision=fp16` the loss is multiplied by a
scale (torch's `GradScaler`), and the gradients are divided by it before they are clipped. The scale
is halved when a gradient overflows, and doubled after 2000 steps without an overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from fastppo.models.sharding import full_tensor

LEAST_SCALE = 1.0
"""The smallest loss scale. A gradient that still overflows is not the scale's fault."""


class Optimizer:
    """An optimizer over fp32 master weights.

    Args:
        make: class or function that takes parameter groups and returns an optimizer.
        groups: parameter groups over the model's weights.
        critic: weights that are clipped apart from the others.
        scaler: scales the loss; disabled except with fp16.
    """

    def __init__(
        self,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        groups: list[dict[str, Any]],
        *,
        critic: Sequence[nn.Parameter] = (),
        scaler: GradScaler | None = None,
    ) -> None:
        self.weights: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        """The model's trained weights."""
        self.masters: list[nn.Parameter] = [_master(weight) for weight in self.weights]
        """The weights that the wrapped optimizer steps, in the same order. An fp32 weight is its
        own master."""
        masters = dict(zip(self.weights, self.masters, strict=True))
        self.inner = make([{**g, "params": [masters[p] for p in g["params"]]} for g in groups])
        stepped = [p for g in self.param_groups for p in g["params"]]
        weights = {id(master): weight for weight, master in masters.items()}
        if sorted(map(id, stepped)) != sorted(weights):
            raise ValueError(
                f"an optimizer must keep the parameters of its groups, got {len(stepped)} "
                f"parameters for {len(self.masters)}"
            )
        # In the optimizer's order, by which its state is numbered.
        self.masters = stepped
        self.weights = [weights[id(master)] for master in stepped]
        self.scaler = scaler or GradScaler("cpu", enabled=False)
        self.steps_taken = 0
        """Steps that have changed the weights since this object was made."""
        self.overflowed_steps = 0
        self._loss_scale = self.scaler.get_scale()
        """The loss scale when the host last read it. Reading it from a GPU waits."""
        self._critic = {id(p) for p in critic}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        return self.inner.state

    def zero_grad(self) -> None:
        """Free the gradients."""
        for weight in self.weights:
            weight.grad = None

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a loss."""
        self.scaler.scale(loss).backward()

    @property
    def has_gradients(self) -> bool:
        """Whether a trained weight has a gradient."""
        return any(weight.grad is not None for weight in self.weights)

    def clip_gradients(self, max_norm: float) -> dict[str, Tensor]:
        """Scale gradients down to a norm. A critic's are clipped separately.

        Returns:
            `grad_norm`, and `value_grad_norm` with a critic: the norms before clipping; with fp16
            also the new `loss_scale`. 0-d each.
        """
        groups = {"grad_norm": [p for p in self.weights if id(p) not in self._critic]}
        if self._critic:
            groups["value_grad_norm"] = [p for p in self.weights if id(p) in self._critic]
        scale: dict[str, Tensor] = {}
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.inner)
            self.scaler.update()
            one = torch.ones((), device=self.weights[0].device)
            scale["loss_scale"] = self.scaler.scale(one)
        norms = {}
        for name, weights in groups.items():
            norm = full_tensor(nn.utils.clip_grad_norm_(weights, max_norm))
            if not any(weight.grad is not None for weight in weights):
                # As of a policy while only the critic trains: torch's zero is on the CPU.
                norm = torch.zeros((), device=self.weights[0].device)
            norms[name] = norm
        return norms | scale

    def step(self, numbers: Mapping[str, float] | None = None) -> bool:
        """Take a step, unless one of the step's numbers is not finite.

        A gradient that is not finite must not reach AdamW. A zero gradient in its place would not
        do either: the moments would decay and move the weights.

        Args:
            numbers: `loss` and what `clip_gradients` returned; None means that all are finite.

        Returns:
            False if a number is not finite. An overflow under a loss scale that can still shrink
            also skips the step, but counts as `overflowed_steps` and returns True.
        """
        if numbers is None:
            self._step()
            return True
        before = self._loss_scale
        self._loss_scale = numbers.get("loss_scale", before)
        if all(map(math.isfinite, numbers.values())):
            self._step()
            return True
        overflowed = self._loss_scale < before and before > LEAST_SCALE
        if overflowed and math.isfinite(numbers["loss"]):
            self.overflowed_steps += 1
            return True
        return False

    @torch.no_grad()
    def _step(self) -> None:
        pairs = [(w, m) for w, m in zip(self.weights, self.masters, strict=True) if w is not m]
        for weight, master in pairs:
            master.grad = weight.grad
        self.steps_taken += 1
        self.inner.step()
        for weight, master in pairs:
            master.grad = None
            weight.copy_(master)

    def metrics(self, overflowed_before: int) -> dict[str, float]:
        """Return the loss scale and the steps that overflowed since; nothing without a scale."""
        if not self.scaler.is_enabled():
            return {}
        overflowed = float(self.overflowed_steps - overflowed_before)
        return {"loss_scale": self._loss_scale, "overflowed_steps": overflowed}

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, with each 16-bit weight's `master` in its entry."""
        state_dict = self.inner.state_dict()
        state = {index: dict(entry) for index, entry in state_dict["state"].items()}
        for index, (weight, master) in enumerate(zip(self.weights, self.masters, strict=True)):
            if weight is not master:
                state.setdefault(index, {})["master"] = master.detach()
        return {**state_dict, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, and round the weights from their masters."""
        state = {index: dict(entry) for index, entry in state_dict["state"].items()}
        masters = {index: entry.pop("master", None) for index, entry in state.items()}
        state = {index: entry for index, entry in state.items() if entry}
        self.inner.load_state_dict({**state_dict, "state": state})
        for index, (weight, master) in enumerate(zip(self.weights, self.masters, strict=True)):
            saved = masters.get(index)
            if saved is not None:
                master.copy_(saved)
            if weight is not master:
                weight.copy_(master)

    def loss_scale_state(self) -> dict[str, Any]:
        """Return the state of the loss scale as JSON; empty without one."""
        if not self.scaler.is_enabled():
            return {}
        return {**self.scaler.state_dict(), "overflowed_steps": self.overflowed_steps}

    def load_loss_scale(self, state: Mapping[str, Any]) -> None:
        """Restore what `loss_scale_state` returned."""
        if state and self.scaler.is_enabled():
            self.overflowed_steps = state.get("overflowed_steps", 0)
            self.scaler.load_state_dict(dict(state))
            self._loss_scale = self.scaler.get_scale()


def _master(weight: nn.Parameter) -> nn.Parameter:
    if weight.dtype in (torch.float32, torch.float64):
        return weight
    weight.grad_dtype = torch.float32
    return nn.Parameter(weight.detach().float())


def schedule(name: str, step: int, warmup: int, total: int) -> float:
    """Return the factor of the peak rate: linear warm-up, then constant or decay to 0."""
    if step < warmup:
        return (step + 1) / warmup
    if name == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - progress if name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
