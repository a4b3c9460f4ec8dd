"""Runs a project's Triton launchers on CPU tensors, through the PTX that Triton compiles for a GPU.

    session = Session(capability=90)
    with session.running(Schedule(sched=2, seed=7)):
        rows = triton_rows.ppo_loss(…CPU tensors…)
    session.findings, session.coverage(), session.never_written(rows.grad)

The launchers decide everything as they would on a GPU: types, alignments, tiles, grid. What
`torch.empty` and its like give them is poisoned, guarded on both sides, and known to be unwritten.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
os.environ.pop("TRITON_INTERPRET", None)
# Cubins are not made: the cache must not be shared with anyone who wants them.
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
    """sched: 0 warps in order, each until a barrier; 1 in reverse; 2 a random one for up to
    `quantum` instructions. programs: 0 in order, 1 in reverse, 2 shuffled. perturb: a seed for the
    documented errors of the approximate instructions, 0 for none. late: cp.async and wgmma take
    place when they are waited for, else when they are issued. fuse: an unrounded multiply and the
    add that takes it are one multiply-add, as ptxas may make them. down: of lanes that store to one
    address in one instruction the lowest is last, else the highest: CUDA defines neither."""

    sched: int = 0
    seed: int = 1
    programs: int = 0
    perturb: int = 0
    late: bool = False
    fuse: bool = False
    quantum: int = 20
    down: bool = False


class _Config(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in
                ("nwarps", "shared", "sched", "seed", "order", "perturb", "lazy", "fuse",
                 "gx", "gy", "gz", "quantum", "down", "spare")] + [("max_steps", ctypes.c_uint64)]  # fmt: skip


def _core() -> ctypes.CDLL:
    source = HERE / "core.cpp"
    place = Path(os.environ["TRITON_CACHE_DIR"])
    place.mkdir(parents=True, exist_ok=True)
    binary = place / f"core-{source.stat().st_mtime_ns}.so"
    if not binary.exists():
        subprocess.run(
            ["g++", "-O2", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC",
             "-o", str(binary), str(source)], check=True,
        )  # fmt: skip
    core = ctypes.CDLL(str(binary))
    core.emu_load.restype = core.emu_mem.restype = ctypes.c_void_p
    core.emu_load.argtypes = [ctypes.c_char_p, ctypes.c_int]
    core.emu_reports.restype = core.emu_error.restype = ctypes.c_char_p
    core.emu_reports.argtypes = core.emu_error.argtypes = [ctypes.c_void_p]
    core.emu_mem_add.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
    core.emu_mem_taint.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_void_p,
    ]
    core.emu_mem_clear.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
    core.emu_mem_free.argtypes = [ctypes.c_void_p]
    core.emu_coverage.argtypes = [ctypes.c_void_p] * 4
    core.emu_launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(_Config),
                                ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]  # fmt: skip
    return core


class Program:
    """One compiled kernel, and what of it has run."""

    def __init__(self, core: ctypes.CDLL, kernel: Any, rewrite: Any = None) -> None:
        self.core, self.ptx = core, kernel.asm["ptx"]
        self.parsed = ptx_parser.parse(self.ptx)
        if rewrite is not None:
            self.parsed = self.parsed._replace(rows=rewrite(self.parsed))
        self.name, self.num_warps = self.parsed.name, kernel.metadata.num_warps
        self.shared = kernel.metadata.shared
        self.handle = core.emu_load("\n".join(self.parsed.rows).encode(), self.parsed.registers)
        error = core.emu_error(self.handle).decode()
        if error:
            raise ValueError(error)

    def counts(self) -> tuple[list[int], list[int], list[int]]:
        n = len(self.parsed.rows)
        runs, lanes = (ctypes.c_uint64 * n)(), (ctypes.c_uint64 * n)()
        ways = (ctypes.c_uint8 * n)()
        self.core.emu_coverage(self.handle, runs, lanes, ways)
        return list(runs), list(lanes), list(ways)

    def never_run(self) -> list[int]:
        return [i for i, runs in enumerate(self.counts()[0]) if not runs]

    def covered(self) -> float:
        return 1 - len(self.never_run()) / len(self.parsed.rows)


class Finding(NamedTuple):
    kernel: str
    kind: str
    count: int
    instruction: str
    ptx_line: int
    source: str
    first: str


class Session:
    """Memory and kernels of some launches."""

    def __init__(self, capability: int = 90) -> None:
        self.capability = capability
        self.core = _CORE
        self.schedule = Schedule()
        self.full = True
        self.max_steps = 2 * 10**9
        self.rewrite: Any = None  # of the instructions of a kernel, for selfcheck.py
        self.findings: list[Finding] = []
        self.programs: dict[str, Program] = {}
        self.stats = (ctypes.c_uint64 * 4)()  # instructions, reads and writes past ends, splits
        self.launches = 0
        self.fresh()

    def fresh(self) -> None:
        """Forgets memory; programs and their coverage stay."""
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
        """Guarded on both sides; begins `skip` elements behind a boundary of 512 bytes."""
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
        return self.tensor(x.shape, x.dtype, skip=skip).copy_(x)

    def _register(self, x: torch.Tensor) -> None:
        address = x.data_ptr()
        for base, (size, unwritten) in self._guarded.items():
            if base <= address < base + size:
                break
        else:
            storage = x.untyped_storage()
            base, size, unwritten = storage.data_ptr(), storage.nbytes(), False
            self._held.append(storage)
        if base not in self._known and size:
            self._known.add(base)
            self.core.emu_mem_add(self.memory, base, size, int(unwritten))

    def shadow(self, x: torch.Tensor) -> tuple[int, int]:
        """(bytes of a dense tensor that nothing has written, bytes that came of a race)."""
        n = x.numel() * x.element_size()
        out = (ctypes.c_uint8 * n)()
        self._register(x)
        self.core.emu_mem_taint(self.memory, x.data_ptr(), n, out)
        marks = bytes(out)
        return sum(m & 1 for m in marks), sum(m >> 1 & 1 for m in marks)

    # ---- launches

    def launch(self, kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        if kernel.hash not in self.programs:
            self.programs[kernel.hash] = Program(self.core, kernel, self.rewrite)
        program = self.programs[kernel.hash]
        flat: list[tuple[str, Any]] = []
        for kind, value in zip(kernel.src.signature.values(), args, strict=True):
            _flatten(kind, value, flat)
        parameters = program.parsed.parameters
        if len(flat) + 2 != len(parameters):
            raise ValueError(f"{program.name}: {len(flat)} operands, {len(parameters)} parameters")
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
        config = _Config(program.num_warps, program.shared, s.sched, s.seed, s.programs, s.perturb,
                         int(s.late), int(s.fuse), *grid, s.quantum, int(s.down), 0, self.max_steps)  # fmt: skip
        self.core.emu_launch(
            program.handle, self.memory, ctypes.byref(config), bytes(block), len(block), self.stats
        )
        self.launches += 1
        for line in self.core.emu_reports(program.handle).decode().splitlines():
            kind, pc, count, first = line.split("\t")
            at = int(pc)
            p = program.parsed
            self.findings.append(
                Finding(p.name, kind, int(count), p.text[at], p.ptx_lines[at], p.sources[at], first)
            )

    @contextlib.contextmanager
    def running(self, schedule: Schedule = Schedule()) -> Any:
        """Launches inside are emulated."""
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


# ------------------------------------------------------------------------ in Triton's and torch's place

_EMPTY, _EMPTY_LIKE, _NEW_EMPTY = torch.empty, torch.empty_like, torch.Tensor.new_empty
_CORE = _core()
_ACTIVE: Session | None = None
_DRIVERS: dict[int, Any] = {}


class _Driver:
    """What Triton asks a driver for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return self.target.arch  # so that kernels are cached by it

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
CUDABackend.make_cubin = lambda self, src, metadata, opt, capability: b"none"  # PTX is enough


def summary(findings: list[Finding]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for each in findings:
        found[each.kind] += each.count
    return dict(found)
