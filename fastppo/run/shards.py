"""Write and read sharded checkpoints, each rank its own shards.

torch.distributed.checkpoint stores them as safetensors files in `shards/` of a checkpoint, under
the names `model.NAME`, `optimizer.NAME.exp_avg` and `reference.NAME`. Any number of ranks can read
them, including one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from fastppo.run.optimizer import Optimizer

FOLDER = "shards"


class Saved(NamedTuple):
    """Tensors of a checkpoint, as this rank holds them."""

    model: dict[str, Tensor]
    optimizer: dict[int, dict[str, Any]]
    """State of the optimizer by the index of the weight."""
    reference: dict[str, Tensor]


def state_of(
    model: nn.Module, optimizer: Optimizer, reference: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the tensors of a run under the names that `write` stores, without copying them."""
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    state = {f"model.{name}": weight.detach() for name, weight in weights.items()}
    names = _names(model, optimizer)
    for index, entry in optimizer.state_dict()["state"].items():
        for leaf, value in entry.items():
            if isinstance(value, Tensor):
                state[f"optimizer.{names[index]}.{leaf}"] = value
    return state | {f"reference.{name}": value for name, value in reference.items()}


def write(state: dict[str, Any], directory: Path) -> None:
    """Write this rank's shards. Every rank must call it.

    Raises:
        OSError: a rank could not write.
    """
    writer = HuggingFaceStorageWriter(str(directory / FOLDER), save_distributed=True)
    with _as_os_error():
        dcp.save(state, storage_writer=writer)


def read(path: Path, model: nn.Module, optimizer: Optimizer) -> Saved:
    """Read the tensors of a checkpoint, sharded like the model.

    Raises:
        ValueError: the model has no such tensor, or one of another shape.
    """
    reader = HuggingFaceStorageReader(str(path / FOLDER))
    weights = dict(model.named_parameters())
    indices = {name: index for index, name in enumerate(_names(model, optimizer))}
    saved = Saved(model={}, optimizer={}, reference={})
    targets = {}
    metadata: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    for key, tensor in metadata.items():
        part, _, name = key.partition(".")
        leaf = ""
        if part == "optimizer":
            name, _, leaf = name.rpartition(".")
        weight = weights.get(f"causal_lm.{name}" if part == "reference" else name)
        if weight is None or (part == "optimizer" and name not in indices):
            raise ValueError(f"{path} does not fit the model, which has nothing for {key}")
        if part != "optimizer" and weight.shape != tensor.size:
            raise ValueError(shape_error(path, name, tensor.size, weight.shape))
        targets[key] = _empty(tensor, weight)
        if part == "optimizer":
            saved.optimizer.setdefault(indices[name], {})[leaf] = targets[key]
        elif part == "reference":
            saved.reference[name] = targets[key]
        else:
            saved.model[name] = targets[key]
    _load(targets, reader)
    for name, index in indices.items():
        # Shards are fp32; an unsharded weight in half precision has a separate fp32 master.
        master = saved.model.get(name)
        if master is not None and optimizer.weights[index].dtype != master.dtype:
            saved.optimizer.setdefault(index, {}).setdefault("master", master)
    return saved


def read_weights(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the given weights of a checkpoint, sharded like `weights`.

    Raises:
        ValueError: one is missing or has another shape.
    """
    reader = HuggingFaceStorageReader(str(path / FOLDER))
    saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    targets = {}
    for name, weight in weights.items():
        tensor = saved.get(f"model.{name}")
        if tensor is None:
            raise ValueError(f"{path} does not fit the model: it has no {name}")
        if weight.shape != tensor.size:
            raise ValueError(shape_error(path, name, tensor.size, weight.shape))
        targets[f"model.{name}"] = _empty(tensor, weight)
    _load(targets, reader)
    return {key.removeprefix("model."): target for key, target in targets.items()}


def shape_error(path: Path, name: str, saved_shape: Sequence[int], shape: Sequence[int]) -> str:
    """Return the message for a tensor of another shape."""
    return (
        f"{path} does not fit the model: {name} is {list(saved_shape)} there and {list(shape)} here"
    )


def _load(targets: dict[str, Any], reader: HuggingFaceStorageReader) -> None:
    """Read a checkpoint into the tensors of the same names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # that there is only one process
        with _as_os_error():
            dcp.load(targets, storage_reader=reader, no_dist=not distributed.is_initialized())


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of the optimizer's weights, in the optimizer's order."""
    by_weight = {id(p): name for name, p in model.named_parameters()}
    return [by_weight[id(weight)] for weight in optimizer.weights]


def _empty(saved: Any, weight: Tensor) -> Tensor:
    """Return a tensor to read a saved one into, sharded like the weight if the shapes agree."""
    dtype = saved.properties.dtype
    if weight.shape == saved.size:
        return torch.zeros_like(weight, dtype=dtype, requires_grad=False)
    return torch.zeros(saved.size, dtype=dtype)


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise the error of the first rank that failed as an OSError of one line."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise OSError(f"rank {rank}: {type(cause).__name__}: {cause}") from error
