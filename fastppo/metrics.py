"""Numbers of an iteration: sums kept on the device until they are read once, and the clock."""

from __future__ import annotations

import time

import torch
from fastppo_kernels.reference import combine_sums
from torch import Tensor

from fastppo.losses import loss_metrics


class Meter:
    """Metrics of an update, kept on the device until the end."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.value_losses: list[Tensor] = []
        self.ptx_losses: list[Tensor] = []
        self.steps: list[dict[str, float]] = []

    def microbatch(self, sums: Tensor, value: Tensor) -> None:
        self.sums = sums if self.sums is None else combine_sums(self.sums, sums)
        self.value_losses.append(value)

    def pretraining(self, loss: Tensor) -> None:
        self.ptx_losses.append(loss)

    def minibatch(self, **numbers: float) -> None:
        self.steps.append(numbers)

    def metrics(self) -> dict[str, float]:
        """Means over the tokens of all minibatches, or over the minibatches."""
        assert self.sums is not None
        steps = len(self.steps)
        found = loss_metrics(self.sums)
        # Each minibatch's policy loss is whole, being weighted; the sum over minibatches is not.
        found["policy_loss"] = found["policy_loss"] / steps
        found["value_loss"] = torch.stack(self.value_losses).sum() / steps
        found["kl_loss"] = found.pop("kl")
        if self.ptx_losses:
            found["ptx_loss"] = torch.stack(self.ptx_losses).mean()
        metrics = to_floats(found)
        for name in self.steps[0]:
            metrics[name] = sum(step[name] for step in self.steps) / steps
        return metrics


class Clock:
    """Seconds of each phase of an iteration."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[f"seconds/{name}"] = now - self.last
        self.last = now

    def metrics(self, tokens: int) -> dict[str, float]:
        """The laps, and the response tokens per second of the whole iteration."""
        return {**self.laps, "tokens_per_second": tokens / (self.last - self.start)}


def to_floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """0-d tensors as numbers, in one transfer."""
    flat = torch.stack([value.detach().float() for value in metrics.values()]).tolist()
    return dict(zip(metrics, flat, strict=True))


def explained_variance(returns: Tensor, values: Tensor) -> Tensor:
    """1 − Var(returns − values)/Var(returns): 1 is a perfect value function, 0 a constant one."""
    residual = (returns - values).var(correction=0)
    return 1 - residual / returns.var(correction=0).clamp(min=1e-8)
