"""What a kernel's loops execute, read from the machine code that Triton makes for a GPU.

`cuobjdump` prints a cubin's instructions. A loop is what lies between a jump back and its target; a
sweep over memory is an innermost loop that loads from global memory. One turn of it is the cheapest
way round: what is executed on all tiles but the one with the token in it, whose branch only makes
the way longer. Counts are instructions of a thread, so they are warp instructions of 32 elements;
an instruction that a predicate switches off is issued and counted.

What a count does not say: how long an instruction waits. A time needs a GPU.
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
    predicated: bool
    opcode: str
    """With its modifiers: LDG.E.128."""
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def loaded(self) -> int:
        """Bytes that a thread reads from global memory."""
        return self._width if self.name in ("LDG", "LDGSTS") else 0

    @property
    def stored(self) -> int:
        return self._width if self.name == "STG" else 0

    @property
    def registers(self) -> list[int]:
        """As they stand among the operands; of several that belong together, the first."""
        return [int(number) for number in re.findall(r"\bR(\d+)\b", self.operands)]

    @property
    def addend(self) -> int | None:
        """The register that a multiply-add adds to, its last operand; None for another."""
        destination = re.fullmatch(r"-?R(\d+)\b.*", self.operands.split(",")[-1].strip())
        return int(destination[1]) if destination else None

    @property
    def written(self) -> range:
        """The registers that it writes."""
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
"""The execution pipes of a multiprocessor by instruction; everything else counts as "alu", the pipe
of integers, comparisons, conversions to 16 bits and jumps."""

FUSED = ("FFMA", "FFMA2", "DFMA", "HFMA2")
PAIRS = (*PIPES["fp64"], "FFMA2", "FADD2", "FMUL2", "CS2R")
"""Their results take two registers."""

WRITES_NONE = ("STG", "STS", "BRA", "EXIT", "BAR", "RED")

PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names}


class Way(NamedTuple):
    """A way through the code: its instructions in the order of execution."""

    instructions: tuple[Instruction, ...]

    @property
    def loaded(self) -> int:
        return sum(instruction.loaded for instruction in self.instructions)

    @property
    def stored(self) -> int:
        return sum(instruction.stored for instruction in self.instructions)

    @property
    def narrowest_load(self) -> int:
        """0 where nothing is loaded."""
        return min(
            (instruction.loaded for instruction in self.instructions if instruction.loaded),
            default=0,
        )

    @property
    def barriers(self) -> int:
        return self.count("BAR")

    def count(self, opcode: str) -> int:
        """Instructions whose opcode begins so."""
        return sum(instruction.opcode.startswith(opcode) for instruction in self.instructions)

    def pipes(self) -> dict[str, int]:
        counts = dict.fromkeys((*PIPES, "alu"), 0)
        for instruction in self.instructions:
            counts[PIPE_OF.get(instruction.name, "alu")] += 1
        return counts


class Code:
    """The instructions of one kernel, by address, and where each may go on."""

    def __init__(self, listing: str) -> None:
        self.instructions: dict[int, Instruction] = {}
        for address, guard, opcode, operands in _LINE.findall(listing):
            self.instructions[int(address, 16)] = Instruction(bool(guard), opcode, operands)
        addresses = list(self.instructions)
        if not addresses:
            raise ValueError("expected the listing of a kernel, got no instruction")
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
        if to == 0 or instruction.opcode.startswith("BRA.DIV"):  # threads that do not agree
            return falls
        if instruction.predicated or conditions:
            return [to, *falls]
        return [to]

    @cached_property
    def loops(self) -> list[Way]:
        """One turn of each innermost loop, in the order of their addresses."""
        bodies = self._bodies()
        innermost = {
            header: body
            for header, body in bodies.items()
            if not any(other in body for other in bodies if other != header)
        }
        # Code behind the last EXIT (a jump to itself) is no loop.
        return [
            self._cheapest(header, header, body)
            for header, body in sorted(innermost.items())
            if len(body) > 1
        ]

    def sweeps(self) -> list[Way]:
        """The loops that read global memory, in the order of their addresses.

        A turn that reads less than one 16-byte load is the loop over rows, where the compiler has a
        copy of it for rows without a whole tile.
        """
        return [way for way in self.loops if way.loaded >= 16]

    def whole(self) -> Way:
        """The way to the last store that is in no loop, and on to the end: for a kernel without a
        sweep."""
        looped = set().union(*self._bodies().values())
        everything = set(self.instructions)
        stores = [at for at, each in self.instructions.items() if each.stored and at not in looped]
        exits = [at for at, each in self.instructions.items() if each.name == "EXIT"]
        rests = [self._path(stores[-1], end, everything) for end in exits]
        rest = min((path for path in rests if path), key=len)
        before = self._cheapest(self.entry, stores[-1], everything)
        return Way(before.instructions + tuple(self.instructions[at] for at in rest))

    def products_fused_across_lanes(self) -> list[Instruction]:
        """Multiply-adds whose addend is what a butterfly brought from another lane.

        A lane that adds its own product without rounding it to the other's, which is rounded, ends
        with other bits than the other lane, and in a reduction both hold "the" sum.
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
        """Loops by the address of their header: what lies between a jump back and its target."""
        bodies: dict[int, set[int]] = {}
        for address, targets in self.successors.items():
            for header in targets:
                if header <= address:
                    between = {at for at in self.instructions if header <= at <= address}
                    bodies.setdefault(header, set()).update(between)
        return bodies

    def _path(self, start: int, end: int, within: set[int]) -> list[int] | None:
        """The fewest instructions from `start` up to `end`, without `end`."""
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

    def _cheapest(self, start: int, end: int, within: set[int]) -> Way:
        path = self._path(start, end, within)
        assert path is not None
        return Way(tuple(self.instructions[at] for at in path))


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*)\s*([^;]*);")


def read(cubin: Path) -> Code:
    """The code of a cubin that holds one kernel."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run([program, "-sass", cubin], capture_output=True, text=True, check=True)
    return Code(done.stdout)


def resident_programs(
    registers: int, num_warps: int, shared: int, shared_limit: int = 227 * 1024
) -> int:
    """Programs that a multiprocessor holds at once.

    Each quarter of it gives 16384 registers to warps, 256 at a time, and there are 64 places for
    warps (compute capabilities 8.0, 9.0 and 10.0 of the CUDA programming guide's table).
    """
    of_a_warp = -(-registers // 8) * 256
    by_registers = 4 * (16384 // of_a_warp) // num_warps
    by_shared = shared_limit // (shared + 1024)
    return min(by_registers, 64 // num_warps, by_shared, 32)
