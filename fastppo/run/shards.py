"""The tensors of a checkpoint whose ranks hold shards of them: torch.distributed.checkpoint.

Each rank writes its own shards into `shards/` of the checkpoint, under plain names: `model.NAME`,
`optimizer.NAME.exp_avg`, `reference.NAME`. They are read by any number of ranks, one among them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from fastppo.models.sharding import sharded_like

FOLDER = "shards"


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
    """A checkpoint's tensors, sharded as the model is."""
    reader = FileSystemReader(path / FOLDER)
    saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    weights = dict(model.named_parameters())
    causal_lm: Any = model.causal_lm
    referents = dict(causal_lm.named_parameters())
    numbers = {name: index for index, name in enumerate(_names(model, optimizer))}
    read_tensors = Read(model={}, optimizer={}, reference={})
    targets = {}
    for key, metadata in saved.items():
        part, name = key.split(".", 1)
        if part == "optimizer":
            name, leaf = name.rsplit(".", 1)
            if name not in numbers:
                continue
        weight = referents.get(name) if part == "reference" else weights.get(name)
        target = _empty(metadata, weight)
        targets[key] = target
        if part == "optimizer":
            read_tensors.optimizer[f"{numbers[name]}.{leaf}"] = target
        else:
            getattr(read_tensors, part)[name] = target
    alone = not distributed.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # that one process is alone
        dcp.load(targets, storage_reader=reader, no_dist=alone)
    for name, index in numbers.items():
        # Shards are in fp32; a whole weight in half precision has its master beside it.
        weight = read_tensors.model.get(name)
        if weight is not None and optimizer.weights[index].dtype != weight.dtype:
            read_tensors.optimizer.setdefault(f"{index}.master", weight)
    return read_tensors


def sharded(tensors: Mapping[str, Tensor], optimizer: Any) -> dict[str, Tensor]:
    """The optimiser's whole tensors, `0.exp_avg`, as its weights are held."""
    weights = getattr(optimizer, "weights", None)
    if weights is None:  # of torch, over tensors that are whole
        return dict(tensors)
    return {
        key: sharded_like(value, weights[int(key.split(".")[0])]) for key, value in tensors.items()
    }


def _names(model: nn.Module, optimizer: Any) -> list[str]:
    """The names of the optimiser's weights."""
    by_weight = {id(p): name for name, p in model.named_parameters()}
    return [by_weight[id(weight)] for weight in optimizer.weights]


def _empty(metadata: Any, weight: Tensor | None) -> Tensor:
    """What a saved tensor is read into."""
    dtype = metadata.properties.dtype
    size = metadata.size
    if weight is not None and weight.shape == size:
        return torch.zeros_like(weight, dtype=dtype, requires_grad=False)
    return torch.zeros(size, dtype=dtype)


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raises the failure of the first rank that failed as an OSError of one line."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise OSError(f"rank {rank}: {type(cause).__name__}: {cause}") from error
