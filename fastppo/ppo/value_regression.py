"""The value head in closed form: ridge regression of the returns on the hidden states.

A linear head needs no learning rate. Let a batch's tokens be the rows of Z = [X 1 y], with the
value head's input states X [N, H] and the Monte Carlo returns y [N]. The regression only needs
second moments, decayed by ρ per update:

    M ← ρM + ZᵀZ                                    [H + 2, H + 2]

They contain the means x̄, ȳ and the centred sums S = Σ(x − x̄)(x − x̄)ᵀ, s = Σ(x − x̄)(y − ȳ). The head
follows, without shrinkage of the bias:

    w = (S + λ·mean(diag S)·I)⁻¹ s,    bias = ȳ − x̄ᵀw

λ is chosen from `RIDGES` by prediction: each λ's head is tested on the batch after its fit. The
tokens of a response share its return, so generalized cross-validation, with its assumption of
independent rows, would shrink too little. With u = (w, bias, −1) the squared error on a batch is
uᵀ(ZᵀZ)u, so no states are kept.

The states are those of the update's last epoch; the loss has them anyway. M is fp64 on the device:
8(H + 2)² bytes, and the same again for the current batch, and for the batch before a minibatch that
may have to be repeated. A batch costs 2N(H + 2)² FLOP, and an update len(RIDGES) Cholesky
decompositions of H³/3 FLOP.

POISE (arXiv:2605.07579) also trains a value probe on the actor's hidden states.
"""

from __future__ import annotations

from typing import Any

import torch
from fastppo_kernels.definition import WITHOUT_FP64
from torch import Tensor

from fastppo.data.world import World
from fastppo.models.sharding import sharded_like

DECAY = 0.8
"""ρ: the factor on a batch's weight at each later update."""

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""λ, in units of the states' mean variance. The largest leaves little more than the mean."""

FIRST_RIDGE = 1
"""Index of the first fit's λ, before a second batch allows a comparison."""

TOKENS_PER_WEIGHT = 4
"""With fewer tokens than this per state dimension, the first fit uses the largest λ. A head with
less shrinkage may predict worse than the mean."""

ROWS = 512
"""Rows of states converted to fp64 at a time."""

NEGLIGIBLE = 1e-10
"""A variance below this share of the mean square is rounding error."""


