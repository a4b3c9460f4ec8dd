"""A run of hundreds of iterations holds no more memory and no more files than at its beginning."""

from __future__ import annotations

import json
import os
from pathlib import Path

import command_line
import pytest
from command_line import Folder

ITERATIONS = int(os.environ.get("FASTPPO_SOAK", "500"))

MEASURE = """
    with open({file!r}, "a") as file:
        pages = int(open("/proc/self/statm").read().split()[1])
        handles = len(os.listdir("/proc/self/fd"))
        print([pages * os.sysconf("SC_PAGE_SIZE"), handles], file=file)
"""

ALLOWANCE = 4 * 2**20
"""Bytes: what allocators keep or give back by chance. A kilobyte lost per response of 8 would be as
much in 500 iterations."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_and_open_files_stay_where_they_are(tmp_path: Path) -> None:
    """With a checkpoint every fifth iteration, samples, TensorBoard, a reference."""
    folder, measured = Folder(tmp_path), tmp_path / "measured"
    folder.write_reward(MEASURE.format(file=str(measured)).strip())
    flags = folder.flags(
        iterations=ITERATIONS,
        rollout_batch_size=8,
        checkpoint_interval=5,
        learning_rate=1e-5,
    )
    log = tmp_path / "log.txt"
    assert command_line.finish(command_line.start(flags, log), 3600) == 0, log.read_text()
    rows = [json.loads(line) for line in measured.read_text().splitlines()]
    assert len(rows) == ITERATIONS
    fifth = ITERATIONS // 5
    early, late = rows[fifth : 2 * fifth], rows[-fifth:]
    assert max(handles for _, handles in late) <= max(handles for _, handles in early)
    grown = max(memory for memory, _ in late) - max(memory for memory, _ in early)
    assert grown <= ALLOWANCE, f"{grown} bytes more"
