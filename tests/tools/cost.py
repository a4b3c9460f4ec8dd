"""Count the kernels' instructions per element, pipes, registers, occupancy and bytes in flight.

    PYTHONPATH=.:kernels python tests/tools/cost.py [80 90 100]

Prints the tables of `kernels/NOTES.md`. No GPU is needed; `machine_code.py` says what is counted.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import compile_check
import machine_code

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes per multiprocessor, from the table of the CUDA programming guide."""

ELEMENT_BYTES = {
    "full KL": 4,
    "loss, fp32": 4,
    "whiten": 5,
    "gae": 9,
    "shaping, GAE": 13,
    "gae, packed": 9,
    "shaping, GAE, packed": 13,
}
"""Bytes read per element, including those of the reference or the mask; by default 2, one bf16."""


class Sweep(NamedTuple):
    """Number of executed instructions per element, in total and by pipe."""

    instructions: float
    pipes: dict[str, float]
    narrowest_load: int
    barriers: int
    tile_bytes: int


class Cost(NamedTuple):
    """Costs of the first, largest kernel of a launch."""

    sweeps: list[Sweep]
    careful: list[float]
    registers: int
    num_warps: int
    resident: int
    started: int
    bytes_in_flight: int
    spilled: bool
    fused_across_lanes: int


def costs(capability: int, cache: Path) -> dict[str, Cost]:
    """Return the cost of each launch of `launches.counted`."""
    found = {}
    for kernel in compile_check.compiled("counted", capability, cache):
        if kernel.launch not in found:  # the others are small
            found[kernel.launch] = _cost(kernel, capability)
    return found


def _cost(kernel: compile_check.Compiled, capability: int) -> Cost:
    code = machine_code.read(Path(kernel.code))
    width = ELEMENT_BYTES.get(kernel.launch, 2)

    def sweep(way: machine_code.CodePath) -> Sweep:
        elements = way.loaded / width
        pipes = {name: count / elements for name, count in way.pipes().items()}
        return Sweep(
            len(way.instructions) / elements, pipes, way.narrowest_load, way.barriers, way.loaded
        )

    if kernel.launch == "whiten":
        sweeps, careful = [sweep(code.whole())], []
    elif kernel.kernel == "_apply_kernel":
        # Packed rows have additional loops that look up the sequence.
        sweeps, careful = [sweep(way) for way in code.sweeps() if way.stored], []
    else:
        # The first sweep reads, the second reads and writes. The dearer loops of each kind are
        # "careful": they handle the remainder of the tiles and rows of −inf. A loop without an
        # exponential looks for NaN in invalid rows.
        sweeps, careful = [], []
        for writes in (False, True):
            kind = [
                sweep(way)
                for way in code.sweeps()
                if bool(way.stored) == writes and way.count("MUFU.EX2")
            ]
            kind.sort(key=lambda one: one.instructions)
            sweeps += kind[:1]
            careful += [one.instructions for one in kind[1:2]]
    resident = machine_code.resident_programs(
        kernel.registers, kernel.num_warps, kernel.shared, SHARED_MEMORY[capability]
    )
    # All loads of a tile are issued before the first is used. Kernels without a loop count as 0.
    looped = bool(careful) or kernel.kernel == "_apply_kernel"
    in_flight = sweeps[0].tile_bytes if looped else 0
    named = kernel.named_registers or kernel.registers
    return Cost(
        sweeps,
        careful,
        kernel.registers,
        kernel.num_warps,
        resident,
        started=65536 // (32 * kernel.num_warps * named),
        bytes_in_flight=resident * 32 * kernel.num_warps * in_flight,
        spilled=bool(kernel.stack or kernel.local),
        fused_across_lanes=len(code.products_fused_across_lanes()),
    )


def table(capability: int, cache: Path) -> str:
    lines = [
        f"sm_{capability}:",
        "",
        "| launch | instructions an element, by sweep | fma, xu, memory, alu | careful |"
        " registers | warps | programs resident | kB in flight |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for launch, cost in costs(capability, cache).items():
        counts = " / ".join(f"{sweep.instructions:.1f}" for sweep in cost.sweeps)
        pipes = " / ".join(
            ", ".join(f"{sweep.pipes[name]:.1f}" for name in ("fma", "xu", "memory", "alu"))
            for sweep in cost.sweeps
        )
        careful = " / ".join(f"{count:.1f}" for count in cost.careful)
        lines.append(
            f"| {launch} | {counts} | {pipes} | {careful} | {cost.registers} | {cost.num_warps} |"
            f" {cost.resident} | {cost.bytes_in_flight / 1024:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:] or ["90"]):
        with tempfile.TemporaryDirectory() as cache:
            print(table(capability, Path(cache)), end="\n\n")
