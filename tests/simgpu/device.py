"""Install the simulated CUDA device in this process.

    from tests.simgpu import device
    device.install()  # before torch is imported
    x = torch.ones(3, device="cuda")

`device.cpp` has the device. This module loads it and replaces the functions of `torch.cuda` that
torch's CPU build lacks, the operations that only CUDA has, and Triton's interpreter for tensors of
the device.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

from tests.simgpu.build import library, torch_folder
from tests.simgpu.counts import counts

faults: list[Callable[[str], bool]] = []
"""Called with the name of each operation. One that returns True makes it run out of memory."""

LAUNCH, WAIT, LAUNCH_AND_WAIT = range(3)

INTERPRETER = threading.RLock()
"""Held by a launch: Triton's interpreter changes `triton.language` for all threads."""

SYNC_WARNING = "called a synchronizing CUDA operation"

sync_debug_mode: int | str = 0
"""Set by `torch.cuda.set_sync_debug_mode`. Only "warn" has an effect."""


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int)
def _report(operation: bytes, cost: int) -> int:
    name = operation.decode()
    counts.add(name, launches=int(cost != WAIT), waits=int(cost != LAUNCH))
    if cost != LAUNCH and sync_debug_mode == "warn":
        warnings.warn(SYNC_WARNING, stacklevel=2)
    return int(any(fault(name) for fault in faults))


def install() -> None:
    """Make this process believe in a GPU.

    Raises:
        ImportError: torch was imported before. It looks for the hooks of CUDA once.
    """
    if "torch" in sys.modules:
        raise ImportError("install the simulated device before torch is imported")
    os.environ["TRITON_INTERPRET"] = "1"  # compiled kernels are the emulator's part
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL).simgpu_report_to(_report)
    _replace_torch_cuda()
    from tests.simgpu import substitutes

    substitutes.register()
    _replace_interpreter()


# ------------------------------------------------------------------------------------ torch.cuda


class Event:
    """An event on the one stream, which has always happened."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.at = 0.0

    def record(self, *args: Any) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return max(1e3 * (other.at - self.at), 1e-3)

    def synchronize(self) -> None:
        counts.add("event.synchronize", launches=0, waits=1)

    def wait(self, *args: Any) -> None: ...

    def query(self) -> bool:
        return True


class Stream:
    """The one stream."""

    cuda_stream = 0

    def __init__(self, *args: Any, **more: Any) -> None:
        import torch

        self.device = torch.device("cuda", 0)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...

    def synchronize(self) -> None:
        counts.add("stream.synchronize", launches=0, waits=1)

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def is_capturing(self) -> bool:
        return False


PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 * 2**30,
    multi_processor_count=132,
    L2_cache_size=50 * 2**20,
    is_integrated=0,
    warp_size=32,
    gcnArchName="",
    max_threads_per_multi_processor=2048,
    shared_memory_per_block_optin=232448,
    regs_per_multiprocessor=65536,
)
"""Of an H100; nothing is simulated from these numbers."""


NOTHING = (
    "empty_cache",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "set_device",
    "set_per_process_memory_fraction",
    "ipc_collect",
    "_lazy_init",
    "init",
)
"""Functions of `torch.cuda` that do nothing here."""

BYTES = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
"""Functions of `torch.cuda` that measure memory, which is not simulated: 0."""


def _synchronize(device: Any = None) -> None:
    counts.add("torch.cuda.synchronize", launches=0, waits=1)


def _set_sync_debug_mode(mode: int | str) -> None:
    global sync_debug_mode
    sync_debug_mode = mode


def _replace_torch_cuda() -> None:
    import torch

    cuda = torch.cuda
    returned: dict[str, Any] = {
        **dict.fromkeys(NOTHING),
        **dict.fromkeys(BYTES, 0),
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": PROPERTIES.name,
        "get_device_capability": (9, 0),
        "get_device_properties": PROPERTIES,
        "get_arch_list": ["sm_90"],
        "mem_get_info": (70 * 2**30, 80 * 2**30),
        "memory_stats": {},
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "_is_in_bad_fork": False,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    replaced: dict[str, Any] = {
        "synchronize": _synchronize,
        "set_sync_debug_mode": _set_sync_debug_mode,
        "get_sync_debug_mode": lambda: sync_debug_mode,
        "Event": Event,
        "Stream": Stream,
        "current_stream": _stream,
        "default_stream": _stream,
        "stream": _stream,
        "default_generators": (torch.ops.simgpu.default_generator(),),
    }
    for module in (cuda, cuda.random, cuda.memory, cuda.streams):
        for name in {**returned, **replaced}:
            if module is cuda or hasattr(module, name):
                value = replaced[name] if name in replaced else _returning(returned[name])
                setattr(module, name, value)
    torch.accelerator.current_stream = _stream
    torch.backends.cuda.is_built = _returning(True)
    _replace_nccl()
    _replace_storage()


def _returning(value: Any) -> Callable[..., Any]:
    """Return a function of its own, since torch.compile lists torch's functions by identity."""
    return lambda *args, **more: value


def _stream(stream: Any = None) -> Stream:
    return stream if isinstance(stream, Stream) else Stream()


def _replace_nccl() -> None:
    """Let gloo serve the collectives of the device, each on the memory of the host."""
    from torch import distributed

    join = distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **more: Any) -> None:
        join("cpu:gloo,cuda:gloo" if backend and "nccl" in backend else backend, *args, **more)

    distributed.init_process_group = init_process_group


def _replace_storage() -> None:
    """Let storages be made on the device and resized: `deepcopy`, `torch.load` and FSDP do."""
    import torch

    make = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, device: Any = None, **more: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            options = {} if device is None else {"device": device}
            return make(cls, *args, **options, **more)
        (size,) = args
        return torch.empty(size, dtype=torch.uint8, device="cuda").untyped_storage()

    torch.UntypedStorage.__new__ = new

    resize_on_host = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize_on_host(self, size)
        whole = torch.empty(0, dtype=torch.uint8, device="cuda").set_(self)
        torch.ops.simgpu.resize_storage(whole, size)
        return self

    torch.UntypedStorage.resize_ = resize_


# ---------------------------------------------------------------------------------------- Triton


def _replace_interpreter() -> None:
    """Run kernels on the memory of the device's tensors, and refuse tensors of the CPU."""
    import torch
    from triton.runtime import interpreter

    original = interpreter.GridExecutor.__call__

    def tensors(x: Any) -> list[torch.Tensor]:
        if isinstance(x, (tuple, list)):
            return [t for item in x for t in tensors(item)]
        return [x] if isinstance(x, torch.Tensor) else []

    def on_host(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return torch.ops.simgpu.to_host(x)
        if isinstance(x, tuple):
            items = [on_host(item) for item in x]
            return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
        return x

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = tensors([*args, *kwargs.values()])
        if any(x.is_cuda for x in found):
            if not all(x.is_cuda for x in found):
                raise ValueError(
                    f"{self.fn.__name__}: a pointer argument cannot be accessed from Triton "
                    "(cpu tensor?)"
                )
            counts.add(f"triton::{self.fn.__name__}")
        with torch.no_grad(), INTERPRETER:
            named = {name: on_host(x) for name, x in kwargs.items()}
            return original(self, *[on_host(x) for x in args], **named)

    interpreter.GridExecutor.__call__ = call
