"""Machine code of the kernels for GPUs that are not present: instructions, registers, spills.

Besides the bytes moved, instruction counts decide the kernels' times: a change that makes a loop
dearer fails here. Spilled registers go to GPU memory, at the expense of bandwidth.

By default one launch of each kind is compiled for sm_90. Other generations, AMD's GPUs and every
launch of `tests/tools/launches.py` are slow tests.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from pathlib import Path

import compile_check
import pytest
from compile_check import Compiled

pytest.importorskip("triton", reason="Triton is not installed")

import cost
import machine_code
from fastppo_kernels.triton import programs
from fastppo_kernels.triton import views as triton_views

NEW = [int(part) for part in version("triton").split(".")[:2]] >= [3, 9]
OTHER_GENERATIONS = [pytest.param(capability, marks=pytest.mark.slow) for capability in (80, 100)]


CEILINGS = {
    "loss": (8.3, 7.8),
    "statistics": (8.3,),
    "statistics' backward": (8.3,),
    "full KL": (24, 16),
    # Triton 3.6: 26.6 and 28.9; 3.9: 25.3 and 28.2.
    "soft-cap": (26 if NEW else 27, 32),
    "loss, V = 50257": (9.5, 9.5),
    "statistics, V = 50257": (9.5,),
    "whiten": (16,),
    "gae": (38,),
    # Triton 3.6 on sm_80, the worst: 50.3, and 78.4 and 106.0 for the next two. The last on sm_90:
    # 95.9 with Triton 3.6, 85.8 with 3.9.
    "shaping, GAE": (50 if NEW else 51,),
    "gae, packed": (72 if NEW else 79,),
    "shaping, GAE, packed": (95 if NEW else 107,),
}
"""Executed instructions per element, by sweep."""

ROWS = list(CEILINGS)[: list(CEILINGS).index("whiten")]


@pytest.mark.parametrize("capability", [90, *OTHER_GENERATIONS])
def test_instructions_registers_and_occupancy_of_the_loops(
    capability: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rows are read by the vector, without barriers, at the occupancy that the launcher assumes.

    One test, so that one process compiles. All 32 lanes store a reduction's result to one address,
    and a GPU does not define whose store is last, so all must hold the same bits.
    """
    costs = cost.costs(capability, tmp_path_factory.getbasetemp() / "triton")
    for launch, ceilings in CEILINGS.items():
        for sweep, ceiling in zip(costs[launch].sweeps, ceilings, strict=True):
            assert sweep.instructions <= ceiling, (launch, costs[launch])
            if launch in ROWS:
                assert sweep.narrowest_load == 16, launch
                assert sweep.barriers == 0, launch
        if launch in ROWS:
            assert costs[launch].resident >= costs[launch].started, launch
    assert costs["statistics"].resident >= 2
    assert costs["statistics"].bytes_in_flight >= 32 * 1024
    for launch in ("gae", "shaping, GAE"):  # whole vectors: no shared memory, no barriers
        (sweep,) = costs[launch].sweeps
        assert sweep.barriers == 0, launch
        assert sweep.narrowest_load == 4, "the masks of four tokens"
        assert costs[launch].resident >= 16, launch
        assert costs[launch].bytes_in_flight >= 32 * 1024, launch
    assert not {launch for launch, kernel in costs.items() if kernel.spilled}
    assert not {launch for launch, kernel in costs.items() if kernel.fused_across_lanes}


# ------------------------------------------------------------- every launch, for every generation

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes per program, from the CUDA programming guide's table of compute capabilities."""


def _defined_kernels() -> set[str]:
    modules = ("loss", "stats", "scale", "gae", "whitening")
    return {
        name
        for module in modules
        for name in vars(importlib.import_module(f"fastppo_kernels.triton.{module}"))
        if name.endswith("_kernel")
    }


@pytest.fixture(scope="module")
def all_compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Compiled]]:
    cache = tmp_path_factory.getbasetemp() / "triton"
    return {
        capability: compile_check.compiled("every", capability, cache)
        for capability in SHARED_MEMORY
    }


@pytest.mark.slow
def test_no_kernel_spills_and_each_fits_a_multiprocessor(
    all_compiled: dict[int, list[Compiled]],
) -> None:
    for capability, kernels in all_compiled.items():
        for kernel in kernels:
            assert not kernel.stack, (capability, kernel)
            assert not kernel.local, (capability, kernel)
            assert kernel.shared <= SHARED_MEMORY[capability], (capability, kernel)


@pytest.mark.slow
def test_every_lane_of_every_kernel_ends_with_the_same_sum(
    all_compiled: dict[int, list[Compiled]],
) -> None:
    for capability, kernels in all_compiled.items():
        for kernel in kernels:
            fused = machine_code.read(Path(kernel.code)).products_fused_across_lanes()
            assert not fused, (capability, kernel, fused)


@pytest.mark.slow
def test_every_kernel_and_every_tile_is_compiled(all_compiled: dict[int, list[Compiled]]) -> None:
    """Short, middle and long rows; whole tiles, and tiles halved by a soft-cap or a reference."""
    assert {kernel.kernel for kernel in all_compiled[90]} == _defined_kernels()
    compiled = {
        (kernel.num_warps, kernel.constants["block"])
        for kernel in all_compiled[90]
        if kernel.kernel in ("_ppo_loss_kernel", "_ppo_loss_full_kl_kernel")
    }
    for row_bytes in (2**14, 2**17, 2**20):
        program = programs.for_rows(row_bytes, sweeps=2)
        for halvings in range(4):
            block = triton_views.tile(program, 2, singles=False, halvings=halvings)
            assert (program.num_warps, block) in compiled


@pytest.mark.slow
def test_padded_and_packed_rows_are_summed_in_the_same_order(
    all_compiled: dict[int, list[Compiled]],
) -> None:
    """Equal layouts give equal bits on a device; the interpreter cannot show this."""
    sums = {
        (kernel.launch, kernel.kernel): kernel.sums for kernel in all_compiled[90] if kernel.sums
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


# ------------------------------------------------------------------------------------ AMD's GPUs

LOCAL_MEMORY = 64 * 1024
"""LDS bytes per program, from AMD's instruction set manuals of CDNA3 and RDNA3."""


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "lanes"), [("gfx942", 64), ("gfx1100", 32)])
def test_every_kernel_compiles_for_amd(
    architecture: str, lanes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Without spills, and with as many threads per row as its tile assumes, for wavefronts of 64
    and of 32."""
    kernels = compile_check.compiled(
        "every", architecture, tmp_path_factory.getbasetemp() / "triton"
    )
    assert {kernel.kernel for kernel in kernels} == _defined_kernels()
    for kernel in kernels:
        assert not kernel.stack, kernel
        assert not kernel.local, kernel
        assert kernel.shared <= LOCAL_MEMORY, kernel
        if "lanes" in kernel.constants:
            assert kernel.num_warps * lanes == kernel.constants["lanes"], kernel
