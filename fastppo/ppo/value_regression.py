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
8(H + 2)² bytes, and the same again for the current batch, for the batch before a minibatch that
may have to be repeated, and for the new M during a fit. A batch costs 2N(H + 2)² FLOP, and an
update len(RIDGES) Cholesky decompositions of H³/3 FLOP.

POISE (arXiv:2605.07579) also trains a value probe on the actor's hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from fastppo_kernels.definition import WITHOUT_FP64
from torch import Tensor

from fastppo.data.batch import on_device
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

ERRORS = [f"value_fit/error/{ridge:g}" for ridge in RIDGES]
FAILURES = [f"value_fit/failed/{ridge:g}" for ridge in RIDGES]
"""Names among the numbers of a fit."""


class ValueRegression:
    """Moments of the states and returns of a run, and the value heads fitted to them."""

    def __init__(self) -> None:
        self.moments: Tensor | None = None
        """M, [H + 2, H + 2] fp64; None before the first fit."""
        self.heads: Tensor | None = None
        """[len(RIDGES), H + 2] fp64: u for each λ."""
        self.errors: Tensor | None = None
        """Σ (value − return)² for each λ on the batch after its fit, decayed like M: [len(RIDGES)]
        fp64."""
        self.best = 0
        """Index in `RIDGES` of the λ in use, after the first fit."""
        self.batch: Tensor | None = None
        """ZᵀZ of the current batch so far."""
        self._fitted: _Fit | None = None

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
    def begin_fit(self, world: World) -> dict[str, Tensor]:
        """Fit a head for each λ to the batch of all ranks and the decayed moments before it.

        Returns:
            The numbers that `end_fit` needs, 0-d tensors; none without a batch.
        """
        if self.batch is None:  # memory ran out, or the update ended before its last epoch
            return {}
        batch = world.total(self.batch)
        self.batch = None
        finite = batch.isfinite().all()
        added = batch[-2, -2].clone()
        if self.moments is None or self.heads is None or self.errors is None:
            moments = batch
            errors = batch.new_zeros(len(RIDGES))
        else:
            moments = (DECAY * self.moments).add_(batch)
            errors = DECAY * self.errors + ((self.heads @ batch) * self.heads).sum(1)
        del batch  # its memory is needed for the decompositions
        heads, failures = ridge_heads(moments)
        self._fitted = _Fit(moments, errors, heads)
        return {
            "value_fit/finite": finite,
            "value_fit/added": added,
            "value_fit/tokens": moments[-2, -2],
            **dict(zip(ERRORS, errors.unbind(), strict=True)),
            **dict(zip(FAILURES, failures.unbind(), strict=True)),
        }

    @torch.no_grad()
    def end_fit(self, head: torch.nn.Linear, numbers: Mapping[str, float]) -> None:
        """Write the head of the λ that predicts best.

        An empty batch, or one with a number that is not finite, leaves the head as it is.

        Args:
            numbers: those of `begin_fit`.
        """
        fit = self._fitted
        self._fitted = None
        if fit is None or not numbers["value_fit/finite"] or numbers["value_fit/added"] == 0:
            return
        for i, (name, ridge) in enumerate(zip(FAILURES, RIDGES, strict=True)):
            if numbers[name]:
                fit.heads[i] = ridge_head(fit.moments, ridge)
        self.moments, self.errors, self.heads = fit
        errors = torch.tensor([numbers[name] for name in ERRORS], dtype=torch.float64)
        self.best = best_ridge(errors, numbers["value_fit/tokens"], head.in_features)
        self._write(head)

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
        if self.moments is None or self.heads is None or self.errors is None:
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
        self.best = best_ridge(
            tensors["errors"].cpu(), tensors["moments"][-2, -2].item(), head.in_features
        )
        self._write(head)


def _device_of_moments(device: torch.device) -> torch.device:
    """Return the device itself, or the CPU for a device without fp64."""
    return torch.device("cpu") if device.type in WITHOUT_FP64 else device


class _Fit(NamedTuple):
    """A fit that has not been taken over yet; see the attributes of `ValueRegression`."""

    moments: Tensor
    errors: Tensor
    heads: Tensor


def best_ridge(errors: Tensor, tokens: float, width: int) -> int:
    """Return the index in `RIDGES` of the λ to use.

    Args:
        errors: [len(RIDGES)] on the CPU, all 0 before a second batch.
        tokens: of all batches, decayed.
        width: H.
    """
    if errors.any():
        return int(errors.argmin())
    is_narrow = tokens >= TOKENS_PER_WEIGHT * width
    return FIRST_RIDGE if is_narrow else len(RIDGES) - 1


class _Equations(NamedTuple):
    """The equations of the regression, from the moments of (x, 1, y)."""

    means: Tensor
    """Means of (x, 1, y), [H + 2]."""
    covariance: Tensor
    """S, [H, H]. `solve` overwrites its diagonal."""
    diagonal: Tensor
    """The diagonal of S, [H]."""
    products: Tensor
    """s, [H]."""
    scale: Tensor
    """mean(diag S), or a bound for its rounding, 0-d."""

    @classmethod
    def of(cls, moments: Tensor) -> _Equations:
        count = moments[-2, -2]
        means = moments[-2] / count
        centred = moments - (count * means).outer(means)
        covariance = centred[:-2, :-2]
        diagonal = covariance.diagonal().clone()
        mean_square = moments.diagonal()[:-2].mean()
        scale = diagonal.mean().clamp(min=NEGLIGIBLE * mean_square)
        # If all states are zero, any λ gives the weight 0.
        scale = torch.where(scale > 0, scale, 1.0)
        return cls(means, covariance, diagonal, centred[:-2, -1], scale)

    def solve(self, ridge: Tensor) -> tuple[Tensor, Tensor]:
        """Return (w, [H], for a ridge of 0-d; whether S + ridge·I was not positive definite)."""
        torch.add(self.diagonal, ridge, out=self.covariance.diagonal())
        factor, failed = torch.linalg.cholesky_ex(self.covariance)
        return torch.cholesky_solve(self.products.unsqueeze(1), factor).squeeze(1), failed

    def heads(self, weights: Sequence[Tensor]) -> Tensor:
        """Return (w, bias, −1) for each w, [len(weights), H + 2]."""
        heads = self.means.new_full((len(weights), len(self.means)), -1.0)
        heads[:, :-2] = torch.stack([*weights])
        predicted = torch.stack([self.means[:-2] @ weight for weight in weights])
        heads[:, -2] = self.means[-1] - predicted
        return heads


def ridge_heads(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the `ridge_head` of each λ, [len(RIDGES), H + 2], and whether it failed in fp64.

    The decompositions are not batched: cuSOLVER's batched routine is made for small matrices, and
    a batch would take len(RIDGES) times the memory.
    """
    equations = _Equations.of(moments)
    ridges = on_device(torch.tensor(RIDGES, dtype=moments.dtype), moments.device) * equations.scale
    weights, failed = zip(*map(equations.solve, ridges.unbind()), strict=True)
    return equations.heads(weights), torch.stack(failed)


def ridge_head(moments: Tensor, ridge: float) -> Tensor:
    """Return (w, bias, −1), [H + 2] fp64, from the moments [H + 2, H + 2] of (x, 1, y).

    The ridge grows by powers of ten until the matrix is positive definite in fp64.
    """
    equations = _Equations.of(moments)
    scaled = ridge * equations.scale
    while True:
        weight, failed = equations.solve(scaled)
        if not failed:
            return equations.heads([weight])[0]
        scaled = 10 * scaled
