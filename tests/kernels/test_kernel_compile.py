"""Every Triton kernel compiles for every GPU generation that it ships for, and none spills.

A register that does not fit goes to local memory, which is the GPU's own memory: a kernel that
lives on bandwidth pays for it. No GPU is needed: see compile_check.py.
"""

from __future__ import annotations

import importlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import compile_check
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton_advantages_launches
import triton_rows_launches

CAPABILITIES = (80, 90, 100)
MODULES = ("triton_rows", "triton_advantages")
Key = tuple[str, int]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, Future]:
    """Two compilers at a time."""
    files = (triton_rows_launches, triton_advantages_launches)
    with ThreadPoolExecutor(2) as pool:
        return {
            (module, capability): pool.submit(
                compile_check.compiled,
                Path(str(file.__file__)),
                capability,
                tmp_path_factory.getbasetemp() / "triton",
            )
            for module, file in zip(MODULES, files, strict=True)
            for capability in CAPABILITIES
        }


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("module", MODULES)
def test_no_kernel_spills(module: str, capability: int, results: dict[Key, Future]) -> None:
    kernels = results[module, capability].result()
    assert len(kernels) > 3
    spilled = [kernel for kernel in kernels if kernel.stack or kernel.local]
    assert not spilled, "\n".join(map(str, spilled))


@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_is_compiled(module: str, results: dict[Key, Future]) -> None:
    names = {kernel.kernel for kernel in results[module, 90].result()}
    defined = vars(importlib.import_module(f"fastppo_kernels.{module}"))
    assert names == {name for name in defined if name.endswith("_kernel")}


SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that one program may have: the CUDA programming guide's table of compute capabilities."""


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_shared_memory_fits_a_multiprocessor(capability: int, results: dict[Key, Future]) -> None:
    for module in MODULES:
        for kernel in results[module, capability].result():
            assert kernel.shared <= SHARED_MEMORY[capability], kernel


def test_every_tile_is_compiled(results: dict[Key, Future]) -> None:
    """Short, middle and long rows; whole tiles and those that a soft-cap or a reference halves."""
    from fastppo_kernels import triton_rows

    compiled = {
        (kernel.num_warps, kernel.constants["BLOCK_V"] // kernel.constants["LANES"])
        for kernel in results["triton_rows", 90].result()
        if kernel.kernel == "_ppo_loss_kernel"
    }
    table = set()
    for most, *_ in triton_rows.TILES:
        for halvings in range(4):
            shape = triton_rows.tile(min(most, 2**20), 2, singles=False, halvings=halvings)
            table.add((shape.num_warps, shape.block_v // (32 * shape.num_warps)))
    assert table <= compiled


def test_padded_and_packed_rows_are_summed_in_the_same_order(results: dict[Key, Future]) -> None:
    """Equal bits on a device follow from equal layouts; the interpreter cannot show this."""
    sums = {
        (kernel.launch, kernel.kernel): kernel.sums
        for kernel in results["triton_advantages", 90].result()
        if kernel.sums
    }
    compared = 0
    for (launch, kernel), packed in sums.items():
        if launch.endswith("packed"):
            for layout in ("one chunk", "split", "odd"):
                padded = sums.get((launch.removesuffix("packed") + layout, kernel))
                if padded is not None:
                    assert padded == packed, (launch, kernel)
                    compared += 1
    assert compared >= 20
    assert {name.split()[0] for names in sums.values() for name in names} == {"scan", "reduce"}
