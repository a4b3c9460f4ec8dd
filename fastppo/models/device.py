"""Where a run computes, and in which precision its matrix products are formed."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastppo.functional.scalars import counted
from fastppo.models.names import check_device_name


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU if there is one.

    Raises:
        ValueError: no device of that name is there.
    """
    check_device_name(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={name}: torch {torch.__version__} sees "
            f"{counted(torch.cuda.device_count(), 'GPU')} here"
        )
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """The device's name for messages: that of the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def busy_cpu(device: torch.device) -> list[str]:
    """[a sentence] where torch's threads have to share their cores: they wait for one another in
    every operation, and a small model takes many times as long."""
    cores = os.cpu_count() or 1
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or not hasattr(os, "getloadavg"):
        return []
    load = os.getloadavg()[0]
    if load <= cores:  # what ran before this may still be in it
        return []
    return [
        f"{threads} threads on {cores} cores that others use too (load {load:.1f}): with "
        "OMP_NUM_THREADS=1 a small model may be many times as fast"
    ]


def compute_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The dtype of the matrix products, or None for that of the weights.

    Args:
        precision: bf16, fp16, fp32, or auto: bf16 on a GPU.
    """
    if precision == "fp16":
        return torch.float16
    if precision == "bf16" or (precision == "auto" and device.type == "cuda"):
        return torch.bfloat16
    return None


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager:
    """Matrix products in `dtype` on the device; None leaves them in the dtype of the weights."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def cast_frozen(trunk: nn.Module, dtype: torch.dtype | None) -> None:
    """Keeps the frozen matrices of linear layers in the dtype of their products.

    Autocast casts an fp32 weight anew in every call, at each decoding step; cast once, it gives the
    same bits and takes half of the memory. From then on the trunk runs under autocast alone.

    Args:
        dtype: None leaves everything as it is.
    """
    for module in linear_layers(trunk):
        weight = module.weight
        if dtype is not None and not weight.requires_grad and weight.dtype == torch.float32:
            weight.data = weight.data.to(dtype)


@contextmanager
def cast_matrices(
    trunk: nn.Module, dtype: torch.dtype | None, held: dict[nn.Module, nn.Parameter]
) -> Iterator[None]:
    """Linear layers with fp32 matrices compute with copies in the dtype of the products, for the
    time of the block: the same bits under autocast, which need not cast then.

    Args:
        dtype: None leaves everything as it is.
        held: where the copies stay; in the next block they are filled anew at the same addresses.
    """
    matrices: dict[nn.Module, nn.Parameter] = {}
    for module in linear_layers(trunk) if dtype is not None else ():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.dtype == torch.float32:
            matrices[module] = weight
    try:
        for module, weight in matrices.items():
            if module not in held:
                held[module] = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
            else:
                held[module].data.copy_(weight.detach())
            module.weight = held[module]
        yield
    finally:
        for module, weight in matrices.items():
            module.weight = weight


def linear_layers(trunk: nn.Module) -> list[Any]:
    """Those whose matrices autocast casts."""
    # GPT-2's Conv1D is a linear layer with its weight transposed.
    return [
        module
        for module in trunk.modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]


def is_empty(module: nn.Module) -> bool:
    """Whether a module has parameters without memory, as a plan's models have before it begins."""
    return any(parameter.is_meta for parameter in module.parameters())
