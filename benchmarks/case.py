"""A benchmark case: inputs, truth, bytes, FLOP and providers.

- Truth: fp64, by autograd and loops, from the definitions. It shares no code with the library or a
  provider.
- Bytes: compulsory traffic. Every valid input is read once, every output written once. A provider
  with two passes moves more, and reaches a lower share of the floor.
- FLOP: 2 per multiply-add of a matrix product, 1 per elementwise operation, exponentials included.
  Elementwise FLOP never decide the floor.

A provider maps the inputs to named outputs. It may return fewer outputs than the truth has, but at
least one. All returned outputs are checked.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.measure import Inputs

Outputs = dict[str, Tensor]

TOKEN_BYTES = 8  # int64
FLOAT_BYTES = 4  # fp32: old logprobs, advantages, statistics
MASK_BYTES = 1


class Truth(NamedTuple):
    """An output in fp64 (large gradients in fp32), and the unit of its errors."""

    values: Tensor
    scale: float


class UnsupportedError(Exception):
    """A provider cannot run the case on this device; the message has the reason."""


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


@dataclass(frozen=True)
class Provider:
    """An implementation of a case."""

    name: str
    call: Callable[[Inputs], Outputs]
    writes: tuple[str, ...] = ()
    """Inputs that it overwrites. It gets copies; timed calls reuse the overwritten copy."""
    prepare: Callable[[Inputs], Inputs] | None = None
    """Converts the inputs to the provider's layout. Not part of its time or memory."""
    is_bound: bool = False
    """A lower bound for all implementations, such as the matrix products alone. It is timed, and
    checked only if it has a `truth`."""
    truth: Callable[[Inputs], dict[str, Truth]] | None = None
    """The truth of a bound with other outputs than the case."""

    def own_inputs(self, inputs: Inputs) -> Inputs:
        """Return the inputs in the provider's layout, with copies of those it overwrites."""
        prepared = inputs if self.prepare is None else self.prepare(inputs)
        copies = {name: _copy(prepared[name]) for name in self.writes}
        return prepared | copies


@dataclass(frozen=True)
class Peer:
    """A package with providers. `build` imports it and is called only if it is installed."""

    name: str
    distribution: str
    build: Callable[[torch.device], tuple[Provider, ...]]


@dataclass(frozen=True)
class Case:
    name: str
    shape: str
    dtype: torch.dtype
    bytes_moved: int
    flop: int
    draw: Callable[[int, torch.device], Inputs]
    """Returns the inputs for a seed."""
    truth: Callable[[Inputs], dict[str, Truth]]
    providers: tuple[Provider, ...]
    tolerance: float
    """Largest allowed error, in units of an output's scale."""
    compiled: tuple[Provider, ...] = ()
    peers: tuple[Peer, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    """Reasons for missing providers, by provider."""
    release: Callable[[], None] = lambda: None
    """Frees shared state, such as a model, after the case."""
    bytes_and_flop: str = ""
    """Explains the counts of bytes and FLOP."""


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function once per case. `run` clears the cache between cases."""
    return torch.compile(function, dynamic=False)


def draw_normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int
) -> Tensor:
    """Draw on the device, since large inputs take long on a CPU."""
    on_device = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=on_device, device=device, dtype=dtype)
