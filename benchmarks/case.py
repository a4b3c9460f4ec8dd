"""What a case is: inputs, truth, bytes and FLOP, and who provides the operation.

- Truth is computed in fp64, by autograd and by loops, from the definitions; it shares no code with
  the library or with a provider.
- Bytes are compulsory traffic: every input that counts read once, every output written once. A
  provider that passes over its data twice moves more, and shows a lower share of the floor.
- FLOP of a matrix product count 2 per multiply-add; of elementwise work, one per operation on an
  entry, an exponential included. Beside the matrix ceiling the latter never decide the floor.

A provider is a function from the inputs to its outputs by name. It may give fewer outputs than the
truth has (a peer without an entropy), at least one, and all that it gives are checked.
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
    """An output in fp64 (a large gradient may be held in fp32), and the size of its entries, in
    which errors are stated."""

    values: Tensor
    scale: float


class UnsupportedError(Exception):
    """A provider is there and cannot do the case on this device; the message says why."""


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


@dataclass(frozen=True)
class Provider:
    """Someone's implementation of a case."""

    name: str
    call: Callable[[Inputs], Outputs]
    writes: tuple[str, ...] = ()
    """Inputs that it writes over: it gets copies. Timed calls go on with what the last one wrote,
    on which no operation's time depends."""
    prepare: Callable[[Inputs], Inputs] | None = None
    """Lays the inputs out as the provider wants them; not part of its time or memory."""
    is_bound: bool = False
    """No implementation but a bound on all of them (the matrix products alone): timed, and checked
    only if it has a `truth`."""
    truth: Callable[[Inputs], dict[str, Truth]] | None = None
    """Of a bound that computes something else than the case."""

    def own_inputs(self, inputs: Inputs) -> Inputs:
        """The inputs in the provider's layout, and its own where it writes."""
        prepared = inputs if self.prepare is None else self.prepare(inputs)
        copies = {name: _copy(prepared[name]) for name in self.writes}
        return prepared | copies


@dataclass(frozen=True)
class Peer:
    """A package that implements the case; `build` imports it, and runs only if it is installed."""

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
    """Inputs from a seed."""
    truth: Callable[[Inputs], dict[str, Truth]]
    providers: tuple[Provider, ...]
    tolerance: float
    """Of an output's error, in units of its scale."""
    compiled: tuple[Provider, ...] = ()
    peers: tuple[Peer, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    """Providers that do not exist for this case, and why."""
    release: Callable[[], None] = lambda: None
    """Frees what the providers share (a model), when the case is done."""
    bytes_and_flop: str = ""
    """How the two were counted, for a reader of the results."""


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` of a function, once per case: `run` clears the cache between cases."""
    return torch.compile(function, dynamic=False)


def draw_normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int
) -> Tensor:
    """Drawn on the device: large inputs would take long on a CPU."""
    on_device = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=on_device, device=device, dtype=dtype)
