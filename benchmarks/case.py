"""A benchmark case: inputs, truth, bytes, FLOP and providers.

- Truth: fp64 results of the definitions, by autograd and loops, that share no code with the library
  or a provider.
- Bytes: compulsory traffic. Every valid input is read once and every output written once. A
  provider with two passes moves more and reaches a lower share of the floor.
- FLOP: 2 per multiply-add of a matrix product, 1 per elementwise operation, exponentials included.
  Elementwise FLOP never decide the floor.

A provider maps the inputs to named outputs. It may return fewer outputs than the truth has, but at
least one. `check` compares all returned outputs with the truth.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import measure

Inputs = dict[str, Tensor]
Outputs = dict[str, Tensor]

COMPILED = "torch.compile"
"""Name of the providers that compile plain PyTorch."""

TOKEN_BYTES = 8  # int64
FLOAT_BYTES = 4  # fp32: old logprobs, advantages, statistics
MASK_BYTES = 1


class Truth(NamedTuple):
    """Expected output in fp64 (large gradients in fp32), with the unit of its errors."""

    values: Tensor
    scale: float


class UnsupportedError(Exception):
    """Raised when a provider is not installed or cannot run here; the message says why."""


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


@dataclass(frozen=True)
class Provider:
    """An implementation of a case."""

    name: str
    call: Callable[[Inputs], Outputs]
    writes: tuple[str, ...] = ()
    """Inputs that the provider overwrites. It gets copies, and timed calls reuse the overwritten
    copy."""
    prepare: Callable[[Inputs], Inputs] | None = None
    """Function that converts the inputs to the provider's layout, outside its time and memory."""
    is_bound: bool = False
    """Whether this is a lower bound for all implementations, such as the matrix products alone. A
    bound is timed, and checked only if it has a `truth`."""
    truth: Callable[[Inputs], dict[str, Truth]] | None = None
    """Truth of a bound whose outputs differ from those of the case."""

    def own_inputs(self, inputs: Inputs) -> Inputs:
        """Return the inputs in the provider's layout, with copies of those it overwrites."""
        prepared = inputs if self.prepare is None else self.prepare(inputs)
        copies = {name: _copy(prepared[name]) for name in self.writes}
        return prepared | copies


@dataclass(frozen=True)
class Peer:
    """A provider of another package. `build` imports it and is called only if it is installed."""

    name: str
    distribution: str
    build: Callable[[torch.device], Provider]


@dataclass(frozen=True)
class Case:
    name: str
    shape: str
    dtype: torch.dtype
    bytes_moved: int
    flop: int
    draw: Callable[[int, torch.device], Inputs]
    """Function of a seed and a device that returns the inputs."""
    truth: Callable[[Inputs], dict[str, Truth]]
    providers: tuple[Provider, ...]
    tolerance: float
    """Largest allowed error, in units of an output's scale."""
    peers: tuple[Peer, ...] = ()
    release: Callable[[], None] = lambda: None
    """Function that frees shared state, such as a model, after the case."""
    bytes_and_flop: str = ""
    """Explanation of the counts of bytes and FLOP."""

    @property
    def title(self) -> str:
        return f"{self.name}, {self.shape}"

    @property
    def provider_names(self) -> list[str]:
        return [provider.name for provider in self.providers] + [peer.name for peer in self.peers]

    def provider(self, name: str, device: torch.device) -> Provider:
        """Return the provider of this name.

        Raises:
            UnsupportedError: it is not installed or cannot run on the device.
        """
        for provider in self.providers:
            if provider.name == name:
                return provider
        (peer,) = [peer for peer in self.peers if peer.name == name]
        if version(peer.distribution) is None:
            raise UnsupportedError(
                f"pip install {peer.distribution}, in the version of benchmarks/README.md"
            )
        return peer.build(device)


class Prepared(NamedTuple):
    """A case with its inputs and their truth."""

    case: Case
    rotation: list[Inputs]
    """Sets of inputs, together larger than a CPU's caches."""
    truth: dict[str, Truth]
    """Truth of the first set of inputs."""


def version(distribution: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


MEAN_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Largest allowed mean error of a gradient, as a share of its mean size. Eager PyTorch is off by
3e-6 in fp32, and in bf16 by 1e-3 from logits and 5e-3 from hidden states; a missing entropy bonus
changes it by 1e-2 to 8e-2."""


def check(case: Case, provider: Provider, inputs: Inputs, truth: dict[str, Truth]) -> float | None:
    """Compare a provider with fp64. The call also warms up.

    Returns:
        The error of the worst output in units of its scale; None for a bound without a truth.

    Raises:
        AssertionError: the provider is wrong.
    """
    outputs = provider.call(provider.own_inputs(inputs))
    if provider.truth is not None:
        truth = provider.truth(inputs)
    elif provider.is_bound:
        return None
    named = outputs and outputs.keys() <= truth.keys()
    assert named, f"{provider.name}: outputs {sorted(outputs)}, expected some of {sorted(truth)}"
    worst = 0.0
    for key, output in outputs.items():
        expected = truth[key]
        x = output.to(expected.values.device)
        largest = measure.worst_entry(x, expected.values)
        error = largest.error / expected.scale
        assert error <= case.tolerance, (
            f"{provider.name}: {key} is off by {error:.1e}, allowed {case.tolerance:.0e}, "
            f"at {largest.place}"
        )
        if key.endswith("_grad"):
            mean = measure.mean_error(x, expected.values)
            assert mean <= MEAN_TOLERANCE[case.dtype], (
                f"{provider.name}: {key} is off by {mean:.1e} of its mean size, "
                f"allowed {MEAN_TOLERANCE[case.dtype]:.0e}"
            )
        worst = max(worst, error)
    return worst


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function once per case. The suite clears the cache between cases."""
    return torch.compile(function, dynamic=False)


def draw_normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int
) -> Tensor:
    """Draw normal numbers on the device, since drawing large inputs on a CPU takes long."""
    on_device = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=on_device, device=device, dtype=dtype)
