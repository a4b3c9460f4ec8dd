"""The sizes of the Triton kernels' programs, in one table that the launchers read.

`source` is the basis of a row: "counts" of instructions, registers and bytes in flight
(kernels/NOTES.md), or the GPU on which `python -m benchmarks.tune` measured it. That command prints
rows for this table, and with `--write` replaces them.
"""

from __future__ import annotations

from typing import NamedTuple


class Program(NamedTuple):
    """The size of a kernel's programs. Unused fields have their default."""

    num_warps: int
    loads: int = 1
    """16-byte loads that a thread issues before it needs the first."""
    block: int = 0
    """Elements processed at once."""
    steps: int = 1
    """Blocks processed one after the other."""
    resident: int | None = None
    """Programs per multiprocessor, if each has several rows or blocks."""
    registers: int | None = None
    """Registers per thread, passed to ptxas. Without a limit it uses 64 to 212 in the row kernels,
    and sometimes spills to stay below one of its choice."""
    source: str = "counts"


# Rows of logits: the rows in flight should fit in the L2 cache, and the loads should cover the
# memory's latency. A long row has a multiprocessor to itself. Shorter rows, and rows that are read
# only once, share it: while one program waits, mostly at the end of its row, another works.
#
# The scan's program is one warp, which waits for no other. Its block and steps decide the order of
# the sums: rows of up to 8192 tokens are read once, and longer ones have 16 programs per 131072
# tokens. 160 registers give 12 programs per multiprocessor for rows that are not 16-byte aligned;
# other rows need fewer, and without a limit some versions of ptxas spill one or two.
#
# A draw has one program per row, so few that each should have many loads in flight: 16 fp32 scores
# per thread.
#
# Whitening takes 4 tokens per thread at once, so that fp32 and mask have the same layout, and 32 in
# total, which share the work on the moments.
TABLE = {
    "rows to 16 KiB, read twice": Program(4, loads=2, registers=128, source="counts"),
    "rows to 128 KiB, read twice": Program(8, loads=4, registers=128, source="counts"),
    "longer rows, read twice": Program(16, loads=4, registers=128, source="counts"),
    "rows to 16 KiB, read once": Program(4, loads=2, registers=128, source="counts"),
    "longer rows, read once": Program(8, loads=4, registers=128, source="counts"),
    "sums of the loss": Program(8, block=2048, source="counts"),
    "scale": Program(8, block=4096, resident=4, source="counts"),
    "scan": Program(1, block=256, steps=32, registers=160, source="counts"),
    "sums of a sequence": Program(4, block=128, source="counts"),
    "moments of a batch": Program(8, block=1024, source="counts"),
    "moments of a tensor": Program(4, block=1024, steps=8, source="counts"),
    "whiten": Program(4, block=512, steps=8, source="counts"),
    "draw": Program(8, block=4096, source="counts"),
}


def for_rows(row_bytes: int, *, sweeps: int) -> Program:
    """Return the program for rows of logits read in `sweeps` sweeps."""
    if row_bytes <= 2**14:
        length = "rows to 16 KiB"
    elif row_bytes <= 2**17 and sweeps > 1:
        length = "rows to 128 KiB"
    else:
        length = "longer rows"
    return TABLE[f"{length}, read {'once' if sweeps == 1 else 'twice'}"]
