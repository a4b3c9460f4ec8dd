"""Weights from safetensors straight into shards: no rank ever holds the whole model.

A model is made without weights (`empty_causal_lm`: parameters on the meta device, buffers such as
rotary frequencies computed as usual), sharded, and then each rank reads its own rows of every
tensor (`fill`). The bits are the same as when transformers loads it. Files that do not hold the
model's parameters by their names, which transformers may convert, are left to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from fastppo.models.pretrained import attention_implementation, causal_lm_config

INDEX = "model.safetensors.index.json"
ONE = "model.safetensors"
GENERATION = "generation_config.json"


def empty_causal_lm(name: str, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    """The causal LM of a directory without its weights: parameters are on the meta device, tied
    where the model ties them, and buffers are on the CPU."""
    attention = attention_implementation(attn_implementation, dtype)
    config = causal_lm_config(name)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    if (Path(name) / GENERATION).exists():
        model.generation_config = GenerationConfig.from_pretrained(name)
    return model.eval()


def is_empty(module: nn.Module) -> bool:
    """Whether a module has parameters without weights."""
    return any(parameter.is_meta for parameter in module.parameters())


class Files:
    """The tensors of a directory of `save_pretrained`, by name and by rows, and their causal LM.

    Args:
        lm: without weights.
    """

    def __init__(self, directory: Path, lm: PreTrainedModel) -> None:
        self.directory = directory
        self.lm = lm
        self.dtype = lm.dtype
        self.files = self._files()

    def _files(self) -> dict[str, str]:
        """The file of each tensor."""
        if (self.directory / INDEX).exists():
            return json.loads((self.directory / INDEX).read_text())["weight_map"]
        with safe_open(self.directory / ONE, "pt") as file:
            return dict.fromkeys(file.keys(), ONE)

    @contextmanager
    def _slice(self, name: str) -> Iterator[Any]:
        # Opened for each tensor: a file that stays open keeps what was read of it in memory.
        with safe_open(self.directory / self.files[name], "pt") as file:
            yield file.get_slice(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor, in the dtype that the model is loaded in."""
        with self._slice(name) as tensor:
            return tensor[start:stop].to(self.dtype, copy=True)

    def fit(self) -> bool:
        """Whether they hold every parameter of the model by its name and in its shape, and none of
        its buffers, which `fill` leaves as they were computed."""
        if self.lm._keep_in_fp32_modules_strict:  # whatever it is loaded in
            return False
        if any(name in self.files for name, _ in self.lm.named_buffers()):
            return False
        for name, parameter in self.lm.named_parameters():
            if name not in self.files:
                return False
            with self._slice(name) as tensor:
                if tuple(tensor.get_shape()) != tuple(parameter.shape):
                    return False
        return True

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters one after another, whole, as they would be loaded."""
        for name, parameter in self.lm.named_parameters():
            yield name, self.rows(name, 0, parameter.shape[0])

    @torch.no_grad()
    def fill(self, model: nn.Module, causal_lm: nn.Module, device: torch.device) -> None:
        """Writes this rank's part of the weights into a model that is on the meta device, and may
        be sharded.

        Args:
            causal_lm: the part whose weights are in the files; all others are zero.
        """
        names = {id(parameter): name for name, parameter in causal_lm.named_parameters()}
        filled: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            parameters = module.named_parameters(recurse=False, remove_duplicate=False)
            for leaf, parameter in list(parameters):
                if not parameter.is_meta:
                    continue
                if parameter not in filled:  # tied weights stay one parameter
                    value = torch.empty_like(parameter, device=device)
                    self._write(value, names.get(id(parameter)))
                    filled[parameter] = nn.Parameter(value, parameter.requires_grad)
                setattr(module, leaf, filled[parameter])
            for leaf, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, leaf, buffer.to(device))

    def _write(self, value: Tensor, name: str | None) -> None:
        """This rank's part of a tensor of the files, or zeros."""
        local = value
        start = 0
        if isinstance(value, DTensor):
            start = _first_row(value)
            local = value.to_local()
        if name is None:
            local.zero_()
        elif local.numel():
            local.copy_(self.rows(name, start, start + local.shape[0]))


def _first_row(value: DTensor) -> int:
    """The first row of this rank's shard of a tensor that is sharded by rows."""
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    start = 0
    rows = value.shape[0]
    for rank, ranks, placement in zip(
        coordinate, value.device_mesh.shape, value.placements, strict=True
    ):
        if placement.is_shard():
            rows, offset = Shard.local_shard_size_and_offset(rows, ranks, rank)
            start += offset
    return start


def open_files(name: str, dtype: torch.dtype, attn_implementation: str) -> Files | None:
    """The files of a directory, where they hold a causal LM's parameters by their names; None
    where they do not, and transformers has to say what is wrong with them, if anything is."""
    if getattr(causal_lm_config(name), "quantization_config", None) is not None:
        return None
    try:
        files = Files(Path(name), empty_causal_lm(name, dtype, attn_implementation))
        return files if files.fit() else None
    except (OSError, KeyError, ValueError, SafetensorError):
        return None
