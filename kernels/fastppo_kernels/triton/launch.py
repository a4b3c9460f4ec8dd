"""What the launchers share: target, device and its limits, operands as kernels take them."""

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
    """What Triton compiles for: cuda or hip, and how many threads execute as one: 32 on NVIDIA's
    GPUs, 64 on AMD's of the CDNA generations."""

    backend: str
    warp_size: int


@functools.lru_cache
def target() -> Target:
    """The GPUs' of this process; under the interpreter, made up."""
    if INTERPRETED.value:
        return Target("cuda", 32)
    active = triton.runtime.driver.active.get_current_target()
    return Target(active.backend, active.warp_size)


def register_limit(registers: int) -> dict[str, int]:
    """The option of a launch that names a thread's registers to ptxas. AMD's compiler has none: it
    derives them from the size of the program."""
    return {} if target().backend == "hip" else {"maxnreg": registers}


def launch_options(program: Program, *, fp_fusion: bool) -> dict[str, Any]:
    """The keywords of a launch. `fp_fusion`: the compiler may make one instruction of a product and
    the sum that takes it."""
    options: dict[str, Any] = {"num_warps": program.num_warps, "enable_fp_fusion": fp_fusion}
    if program.registers is not None:
        options |= register_limit(program.registers)
    return options


@functools.lru_cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, bytes of the second-level cache); under the interpreter, made up."""
    if device.type != "cuda":
        return 1, 2**20
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.L2_cache_size


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def check_dtype(name: str, x: Tensor) -> None:
    """Refuses fp64 and integers: the kernels compute in fp32."""
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")


def dense(x: Tensor | None) -> Tensor | None:
    """Contiguous, and bool as bytes: strides (0 after `expand`) are not worth an argument."""
    if x is None:
        return None
    x = x.contiguous()
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def dense_record(record: Any) -> Any:
    """The record with each of its tensors `dense`."""
    return map_tensors(dense, record)
