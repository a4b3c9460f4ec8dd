"""Count the instructions of a kernel's loops in the machine code that Triton generates.

`cuobjdump` prints a cubin's instructions. A loop lies between a backward jump and its target; a
sweep is an innermost loop that loads from global memory. One turn is the cheapest path through
it, without the branch for the tile that holds the token. Counts are instructions per thread, hence
warp instructions per 32 elements; predicated-off instructions are issued and counted.

Counts do not show latency; measuring times needs a GPU.
"""

from __future__ import annotations

import heapq
import itertools
import re
import subprocess
from functools import cached_property
from pathlib import Path
from typing import NamedTuple


class Instruction(NamedTuple):
    """One SASS instruction. `opcode` includes its modifiers: LDG.E.128."""

    predicated: bool
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def loaded(self) -> int:
        """Bytes read per thread from global memory."""
        return self._width if self.name in ("LDG", "LDGSTS") else 0

    @property
    def stored(self) -> int:
        return self._width if self.name == "STG" else 0

    @property
    def registers(self) -> list[int]:
        """Register numbers in the order of the operands; the first of each vector."""
        return [int(number) for number in re.findall(r"\bR(\d+)\b", self.operands)]

    @property
    def addend(self) -> int | None:
        """The last operand, to which a multiply-add adds, if it is a register."""
        destination = re.fullmatch(r"-?R(\d+)\b.*", self.operands.split(",")[-1].strip())
        return int(destination[1]) if destination else None

    @property
    def written(self) -> range:
        """The registers written."""
        if self.name in WRITES_NONE or not re.match(r"(P\d|PT|!|,|\s)*R\d", self.operands):
            return range(0)
        first = self.registers[0]
        pairs = self.name in PAIRS or ".WIDE" in self.opcode
        return range(first, first + max(2 if pairs else 1, self._width // 4))

    @property
    def _width(self) -> int:
        for size, modifiers in _WIDTHS:
            if any(f".{modifier}" in self.opcode for modifier in modifiers):
                return size
        return 4


_WIDTHS = ((32, ("256",)), (16, ("128",)), (8, ("64",)), (2, ("U16", "S16")), (1, ("U8", "S8")))

PIPES = {
    "fma": ("FFMA", "FMUL", "FADD", "FFMA32I", "FMUL32I", "FADD32I", "IMAD", "FFMA2", "FADD2",
            "FMUL2", "HFMA2", "HADD2", "HMUL2"),
    "xu": ("MUFU", "F2F", "F2I", "I2F", "I2FP"),
    "memory": ("LDG", "STG", "LDS", "STS", "LDGSTS", "SHFL", "LDSM", "STSM", "LDC", "ATOM", "RED"),
    "fp64": ("DFMA", "DMUL", "DADD", "DSETP", "DMNMX"),
}  # fmt: skip
"""Execution pipes of a multiprocessor. Everything else counts as "alu": integers, comparisons,
conversions to 16 bits, jumps."""

FUSED = ("FFMA", "FFMA2", "DFMA", "HFMA2")
PAIRS = (*PIPES["fp64"], "FFMA2", "FADD2", "FMUL2", "CS2R")
"""Instructions with 64-bit results, which take two registers."""

WRITES_NONE = ("STG", "STS", "BRA", "EXIT", "BAR", "RED")

PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names}


class CodePath(NamedTuple):
    """Path through the code: its instructions in order of execution."""

    instructions: tuple[Instruction, ...]

    @property
    def loaded(self) -> int:
        return sum(instruction.loaded for instruction in self.instructions)

    @property
    def stored(self) -> int:
        return sum(instruction.stored for instruction in self.instructions)

    @property
    def narrowest_load(self) -> int:
        """Bytes of the narrowest load; 0 if there are no loads."""
        return min(
            (instruction.loaded for instruction in self.instructions if instruction.loaded),
            default=0,
        )

    @property
    def barriers(self) -> int:
        return self.count("BAR")

    def count(self, opcode: str) -> int:
        """Count the instructions whose opcode starts with `opcode`."""
        return sum(instruction.opcode.startswith(opcode) for instruction in self.instructions)

    def pipes(self) -> dict[str, int]:
        counts = dict.fromkeys((*PIPES, "alu"), 0)
        for instruction in self.instructions:
            counts[PIPE_OF.get(instruction.name, "alu")] += 1
        return counts


class Code:
    """Instructions of one kernel by address, and their successors."""

    def __init__(self, listing: str) -> None:
        self.instructions: dict[int, Instruction] = {}
        for address, guard, opcode, operands in _LINE.findall(listing):
            self.instructions[int(address, 16)] = Instruction(bool(guard), opcode, operands)
        addresses = list(self.instructions)
        if not addresses:
            raise ValueError("expected the listing of a kernel, got no instructions")
        following = dict(itertools.pairwise(addresses))
        self.entry = addresses[0]
        self.successors = {
            address: self._successors(instruction, following.get(address))
            for address, instruction in self.instructions.items()
        }

    def _successors(self, instruction: Instruction, following: int | None) -> list[int]:
        falls = [] if following is None else [following]
        if instruction.name in ("EXIT", "RET"):
            return falls if instruction.predicated else []
        if instruction.name != "BRA":
            return falls
        *conditions, target = instruction.operands.split(",")
        to = int(target.split("(")[0].strip().strip("`"), 16)
        if to == 0 or instruction.opcode.startswith("BRA.DIV"):  # divergent threads
            return falls
        if instruction.predicated or conditions:
            return [to, *falls]
        return [to]

    @cached_property
    def loops(self) -> list[CodePath]:
        """One turn of each innermost loop, by address."""
        bodies = self._bodies()
        innermost = {
            header: body
            for header, body in bodies.items()
            if not any(other in body for other in bodies if other != header)
        }
        # The jump to itself after the last EXIT is not a loop.
        return [
            self._cheapest(header, header, body)
            for header, body in sorted(innermost.items())
            if len(body) > 1
        ]

    def sweeps(self) -> list[CodePath]:
        """Return the loops that read global memory, by address.

        A turn that reads less than 16 bytes is the loop over rows, which the compiler copies for
        rows without a whole tile.
        """
        return [way for way in self.loops if way.loaded >= 16]

    def whole(self) -> CodePath:
        """Return the path through the last store outside loops, for a kernel without a sweep."""
        looped = set().union(*self._bodies().values())
        everything = set(self.instructions)
        stores = [at for at, each in self.instructions.items() if each.stored and at not in looped]
        exits = [at for at, each in self.instructions.items() if each.name == "EXIT"]
        rests = [self._path(stores[-1], end, everything) for end in exits]
        rest = min((path for path in rests if path), key=len)
        before = self._cheapest(self.entry, stores[-1], everything)
        return CodePath(before.instructions + tuple(self.instructions[at] for at in rest))

    def products_fused_across_lanes(self) -> list[Instruction]:
        """Return the multiply-adds whose addend a butterfly shuffle brought from another lane.

        Such a lane adds its own unrounded product to the other's rounded one and ends with
        different bits than the other lane, so the two copies of a reduction's sum differ.
        """
        fused = []
        for start, butterfly in self.instructions.items():
            if butterfly.opcode.startswith("SHFL.BFLY"):
                register = butterfly.registers[0]
                waiting = list(self.successors[start])
                seen = set(waiting)
                while waiting:
                    address = waiting.pop()
                    instruction = self.instructions[address]
                    if instruction.name in FUSED and instruction.addend == register:
                        fused.append(instruction)
                    if register in instruction.written and not instruction.predicated:
                        continue
                    new = [target for target in self.successors[address] if target not in seen]
                    seen.update(new)
                    waiting += new
        return fused

    def _bodies(self) -> dict[int, set[int]]:
        """Return the loops: the addresses between a backward jump and its target, by header."""
        bodies: dict[int, set[int]] = {}
        for address, targets in self.successors.items():
            for header in targets:
                if header <= address:
                    between = {at for at in self.instructions if header <= at <= address}
                    bodies.setdefault(header, set()).update(between)
        return bodies

    def _path(self, start: int, end: int, within: set[int]) -> list[int] | None:
        """Return the shortest path from `start` to `end`, excluding `end`."""
        heap = [(1, target, start) for target in self.successors[start] if target in within]
        heapq.heapify(heap)
        before: dict[int, int] = {}
        while heap:
            cost, at, came = heapq.heappop(heap)
            if at in before:
                continue
            before[at] = came
            if at == end:
                path = [before[end]]
                while path[-1] != start:
                    path.append(before[path[-1]])
                return path[::-1]
            for target in self.successors[at]:
                if target in within and target not in before:
                    heapq.heappush(heap, (cost + 1, target, at))
        return [start] if start == end else None

    def _cheapest(self, start: int, end: int, within: set[int]) -> CodePath:
        path = self._path(start, end, within)
        assert path is not None
        return CodePath(tuple(self.instructions[at] for at in path))


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*)\s*([^;]*);")


def read(cubin: Path) -> Code:
    """Read the code of a cubin with one kernel."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run([program, "-sass", cubin], capture_output=True, text=True, check=True)
    return Code(done.stdout)


def resident_programs(
    registers: int, num_warps: int, shared: int, shared_limit: int = 227 * 1024
) -> int:
    """Return how many programs fit on a multiprocessor at once.

    Each quarter has 16384 registers, allocated to warps in units of 256. At most 64 warps fit
    (compute capabilities 8.0, 9.0 and 10.0 in the table of the CUDA programming guide).
    """
    of_a_warp = -(-registers // 8) * 256
    by_registers = 4 * (16384 // of_a_warp) // num_warps
    by_shared = shared_limit // (shared + 1024)
    return min(by_registers, 64 // num_warps, by_shared, 32)
