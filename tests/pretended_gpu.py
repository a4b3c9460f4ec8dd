"""A GPU that is none, for tests of what runs on one.

Its tensors are CUDA's by all that they say, their memory is the host's, and every operation on them
is the CPU's (`pretended_gpu.cpp`). So a machine without a GPU shows whether a program for one mixes
devices, takes what only a CPU's tensor gives, or asks autocast for the wrong device. Triton's
kernels run in its interpreter, and CUDA graphs as `replayed.Replayed`. Nothing of it is fast, no
stream waits for another, and memory is not counted.

It lasts as long as the process, so it wants one of its own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

SOURCE = Path(__file__).with_suffix(".cpp")

GB = 2**30
PROPERTIES = SimpleNamespace(
    name="pretended GPU",
    major=9,
    minor=0,
    total_memory=80 * GB,
    multi_processor_count=132,
    L2_cache_size=50 * 2**20,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    shared_memory_per_multiprocessor=233472,
    shared_memory_per_block_optin=232448,
)


NOTHING = (
    *("_lazy_init", "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"),
    *("set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all"),
    "set_sync_debug_mode",
)
"""What of `torch.cuda` does nothing."""


def compiled(directory: Path) -> Path:
    """The library of `pretended_gpu.cpp`, written into a directory."""
    from torch.utils.cpp_extension import include_paths, library_paths

    library = directory / "pretended_gpu.so"
    command = ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
    command += [f"-I{path}" for path in include_paths()]
    command += [f"-L{path}" for path in library_paths()] + ["-lc10", "-ltorch", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    return library


class _Stream:
    device = torch.device("cuda", 0)

    def __init__(self, *ignored: Any, **more: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


class _Event:
    def __init__(self, *ignored: Any, **more: Any) -> None: ...

    def record(self, *stream: Any) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: _Event) -> float:
        return (other.at - self.at) * 1e3


def _bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def pretend(library: Path) -> None:
    """From here on there is a GPU: after torch is imported, and before anything else is.

    Args:
        library: as `compiled` gave it.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    torch.ops.load_library(library)
    cuda: Any = torch.cuda
    state = torch.zeros(16, dtype=torch.uint8)
    for name, value in {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": PROPERTIES.name,
        "get_device_capability": (9, 0),
        "get_device_properties": PROPERTIES,
        "mem_get_info": (70 * GB, 80 * GB),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "graph_pool_handle": (0, 1),
        "get_rng_state": state,
        "get_rng_state_all": [state],
        "get_sync_debug_mode": 0,
        **dict.fromkeys(NOTHING),
    }.items():
        setattr(cuda, name, lambda *given, _value=value, **more: _value)
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = _Stream
    for name in ("device", "stream"):
        setattr(cuda, name, lambda *given: contextlib.nullcontext())
    # Python's methods of storages know the devices that torch was built for alone.
    storages: Any = torch.UntypedStorage
    storages.cpu = lambda self: _bytes_of(self).cpu().untyped_storage()
    storages.clone = lambda self: _bytes_of(self).clone().untyped_storage()

    def copy_(self: Any, source: Any, non_blocking: bool | None = None) -> Any:
        _bytes_of(self).copy_(_bytes_of(source))
        return self

    storages.copy_ = copy_
