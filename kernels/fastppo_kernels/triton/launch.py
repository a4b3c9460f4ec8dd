"""Helpers of the launchers: the target, the device's limits, and operands in the kernels' form."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastppo_kernels.records import map_tensors
from fastppo_kernels.triton.jit import INTERPRETED
from fastppo_kernels.triton.programs import Program

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Target(NamedTuple):
    """Triton's target: "cuda" or "hip", and the threads per warp (64 on AMD's CDNA GPUs)."""

    backend: str
    warp_size: int


@functools.lru_cache
def target() -> Target:
    """Return the target of this process; a placeholder under the interpreter."""
    if INTERPRETED.value:
        return Target("cuda", 32)
    active = triton.runtime.driver.active.get_current_target()
    return Target(active.backend, active.warp_size)


def register_limit(registers: int) -> dict[str, int]:
    """Return the launch option that fixes the registers per thread.

    AMD's compiler has none: it derives them from the size of the program.
    """
    return {} if target().backend == "hip" else {"maxnreg": registers}


def launch_options(program: Program, *, fp_fusion: bool) -> dict[str, Any]:
    """Return the keywords of a launch. `fp_fusion`: contract multiply and add."""
    options: dict[str, Any] = {"num_warps": program.num_warps, "enable_fp_fusion": fp_fusion}
    if program.registers is not None:
        options |= register_limit(program.registers)
    return options


@functools.lru_cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """Return (multiprocessors, bytes of the L2 cache); placeholders under the interpreter."""
    if device.type != "cuda":
        return 1, 2**20
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.L2_cache_size


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """Make the tensors' device current, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def check_dtype(name: str, x: Tensor) -> None:
    """Check for a 16-bit or fp32 float: the kernels compute in fp32."""
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")


def dense(x: Tensor | None) -> Tensor | None:
    """Make a tensor contiguous, and view bool as bytes, so that kernels need no strides."""
    if x is None:
        return None
    x = x.contiguous()
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def dense_record(record: Any) -> Any:
    """Apply `dense` to each tensor of a record."""
    return map_tensors(dense, record)
