"""How large the programs of the Triton kernels are: one table, looked up when a kernel is launched.

`source` says what a row was chosen by: "counts" of instructions, registers and bytes in flight
(kernels/NOTES.md), or the GPU on which `python -m benchmarks tune` measured it. That command prints
rows for this table, and with --write puts them here.
"""

from __future__ import annotations

from typing import NamedTuple


class Program(NamedTuple):
    """The size of a kernel's programs. What a kernel does not use is left at its default."""

    num_warps: int
    loads: int = 1
    """Loads of 16 bytes that a thread issues before it needs the first."""
    block: int = 0
    """Elements that it takes at once."""
    steps: int = 1
    """Blocks that it takes one after the other."""
    resident: int | None = None
    """How many of them a multiprocessor gets, where each has more than one row or block to take."""
    registers: int | None = None
    """Registers of a thread, named to ptxas; left to itself, it takes 64 to 212 of them in the row
    kernels, and sometimes spills to get below a limit of its own."""
    source: str = "counts"


# Rows of logits: those in flight should fit in the second-level cache, and the loads should cover
# the memory's latency. A long row has a multiprocessor to itself. Shorter ones, and rows that are
# read but once, share it: while one program waits, at the end of its row above all, another works.
#
# The scan's program is one warp, which waits for no other. Its block and steps decide the order of
# the sums: rows of up to 8192 tokens are read once, and longer ones have 16 programs per 131072
# tokens. 160 registers are 12 programs on a multiprocessor, where rows lie off 16 bytes; else the
# kernels need fewer, and without a limit some versions of ptxas spill one or two.
#
# Whitening takes 4 tokens a thread at once, fp32 or mask, so that their layouts are one, and 32 in
# all, which share what a thread forms of the moments.
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
}


def of_rows(row_bytes: int, *, sweeps: int) -> Program:
    """For rows of logits that are read in so many sweeps."""
    if row_bytes <= 2**14:
        length = "rows to 16 KiB"
    elif row_bytes <= 2**17 and sweeps > 1:
        length = "rows to 128 KiB"
    else:
        length = "longer rows"
    return TABLE[f"{length}, read {'once' if sweeps == 1 else 'twice'}"]
