"""Run Triton launchers on CPU tensors by executing the PTX that Triton compiles for a GPU.

    session = Session(capability=90)
    with session.running(Schedule(sched=2, seed=7)):
        rows = triton_backend.ppo_loss(…CPU tensors…)
    session.findings, session.shadow(rows.grad)

The launchers choose types, alignment, tiles and grid as on a GPU. While a session runs,
`torch.empty` and its variants return poisoned, guarded memory that is marked as unwritten.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
os.environ.pop("TRITON_INTERPRET", None)
# No cubins are built, so the cache is not shared with real launches.
os.environ["TRITON_CACHE_DIR"] = os.environ.get(
    "PTX_CACHE", str(Path.home() / ".cache" / "ptx-emulator")
)

import ptx_parser  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.compiler.compiler import CompiledKernel  # noqa: E402


class Schedule(NamedTuple):
    """The order of execution and the rounding of one run.

    sched: 0 runs the warps in order, each up to a barrier; 1 in reverse; 2 at random, each for up
        to `quantum` instructions.
    programs: 0 in order, 1 in reverse, 2 shuffled.
    perturb: seed of the documented errors of the approximate instructions; 0 for none.
    late: cp.async and wgmma take effect when they are waited for, otherwise when they are issued.
    fuse: contract a multiply and the dependent add into one multiply-add, as ptxas may do.
    down: when several lanes store to one address, the lowest lane wins, otherwise the highest.
        CUDA defines neither.
    """

    sched: int = 0
    seed: int = 1
    programs: int = 0
    perturb: int = 0
    late: bool = False
    fuse: bool = False
    quantum: int = 20
    down: bool = False


IN_ORDER = Schedule()


class _Config(ctypes.Structure):
    """`Config` in core.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in (
                "nwarps", "shared", "sched", "seed", "order", "perturb", "lazy", "fuse",
                "gx", "gy", "gz", "quantum", "down", "spare",
            )
        ),
        ("max_steps", ctypes.c_uint64),
    )  # fmt: skip


