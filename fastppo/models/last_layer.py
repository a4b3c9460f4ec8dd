"""A trunk's last layer on the rows that are read.

Behind its attention the last layer works row by row, and so does the norm after it. Of the rows
that nobody reads, those of a prompt for one, or all but a text's last where a score is read there,
it needs the keys and values alone:

    x = h + attention(norm(h))             all rows
    y = x[rows] + mlp(norm'(x[rows]))      the rows that are read

The states are the same, and so are the gradients: those of the other rows are 0. Of a trunk of L
layers it saves the MLP's share, about two thirds, of one L-th for rows that are not read.

It is done where a layer's forward pass names these four modules, nothing else and no number, and a
small batch gives the states that it gives without. Any other trunk runs whole, and so do layers
that are compiled, and a trunk that another thread is reading.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastppo.data.batch import Packing
from fastppo.models.layers import COMPILED, layers_of
from fastppo.models.trunk import context_length, hidden_states, next_states

MODULES = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
"""Of Llama's layers, and of many after it; dropout, which is off, may be there besides."""
FOUND = "_fastppo_last_layer"
"""The attribute of a trunk that holds its list of layers, if the last may be run so: in a list, so
that they are not registered a second time."""
_LOCKS: WeakKeyDictionary[nn.Module, Lock] = WeakKeyDictionary()
"""Of the layers that are being run so."""


def states_at(
    trunk: Any,
    rows: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """[N, H] final hidden states of `rows` [N], int64 in [0, B·S), of input_ids [B, S].

    Args:
        attention_mask, packing: of `trunk.hidden_states`.
    """
    return _at(rows, trunk, hidden_states, input_ids, attention_mask, packing)


def last_states(
    trunk: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    cache: Any,
) -> Tensor:
    """[B, H] of `trunk.next_states` with the same arguments: each row's last."""
    count, length = input_ids.shape
    if length == 1:
        return next_states(trunk, input_ids, attention_mask, position_ids, cache)[:, -1]
    rows = torch.arange(1, count + 1, device=input_ids.device) * length - 1
    return _at(rows, trunk, next_states, input_ids, attention_mask, position_ids, cache)


@torch.no_grad()
def prepare(trunk: Any) -> None:
    """Finds out whether a trunk's last layer may be run on the rows that are read; not of one that
    has no weights yet."""
    setattr(trunk, FOUND, [])
    layers = _layers(trunk)
    if not layers or trunk.get_input_embeddings().weight.is_meta:
        return
    length = min(8, context_length(trunk) or 8)
    ids = torch.arange(2 * length, device=trunk.device).view(2, length)
    ids %= trunk.get_input_embeddings().weight.shape[0]
    rows = torch.tensor([2 * length - 1, 1, length], device=trunk.device)
    wanted = states_at(trunk, rows, ids)
    setattr(trunk, FOUND, layers)
    try:
        found = states_at(trunk, rows, ids)
        off = ((found - wanted).float().norm() / wanted.float().norm()).item()
        same = off <= (1e-2 if wanted.dtype.itemsize < 4 else 1e-4)
    except Exception:  # whatever a trunk does with an output of a shape that it does not expect
        same = False
    setattr(trunk, FOUND, layers if same else [])


def assume(*trunks: Any) -> None:
    """For trunks without weights: as if `prepare` had found the states right."""
    for trunk in trunks:
        setattr(trunk, FOUND, _layers(trunk))


def take_from(trunk: Any, other: Any) -> None:
    """What `prepare` found of a trunk holds of another one with the same weights."""
    setattr(other, FOUND, _layers(other) if getattr(trunk, FOUND, []) else [])


def _layers(trunk: Any) -> list[nn.ModuleList]:
    """The trunk's layers, if the last one's forward pass is made of the four modules."""
    try:
        _, layers = layers_of(trunk)
    except ValueError:
        return []
    last = layers[-1]
    if "forward" in vars(last):  # of another library
        return []
    code = getattr(inspect.unwrap(type(last).forward), "__code__", None)
    without_effect = {
        name for name, child in last.named_children() if isinstance(child, nn.Dropout | nn.Identity)
    }
    if code is None or any(type(each) in (int, float) for each in code.co_consts):
        return []  # a factor, say, too close to 1 to show
    return [layers] if set(code.co_names) - without_effect == MODULES else []


def _at(rows: Tensor, trunk: Any, run: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """[N, H] of the states [B, S, H] that `run(trunk, *arguments)` gives."""
    found = getattr(trunk, FOUND, [])
    if found and not getattr(trunk, COMPILED, False):
        layer = found[0][-1]
        lock = _LOCKS.setdefault(layer, Lock())
        if lock.acquire(blocking=False):
            try:
                with _on(rows, layer):
                    return run(trunk, *arguments).squeeze(0)
            finally:
                lock.release()
    return run(trunk, *arguments).flatten(0, 1)[rows]


@contextmanager
def _on(rows: Tensor, layer: Any) -> Iterator[None]:
    """Within it the layer gives its outputs of `rows` alone, [1, N, H], to this thread."""
    thread = get_ident()

    def run(hidden_states: Tensor, **more: Any) -> Tensor:
        attended = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **more)[0]
        read = (hidden_states + attended).flatten(0, 1)[rows].unsqueeze(0)
        found = layer.mlp(layer.post_attention_layernorm(read))
        return read + (found[0] if isinstance(found, tuple) else found)

    def forward(hidden_states: Tensor, **more: Any) -> Tensor:
        if get_ident() != thread:
            return type(layer).forward(layer, hidden_states, **more)
        # What is recomputed is called again when this block is over: not as the layer's forward.
        return again(partial(run, **more), hidden_states) if again else run(hidden_states, **more)

    recomputes = layer.training and getattr(layer, "gradient_checkpointing", False)
    again = layer._gradient_checkpointing_func if recomputes else None
    layer.forward = forward
    try:
        if recomputes:
            layer.gradient_checkpointing = False
        yield
    finally:
        del layer.forward
        if recomputes:
            layer.gradient_checkpointing = True
