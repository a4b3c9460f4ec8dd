"""The tensors of a checkpoint whose ranks hold shards of them: torch.distributed.checkpoint.

Each rank writes its own shards into `shards/` of the checkpoint, under plain names: `model.NAME`,
`optimizer.NAME.exp_avg`, `reference.NAME`. They are read by any number of ranks, one among them.
"""

from __future__ import annotations

import pathlib
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, metadata

from fastppo.models.sharding import sharded_like

FOLDER = "shards"

METADATA_NAMES = frozenset(
    {
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "torch.distributed.checkpoint.metadata.StorageMeta",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        "torch.Size",
        "pathlib.PosixPath",
    }
)
"""What the pickle in `shards/.metadata` may name, besides torch's dtypes."""


def _memory_format(enumeration: type, name: str) -> Any:
    """A member of the one enumeration that metadata holds.

    Raises:
        UnpicklingError: it is another attribute or another object's, which getattr would return.
    """
    if enumeration is not metadata._MEM_FORMAT_ENCODING or name not in enumeration.__members__:
        raise pickle.UnpicklingError(f"its metadata would call builtins.getattr for {name!r:.99}")
    return enumeration.__members__[name]


OTHER_PYTHONS_NAMES = {
    "builtins.getattr": _memory_format,  # Python 3.11.2 writes an enumeration's member so
    "pathlib._local.PosixPath": pathlib.PosixPath,  # Python 3.13
}
"""What it also names where another version of Python wrote it, and what is read in its place."""


class Read(NamedTuple):
    """What a checkpoint holds, as this rank holds it."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """By the weight's number and the name of its state: `0.exp_avg`."""
    reference: dict[str, Tensor]


def state_of(model: nn.Module, optimizer: Any, reference: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tensors that are written of a run; no copies."""
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    state = {f"model.{name}": weight.detach() for name, weight in weights.items()}
    names = _names(model, optimizer)
    for index, entry in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{names[index]}.{leaf}": value for leaf, value in entry.items()}
    return state | {f"reference.{name}": value for name, value in reference.items()}


def write(state: dict[str, Any], directory: Path) -> None:
    """Writes this rank's shards; every rank does.

    Raises:
        OSError: one could not.
    """
    with _as_os_error():
        dcp.save(state, checkpoint_id=directory / FOLDER)


def read(path: Path, model: nn.Module, optimizer: Any) -> Read:
    """A checkpoint's tensors, sharded as the model is.

    Raises:
        ValueError: the model has no such tensor, or one of another shape.
    """
    reader = _Reader(path / FOLDER)
    saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    weights = dict(model.named_parameters())
    causal_lm: Any = model.causal_lm
    referents = dict(causal_lm.named_parameters())
    numbers = {name: index for index, name in enumerate(_names(model, optimizer))}
    read_tensors = Read(model={}, optimizer={}, reference={})
    owners = {
        "model": weights,
        "optimizer": {name: weights[name] for name in numbers},
        "reference": referents,
    }
    targets = {}
    for key, tensor in saved.items():
        part, _, name = key.partition(".")
        if part == "optimizer":
            name, _, leaf = name.rpartition(".")
        weight = owners.get(part, {}).get(name)
        if weight is None:
            raise ValueError(f"{path} does not fit the model, which has nothing for {key}")
        if part != "optimizer" and weight.shape != tensor.size:
            raise ValueError(shape_error(path, name, tensor.size, weight.shape))
        target = _empty(tensor, weight)
        targets[key] = target
        if part == "optimizer":
            read_tensors.optimizer[f"{numbers[name]}.{leaf}"] = target
        else:
            getattr(read_tensors, part)[name] = target
    _load(targets, reader)
    for name, index in numbers.items():
        # Shards are in fp32; a whole weight in half precision has its master beside it.
        weight = read_tensors.model.get(name)
        if weight is not None and optimizer.weights[index].dtype != weight.dtype:
            read_tensors.optimizer.setdefault(f"{index}.master", weight)
    return read_tensors


def read_weights(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a checkpoint's weights that are named, sharded as the given ones are.

    Raises:
        ValueError: one is not there, or has another shape.
    """
    reader = _Reader(path / FOLDER)
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


def sharded(tensors: Mapping[str, Tensor], optimizer: Any) -> dict[str, Tensor]:
    """The optimiser's whole tensors, `0.exp_avg`, as its weights are held."""
    return {
        key: sharded_like(value, optimizer.weights[int(key.split(".")[0])])
        for key, value in tensors.items()
    }


def shape_error(path: Path, name: str, saved_shape: Sequence[int], shape: Sequence[int]) -> str:
    """The sentence on a tensor of another shape."""
    return (
        f"{path} does not fit the model: {name} is {list(saved_shape)} there and {list(shape)} here"
    )


def _load(targets: dict[str, Any], reader: FileSystemReader) -> None:
    """Reads a checkpoint's tensors into others of the same names."""
    alone = not distributed.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # that one process is alone
        with _as_os_error():
            dcp.load(targets, storage_reader=reader, no_dist=alone)


def _names(model: nn.Module, optimizer: Any) -> list[str]:
    """The names of the optimiser's weights."""
    by_weight = {id(p): name for name, p in model.named_parameters()}
    return [by_weight[id(weight)] for weight in optimizer.weights]


def _empty(saved: Any, weight: Tensor) -> Tensor:
    """An empty tensor that a saved one is read into."""
    dtype = saved.properties.dtype
    if weight.shape == saved.size:
        return torch.zeros_like(weight, dtype=dtype, requires_grad=False)
    return torch.zeros(saved.size, dtype=dtype)


class _Reader(FileSystemReader):
    """torch's reader with a restricted unpickler: the metadata may only name `METADATA_NAMES`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with (pathlib.Path(self.path) / ".metadata").open("rb") as file:
            read = _MetadataUnpickler(file).load()
        if not isinstance(read, metadata.Metadata):
            raise pickle.UnpicklingError(f"expected metadata of tensors, got {type(read).__name__}")
        there = {file.name for file in pathlib.Path(self.path).iterdir() if file.is_file()}
        elsewhere = {info.relative_path for info in read.storage_data.values()} - there
        if elsewhere:  # a pipe, which would be waited for, or what is not this checkpoint's
            raise pickle.UnpicklingError(f"its metadata names {min(map(str, elsewhere))[:200]}")
        read.storage_meta = read.storage_meta or metadata.StorageMeta()
        read.storage_meta.load_id = self.load_id
        return read


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name in OTHER_PYTHONS_NAMES:
            return OTHER_PYTHONS_NAMES[full_name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if full_name in METADATA_NAMES or isinstance(dtype, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its metadata would call {full_name}")


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raises the failure of the first rank that failed as an OSError of one line."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise OSError(f"rank {rank}: {type(cause).__name__}: {cause}") from error