@functools.cache
def _core() -> ctypes.CDLL:
    """Compile core.cpp, or load the cached library."""
    source = HERE / "core.cpp"
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    cache.mkdir(parents=True, exist_ok=True)
    binary = cache / f"core-{source.stat().st_mtime_ns}.so"
    if not binary.exists():
        options = ["-O2", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC"]
        subprocess.run(["g++", *options, "-o", str(binary), str(source)], check=True)
    core = ctypes.CDLL(str(binary))
    pointer, size = ctypes.c_void_p, ctypes.c_uint64
    for name, result, arguments in (
        ("emu_load", pointer, [ctypes.c_char_p, ctypes.c_int]),
        ("emu_mem", pointer, []),
        ("emu_reports", ctypes.c_char_p, [pointer]),
        ("emu_error", ctypes.c_char_p, [pointer]),
        ("emu_mem_add", None, [pointer, size, size, ctypes.c_int]),
        ("emu_mem_taint", None, [pointer, size, size, pointer]),
        ("emu_mem_free", None, [pointer]),
        ("emu_coverage", None, [pointer] * 4),
        (
            "emu_launch",
            None,
            [pointer, pointer, ctypes.POINTER(_Config), ctypes.c_char_p, ctypes.c_int, pointer],
        ),
    ):
        function = getattr(core, name)
        function.restype = result
        function.argtypes = arguments
    return core


class Program:
    """A compiled kernel and its coverage."""

    def __init__(self, core: ctypes.CDLL, kernel: Any) -> None:
        self.core = core
        self.parsed = ptx_parser.parse(kernel.asm["ptx"])
        self.name = self.parsed.name
        self.num_warps = kernel.metadata.num_warps
        self.shared = kernel.metadata.shared
        self.handle = core.emu_load("\n".join(self.parsed.rows).encode(), self.parsed.registers)
        error = core.emu_error(self.handle).decode()
        if error:
            raise ValueError(error)

    def never_run(self) -> list[int]:
        """Return the indices of the instructions that never ran."""
        n = len(self.parsed.rows)
        runs = (ctypes.c_uint64 * n)()
        lanes = (ctypes.c_uint64 * n)()
        ways = (ctypes.c_uint8 * n)()
        self.core.emu_coverage(self.handle, runs, lanes, ways)
        return [i for i, count in enumerate(runs) if not count]

    def covered(self) -> float:
        """Return the share of instructions that ran."""
        return 1 - len(self.never_run()) / len(self.parsed.rows)


class Finding(NamedTuple):
    """A kind of defect at one instruction, with its number of occurrences and the first one."""

    kernel: str
    kind: str
    count: int
    instruction: str
    ptx_line: int
    source: str
    first: str


class Session:
    """The memory, kernels and findings of a series of launches."""

    def __init__(self, capability: int = 90) -> None:
        self.capability = capability
        self.core = _core()
        self.schedule = Schedule()
        self.max_steps = 2 * 10**9
        self.findings: list[Finding] = []
        self.programs: dict[str, Program] = {}
        self.stats = (ctypes.c_uint64 * 4)()
        """Instructions, reads out of bounds, writes out of bounds, divergent branches."""
        self.fresh()

    def fresh(self) -> None:
        """Discard the memory. Programs and their coverage are kept."""
        if hasattr(self, "memory"):
            self.core.emu_mem_free(self.memory)
        self.memory = self.core.emu_mem()
        self._guarded: dict[int, tuple[int, bool]] = {}
        self._known: set[int] = set()
        self._held: list[Any] = []

    # ---- memory

    def tensor(
        self, shape: Any, dtype: torch.dtype, *, unwritten: bool = False, skip: int = 0
    ) -> torch.Tensor:
        """Return a guarded tensor that starts `skip` elements after a 512-byte boundary."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        count = 1
        for size in shape:
            count *= size
        size = count * dtype.itemsize
        whole = _EMPTY(size + 16384, dtype=torch.uint8).fill_(1 if dtype == torch.bool else 0xFF)
        start = -whole.data_ptr() % 512 + 4096 + skip * dtype.itemsize
        x = whole[start : start + size].view(dtype).view(shape)
        if count:
            self._guarded[x.data_ptr()] = (size, unwritten)
        self._held.append(whole)
        return x

    def like(self, x: torch.Tensor, skip: int = 0) -> torch.Tensor:
        """Copy a tensor into guarded memory."""
        return self.tensor(x.shape, x.dtype, skip=skip).copy_(x)

    def _register(self, x: torch.Tensor) -> None:
        address = x.data_ptr()
        storage = x.untyped_storage()
        base, size, unwritten = storage.data_ptr(), storage.nbytes(), False
        for start, (length, is_unwritten) in self._guarded.items():
            if start <= address < start + length:
                base, size, unwritten = start, length, is_unwritten
                break
        else:
            self._held.append(storage)
        if base not in self._known and size:
            self._known.add(base)
            self.core.emu_mem_add(self.memory, base, size, int(unwritten))

    def shadow(self, x: torch.Tensor) -> tuple[int, int]:
        """Return how many bytes of a dense tensor are unwritten, and how many come from a race."""
        n = x.numel() * x.element_size()
        out = (ctypes.c_uint8 * n)()
        self._register(x)
        self.core.emu_mem_taint(self.memory, x.data_ptr(), n, out)
        marks = bytes(out)
        return sum(m & 1 for m in marks), sum(m >> 1 & 1 for m in marks)

    # ---- launches

    def launch(self, kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        if kernel.hash not in self.programs:
            self.programs[kernel.hash] = Program(self.core, kernel)
        program = self.programs[kernel.hash]
        flat: list[tuple[str, Any]] = []
        for kind, value in zip(kernel.src.signature.values(), args, strict=True):
            _flatten(kind, value, flat)
        parameters = program.parsed.parameters
        if len(flat) + 2 != len(parameters):
            raise ValueError(
                f"{program.name}: expected {len(parameters) - 2} operands, got {len(flat)}"
            )
        block = bytearray(program.parsed.parameter_bytes)
        for (kind, value), place in zip(flat, parameters, strict=False):
            if kind.startswith("*"):
                self._register(value)
                data = struct.pack("<Q", value.data_ptr() if value.numel() else 0)
            elif kind in ("fp32", "fp64"):
                data = struct.pack("<f" if kind == "fp32" else "<d", float(value))
            else:
                bits = int(kind[1:]) if kind[1:] != "1" else 8
                data = (int(value) & (2**bits - 1)).to_bytes(bits // 8, "little")
            assert len(data) == place.size, (kind, place)
            block[place.offset : place.offset + place.size] = data
        s = self.schedule
        config = _Config(
            program.num_warps, program.shared, s.sched, s.seed, s.programs, s.perturb,
            int(s.late), int(s.fuse), *grid, s.quantum, int(s.down), 0, self.max_steps,
        )  # fmt: skip
        self.core.emu_launch(
            program.handle, self.memory, ctypes.byref(config), bytes(block), len(block), self.stats
        )
        for line in self.core.emu_reports(program.handle).decode().splitlines():
            kind, pc, count, first = line.split("\t")
            at = int(pc)
            p = program.parsed
            self.findings.append(
                Finding(p.name, kind, int(count), p.text[at], p.ptx_lines[at], p.sources[at], first)
            )

    @contextlib.contextmanager
    def running(self, schedule: Schedule = IN_ORDER) -> Iterator[Session]:
        """Emulate the launches inside this context."""
        self.schedule = schedule
        _activate(self)
        try:
            yield self
        finally:
            _activate(None)


def _flatten(kind: Any, value: Any, into: list[tuple[str, Any]]) -> None:
    if isinstance(kind, tuple | list):
        for each, of in zip(kind, value, strict=True):
            _flatten(each, of, into)
    elif kind != "constexpr":
        into.append((kind, value))


# ---------------------------------------------------------------- stand-ins for Triton and torch

_EMPTY, _EMPTY_LIKE, _NEW_EMPTY = torch.empty, torch.empty_like, torch.Tensor.new_empty
_ACTIVE: Session | None = None
_DRIVERS: dict[int, Any] = {}


class _Driver:
    """The part of Triton's driver interface that a launch uses."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return self.target.arch  # the key of Triton's cache of kernels

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def _sizes(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)


def _empty(
    *size: Any, dtype: torch.dtype | None = None, device: Any = None, **how: Any
) -> torch.Tensor:
    if _ACTIVE is None or how:
        return _EMPTY(*size, dtype=dtype, device=device, **how)
    return _ACTIVE.tensor(_sizes(size), dtype or torch.get_default_dtype(), unwritten=True)


def _empty_like(x: torch.Tensor, dtype: torch.dtype | None = None, **how: Any) -> torch.Tensor:
    if _ACTIVE is None:
        return _EMPTY_LIKE(x, dtype=dtype, **how)
    return _ACTIVE.tensor(tuple(x.shape), dtype or x.dtype, unwritten=True)


def _new_empty(
    x: torch.Tensor, *size: Any, dtype: torch.dtype | None = None, **how: Any
) -> torch.Tensor:
    if _ACTIVE is None:
        return _NEW_EMPTY(x, *size, dtype=dtype, **how)
    return _ACTIVE.tensor(_sizes(size), dtype or x.dtype, unwritten=True)


def _activate(session: Session | None) -> None:
    global _ACTIVE
    _ACTIVE = session
    if session is not None:
        driver = _DRIVERS.setdefault(session.capability, _Driver(session.capability))
        triton.runtime.driver.set_active(driver)
    torch.empty = _empty if session else _EMPTY
    torch.empty_like = _empty_like if session else _EMPTY_LIKE
    torch.Tensor.new_empty = _new_empty if session else _NEW_EMPTY


def _init_handles(kernel: CompiledKernel) -> None:
    def run(
        x: int,
        y: int,
        z: int,
        stream: Any,
        function: Any,
        packed: Any,
        meta: Any,
        enter: Any,
        leave: Any,
        *args: Any,
    ) -> None:
        assert _ACTIVE is not None, "a launch outside Session.running"
        _ACTIVE.launch(kernel, (x, y, z), args)

    kernel._run = run


CompiledKernel._init_handles = _init_handles
CUDABackend.make_cubin = lambda self, src, metadata, opt, capability: b"none"
