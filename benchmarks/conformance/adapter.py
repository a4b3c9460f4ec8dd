"""Define adapters: a package's functions under the names of the fixtures' operations."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.conformance.formulas import DETACHED

Inputs = dict[str, Tensor]
Answer = Callable[..., Mapping[str, Any]]
"""Function of the inputs and, as keywords, the options, that returns some of the answer's
outputs."""


class NotOfferedError(Exception):
    """Raised if the package has no function for this; the message says what comes closest."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The options of a policy loss."""

    objective: str
    clip: Sequence[float]
    """Clip range (ε_low, ε_high)."""
    dual_clip: float | None = None
    tau: Sequence[float] | None = None
    """Temperatures of SAPO for A > 0 and for A ≤ 0."""
    aggregation: str = "token-mean"
    length: int | None = None
    """Divisor of the aggregation "constant"."""
    microbatches: list[list[int]] | None = None
    """Rows of each microbatch; None for the whole batch at once."""

    @property
    def low(self) -> float:
        return self.clip[0]

    @property
    def high(self) -> float:
        return self.clip[1]


@dataclass(frozen=True)
class Adapter:
    name: str
    distribution: str
    release: str
    """Version that the recorded differences belong to, such as "0.9"."""
    build: Callable[[], dict[str, Answer]]
    """Function that imports the package. Operations missing from its result are not offered."""
    device: str = "cpu"

    @property
    def version(self) -> str | None:
        """Installed version, or None if the package is absent or of another release."""
        if self.distribution == "fastppo":  # may run from the source tree, without being installed
            return self.release
        try:
            version = importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None
        return version if f"{version}.".startswith(f"{self.release}.") else None


def module(name: str) -> Any:
    """Import a module without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def need(offered: bool, what: str) -> None:
    if not offered:
        raise NotOfferedError(what)


def with_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of the function, and the gradient of its sum by x."""
    leaf = x.clone().requires_grad_()
    value = function(leaf)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


def policy_outputs(
    loss: Callable[[Tensor, Inputs], Tensor], inputs: Inputs, options: Policy
) -> Mapping[str, Tensor]:
    """Sum a loss of (logprobs, inputs) over the microbatches. Both have the microbatch's rows."""

    def total(logprobs: Tensor) -> Tensor:
        if options.microbatches is None:
            return loss(logprobs, inputs)
        parts = [
            loss(logprobs[rows], {name: x[rows] for name, x in inputs.items()})
            for rows in map(torch.tensor, options.microbatches)
        ]
        return torch.stack(parts).sum()

    value, gradient = with_gradient(total, inputs["logprobs"])
    if options.objective in DETACHED:
        return {"gradient": gradient}
    return {"loss": value, "gradient": gradient}
