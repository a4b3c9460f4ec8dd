"""The value head in closed form: ridge regression of the returns on the states that it reads.

A linear head needs no learning rate. With a batch's tokens as the rows of Z = [X 1 y], X [N, H] the
states that the head reads and y [N] the Monte Carlo returns, all that a regression needs are the
second moments, of this batch and, ρ times as much for each update since, of those before it:

    M ← ρM + ZᵀZ                                    [H + 2, H + 2]

They give the means x̄, ȳ and the centred sums S = Σ(x − x̄)(x − x̄)ᵀ, s = Σ(x − x̄)(y − ȳ), and these
the head, whose bias is not shrunk:

    w = (S + λ·mean(diag S)·I)⁻¹ s,    bias = ȳ − x̄ᵀw

λ is the one of `RIDGES` whose heads foresaw best, each the batch that came after its fit: tokens of
one response share its return, so a rule that takes them for independent, as generalised
cross-validation does, would shrink too little. With u = (w, bias, −1) the squared error on a batch
is uᵀ(ZᵀZ)u, so nobody keeps a state.

The states are those of the update's last epoch, which the loss has anyway. M is fp64 on the device:
8(H + 2)² bytes, and as much for the batch's share. A batch costs 2N(H + 2)² FLOP, an update
len(RIDGES) Cholesky decompositions of H³/3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastppo.data.world import World
from fastppo.models.sharding import sharded_like
from fastppo.ppo.experience import Experience

DECAY = 0.8
"""ρ: what a batch counts for after each later update."""

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""λ, in units of the mean variance of a state's entry. The largest leaves little but the mean."""

FIRST_RIDGE = 1
"""Index of the ridge of the first fit, before a second batch can compare them."""

TOKENS_PER_WEIGHT = 4
"""A first batch with fewer tokens than this per entry of a state begins with the largest ridge: a
head with less shrinkage may predict the next batch worse than the mean does."""

ROWS = 512
"""Rows of states that are converted to fp64 at once."""

NEGLIGIBLE = 1e-10
"""A variance of this share of the mean square is rounding: the states do not vary."""


class ValueRegression:
    """The moments of a run, and the heads that follow from them."""

    def __init__(self) -> None:
        self.moments: Tensor | None = None
        """M, [H + 2, H + 2] fp64; None before the first fit."""
        self.heads: Tensor | None = None
        """[len(RIDGES), H + 2] fp64: u of each λ."""
        self.errors = torch.zeros(len(RIDGES), dtype=torch.float64)
        """Σ (value − return)² of each λ on the batches after its fits, forgotten as M is."""
        self.batch: Tensor | None = None
        """ZᵀZ of the batch, as far as it has been seen."""

    def begin_batch(self) -> None:
        """Forgets what was added since the last fit."""
        self.batch = None

    @torch.no_grad()
    def add(self, states: Tensor, micro: Experience) -> None:
        """Adds the tokens of a microbatch.

        Args:
            states: [n, H], what the head read before each of them, in any dtype.
            micro: tokens without weight, which only keep a rank busy, count for nothing.
        """
        returns = micro.complete_returns
        assert micro.token_weights is not None
        counts = micro.token_weights > 0
        size = states.shape[1] + 2
        if self.batch is None:
            self.batch = torch.zeros(size, size, dtype=torch.float64, device=states.device)
        for start in range(0, len(states), ROWS):
            chosen = slice(start, start + ROWS)
            z = self.batch.new_empty(len(states[chosen]), size)
            z[:, :-2] = states[chosen]
            z[:, -2] = 1
            z[:, -1] = returns[chosen]
            z *= counts[chosen].unsqueeze(1)
            self.batch.addmm_(z.T, z)

    @torch.no_grad()
    def fit(self, head: torch.nn.Linear, world: World) -> None:
        """Takes up the batch that was added, of all ranks, and writes the head that follows. A
        batch without tokens, or with a number that is not finite, changes nothing."""
        if self.batch is None:  # the memory of a process that is alone ran out
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
        """The place in `RIDGES` of the λ that is used."""
        if self.errors.any():
            return int(self.errors.argmin())
        assert self.moments is not None
        width = len(self.moments) - 2
        is_narrow = self.moments[-2, -2] >= TOKENS_PER_WEIGHT * width
        return FIRST_RIDGE if is_narrow else len(RIDGES) - 1

    @property
    def metrics(self) -> dict[str, float]:
        """The ridge of the head, once there is one."""
        return {} if self.heads is None else {"value_ridge": RIDGES[self.best]}

    def _write(self, head: Any) -> None:
        assert self.heads is not None
        chosen = self.heads[self.best].to(head.weight.dtype)
        head.weight.copy_(sharded_like(chosen[None, :-2], head.weight))
        head.bias.copy_(sharded_like(chosen[-2:-1], head.bias))

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds; nothing before the first fit."""
        if self.moments is None or self.heads is None:
            return {}
        return {"moments": self.moments, "heads": self.heads, "errors": self.errors}

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, Tensor], head: torch.nn.Linear) -> None:
        """Restores what `tensors` gave, and the head with it.

        Raises:
            ValueError: they are of states of another width.
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
        device = head.weight.device
        self.moments = tensors["moments"].to(device)
        self.heads = tensors["heads"].to(device)
        self.errors = tensors["errors"].to(device)
        self._write(head)


def ridge_head(moments: Tensor, ridge: float) -> Tensor:
    """(w, bias, −1) [H + 2] fp64 of the moments [H + 2, H + 2] of (x, 1, y)."""
    count = moments[-2, -2]
    means = moments[-2] / count
    centred = moments - (count * means).outer(means)
    covariance = centred[:-2, :-2]
    mean_square = moments.diagonal()[:-2].mean()
    scale = covariance.diagonal().mean().clamp(min=NEGLIGIBLE * mean_square)
    # Where all states are zero any ridge gives the weight 0.
    scale = torch.where(scale > 0, scale, 1.0)
    weight = _solve(covariance, centred[:-2, -1], ridge * scale)
    bias = means[-1] - means[:-2] @ weight
    return torch.cat([weight, bias[None], -torch.ones_like(bias[None])])


def _solve(matrix: Tensor, target: Tensor, ridge: Tensor) -> Tensor:
    """(matrix + ridge·I)⁻¹ target, with the least power of ten times the ridge that makes it
    positive definite in fp64 too."""
    while True:
        shrunk = matrix.clone()
        shrunk.diagonal().add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(shrunk)
        if not failed:
            return torch.cholesky_solve(target.unsqueeze(1), factor).squeeze(1)
        ridge = 10 * ridge
