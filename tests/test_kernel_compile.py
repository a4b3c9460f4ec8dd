"""Every Triton kernel compiles for every GPU generation that it ships for, and none spills.

A register that does not fit goes to local memory, which is the GPU's own memory: a kernel that
lives on bandwidth pays for it. No GPU is needed: see compile_check.py.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import compile_check
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

CAPABILITIES = (80, 90, 100)
LAUNCHES = ("row_loss_launches.py", "linear_stats_launches.py")
Key = tuple[str, int]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, Future]:
    """Two compilers at a time, each with a cache of its own."""
    here = Path(__file__).parent
    with ThreadPoolExecutor(2) as pool:
        return {
            (file, capability): pool.submit(
                compile_check.compiled,
                here / file,
                capability,
                tmp_path_factory.mktemp(f"triton-{capability}"),
            )
            for file in LAUNCHES
            for capability in CAPABILITIES
        }


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("file", LAUNCHES)
def test_no_kernel_spills(file: str, capability: int, results: dict[Key, Future]) -> None:
    kernels = results[file, capability].result()
    assert len(kernels) > 3
    spilled = [kernel for kernel in kernels if kernel.stack or kernel.local]
    assert not spilled, "\n".join(map(str, spilled))


def test_every_row_kernel_is_compiled(results: dict[Key, Future]) -> None:
    from fastppo_kernels import row_loss

    names = {kernel.kernel for kernel in results["row_loss_launches.py", 90].result()}
    assert names == {name for name in vars(row_loss) if name.endswith("_kernel")}


def test_every_kernel_of_the_statistics_is_compiled_in_every_tile(
    results: dict[Key, Future],
) -> None:
    from fastppo_kernels import linear_stats

    kernels = results["linear_stats_launches.py", 90].result()
    assert {kernel.kernel for kernel in kernels} == {
        name for name in vars(linear_stats) if name.endswith("_kernel")
    }
    compiled = {
        (kernel.constants["BLOCK_V"], kernel.constants["BLOCK_H"], kernel.num_warps)
        for kernel in kernels
        if kernel.kernel == "_linear_stats_kernel"
    }
    tiles = [tile for tile in vars(linear_stats).values() if isinstance(tile, linear_stats.Tile)]
    assert compiled == {(tile.block_v, tile.block_h, tile.num_warps) for tile in tiles}


SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that one program may have: the CUDA programming guide's table of compute capabilities."""


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_shared_memory_fits_a_multiprocessor(capability: int, results: dict[Key, Future]) -> None:
    for file in LAUNCHES:
        for kernel in results[file, capability].result():
            assert kernel.shared <= SHARED_MEMORY[capability], kernel


def test_every_tile_is_compiled(results: dict[Key, Future]) -> None:
    """Short and long rows, with and without what halves a tile, 8, 4 and 1 elements a load."""
    import row_loss_launches
    from fastppo_kernels import row_loss

    compiled = {
        (kernel.constants["BLOCK_V"], kernel.num_warps)
        for kernel in results["row_loss_launches.py", 90].result()
        if kernel.kernel == "_ppo_loss_kernel"
    }
    table = {
        row_loss.tile(vocab, width, has_ref=has_ref, has_softcap=has_softcap)[:2]
        for vocab in (row_loss_launches.SHORT, row_loss_launches.LONG)
        for width in (8, 4, 1)
        for has_ref in (False, True)
        for has_softcap in (False, True)
    }
    assert compiled == table