class ValueRegression:
    """Moments of the states and returns of a run, and the value heads fitted to them."""

    def __init__(self) -> None:
        self.moments: Tensor | None = None
        """M, [H + 2, H + 2] fp64; None before the first fit."""
        self.heads: Tensor | None = None
        """[len(RIDGES), H + 2] fp64: u for each λ."""
        self.errors = torch.zeros(len(RIDGES), dtype=torch.float64)
        """Σ (value − return)² for each λ on the batch after its fit, decayed like M."""
        self.batch: Tensor | None = None
        """ZᵀZ of the current batch so far."""

    def begin_batch(self) -> None:
        """Discard the tokens added since the last fit."""
        self.batch = None

    @torch.no_grad()
    def add(self, states: Tensor, returns: Tensor, counted: Tensor) -> None:
        """Add the tokens of a microbatch.

        Args:
            states: [n, H], the value head's inputs, any dtype.
            returns: [n], their Monte Carlo returns.
            counted: [n] bool, the tokens to add; the others are left out.
        """
        size = states.shape[1] + 2
        if self.batch is None:
            device = _device_of_moments(states.device)
            self.batch = torch.zeros(size, size, dtype=torch.float64, device=device)
        for start in range(0, len(states), ROWS):
            chosen = slice(start, start + ROWS)
            z = self.batch.new_empty(len(states[chosen]), size)
            z[:, :-2] = states[chosen].to(z.device)
            z[:, -2] = 1
            z[:, -1] = returns[chosen].to(z.device)
            z *= counted[chosen].unsqueeze(1).to(z.device)
            self.batch.addmm_(z.T, z)

    @torch.no_grad()
    def fit(self, head: torch.nn.Linear, world: World) -> None:
        """Fit the value head to the batch of all ranks and the decayed moments before it.

        An empty batch, or one with a number that is not finite, leaves the head as it is.
        """
        if self.batch is None:  # memory ran out, or the update ended before its last epoch
            return
        batch = world.total(self.batch)
        self.batch = None
        if not batch.isfinite().all() or batch[-2, -2] == 0:
            return
        if self.moments is None or self.heads is None:
            self.moments = torch.zeros_like(batch)
            self.errors = self.errors.to(batch.device)
        else:
            errors = ((self.heads @ batch) * self.heads).sum(1)
            self.errors = DECAY * self.errors + errors
        self.moments.mul_(DECAY).add_(batch)
        self.heads = torch.stack([ridge_head(self.moments, ridge) for ridge in RIDGES])
        self._write(head)

    @property
    def best(self) -> int:
        """Index in `RIDGES` of the λ in use."""
        if self.errors.any():
            return int(self.errors.argmin())
        assert self.moments is not None
        width = len(self.moments) - 2
        is_narrow = self.moments[-2, -2] >= TOKENS_PER_WEIGHT * width
        return FIRST_RIDGE if is_narrow else len(RIDGES) - 1

    @property
    def metrics(self) -> dict[str, float]:
        """The λ in use, after the first fit."""
        return {} if self.heads is None else {"value_ridge": RIDGES[self.best]}

    def _write(self, head: Any) -> None:
        assert self.heads is not None
        chosen = self.heads[self.best].to(head.weight.dtype)
        head.weight.copy_(sharded_like(chosen[None, :-2], head.weight))
        head.bias.copy_(sharded_like(chosen[-2:-1], head.bias))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint; none before the first fit."""
        if self.moments is None or self.heads is None:
            return {}
        return {"moments": self.moments, "heads": self.heads, "errors": self.errors}

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, Tensor], head: torch.nn.Linear) -> None:
        """Restore what `tensors` returned, and the head.

        Raises:
            ValueError: the states have another width.
        """
        if not tensors:
            return
        size = head.in_features + 2
        expected = {"moments": (size, size), "heads": (len(RIDGES), size), "errors": (len(RIDGES),)}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        is_real = all(tensor.is_floating_point() for tensor in tensors.values())
        if shapes != expected or not is_real:
            raise ValueError(
                f"the checkpoint's value regression does not fit: expected {expected}, got {shapes}"
            )
        device = _device_of_moments(head.weight.device)
        self.moments = tensors["moments"].to(device)
        self.heads = tensors["heads"].to(device)
        self.errors = tensors["errors"].to(device)
        self._write(head)


def _device_of_moments(device: torch.device) -> torch.device:
    """Return the device itself, or the CPU for a device without fp64."""
    return torch.device("cpu") if device.type in WITHOUT_FP64 else device


def ridge_head(moments: Tensor, ridge: float) -> Tensor:
    """Return (w, bias, −1), [H + 2] fp64, from the moments [H + 2, H + 2] of (x, 1, y)."""
    count = moments[-2, -2]
    means = moments[-2] / count
    centred = moments - (count * means).outer(means)
    covariance = centred[:-2, :-2]
    mean_square = moments.diagonal()[:-2].mean()
    scale = covariance.diagonal().mean().clamp(min=NEGLIGIBLE * mean_square)
    # If all states are zero, any λ gives the weight 0.
    scale = torch.where(scale > 0, scale, 1.0)
    weight = _solve(covariance, centred[:-2, -1], ridge * scale)
    bias = means[-1] - means[:-2] @ weight
    return torch.cat([weight, bias[None], -torch.ones_like(bias[None])])


def _solve(matrix: Tensor, target: Tensor, ridge: Tensor) -> Tensor:
    """Return (matrix + ridge·I)⁻¹ target.

    The ridge grows by powers of ten until the matrix is positive definite in fp64.
    """
    while True:
        shrunk = matrix.clone()
        shrunk.diagonal().add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(shrunk)
        if not failed:
            return torch.cholesky_solve(target.unsqueeze(1), factor).squeeze(1)
        ridge = 10 * ridge
