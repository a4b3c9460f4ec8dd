"""The device of a run and the precision of its matrix products."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn

from fastppo.functional.scalars import counted, describe

DEVICE_NAME = re.compile(r"auto|cpu(:0)?|mps(:0)?|cuda(:(0|[1-9][0-9]*))?")
"""Pattern of valid devices: `auto`, and torch's names of CPUs, Apple's GPUs and CUDA devices."""


def choose_device(name: str) -> torch.device:
    """Return the device with this name; `auto` is a CUDA device if there is one, else the CPU.

    Raises:
        ValueError: this machine has no such device.
    """
    if DEVICE_NAME.fullmatch(name) is None:
        raise ValueError(f"device must be auto, cpu, mps, cuda, cuda:1, …, got {describe(name)}")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={name}: torch {torch.__version__} sees "
            f"{counted(torch.cuda.device_count(), 'GPU')} here"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device={name}: torch {torch.__version__} sees no Apple GPU here")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """Return the model name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return f"Apple GPU, {platform.machine()}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def busy_cpu(device: torch.device) -> list[str]:
    """Warn if torch's threads share their cores with other processes.

    The threads then wait for one another in every operation.

    Returns:
        The warning in a list, or an empty list.
    """
    cores = os.cpu_count() or 1
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or not hasattr(os, "getloadavg"):
        return []
    load = os.getloadavg()[0]
    if load <= cores:  # the load average still counts processes that have ended
        return []
    return [
        f"{threads} threads share {cores} cores with other processes (load {load:.1f}): small "
        "models may run many times faster with OMP_NUM_THREADS=1"
    ]


def compute_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype of the matrix products, or None for the dtype of the weights.

    Args:
        precision: bf16, fp16, fp32, or auto: bf16 on a GPU.
    """
    if precision == "fp16":
        return torch.float16
    if precision == "bf16" or (precision == "auto" and device.type == "cuda"):
        return torch.bfloat16
    return None


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager:
    """Run matrix products in `dtype`, or in the dtype of the weights if it is None."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def cast_frozen(trunk: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast the frozen fp32 matrices of linear layers to the dtype of their products, in place.

    Autocast casts an fp32 weight in every call. Casting it once gives the same bits in half of the
    memory. The trunk then needs autocast.

    Args:
        dtype: the dtype of the products; None leaves the weights unchanged.
    """
    if dtype is None:
        return
    for module in trunk.modules():
        # GPT-2's Conv1D is a linear layer with a transposed weight.
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            weight = module.weight
            if not weight.requires_grad and weight.dtype == torch.float32:
                weight.data = weight.data.to(dtype)


def is_empty(module: nn.Module) -> bool:
    """Return whether a module is on the meta device."""
    return any(parameter.is_meta for parameter in module.parameters())
