"""The Triton kernels for GAE, reward shaping and whitening, against the definition in fp64.

On a GPU as compiled; elsewhere under Triton's interpreter, where a scan costs about 0.1 ms a token:
sizes are small, and so are the blocks, for a row of 40 tokens to have several chunks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import trajectories
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is a Linux package")

from fastppo_kernels import definition, programs
from fastppo_kernels import triton_advantages as kernels
from fastppo_kernels.records import Shaping
from trajectories import bounds as bounds_on
from trajectories import in_fp64, operands, packed, padded

import fastppo

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # there the compiled kernels run

TOLERANCE = 1e-5
"""Of the largest value. fp32 trees over random signs come to about 5e-7."""


@contextlib.contextmanager
def small_blocks(block: int = 8, chunk_blocks: int = 2) -> Iterator[None]:
    """Every length in a few dozen tokens: one block, one chunk, many chunks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, small in {
            "scan": {"block": block, "steps": chunk_blocks},
            "sums of a sequence": {"block": 4},
            "moments of a batch": {"block": 4},
            "moments of a tensor": {"block": 8, "steps": 2},
        }.items():
            patch.setitem(programs.TABLE, name, programs.TABLE[name]._replace(**small))
        yield


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    trajectories.assert_close(actual, expected, tolerance)


def bounds(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return bounds_on(lengths, dtype, DEVICE)


# ---------------------------------------------------------------------------------------------- GAE

lengths_of_batches = st.lists(
    st.one_of(st.sampled_from([0, 1, 7, 8, 9, 15, 16, 17, 32, 33]), st.integers(0, 34)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=8, deadline=None)
@given(
    lengths=lengths_of_batches,
    kept=st.sampled_from([None, 0.0, 0.3, 0.8]),
    per_sequence=st.tuples(st.booleans(), st.booleans()),
    truncated=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    wide_bounds=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_ragged_batches(
    lengths: list[int],
    kept: float | None,
    per_sequence: tuple[bool, bool],
    truncated: bool,
    dtype: torch.dtype,
    wide_bounds: bool,
    seed: int,
) -> None:
    """The loop, row by row; packed rows and padded rows to the bit; gaps and no gaps."""
    torch.manual_seed(seed)
    batch, width = len(lengths), max(lengths) + 3
    r, v = ([torch.randn(n, device=DEVICE).to(dtype) for n in lengths] for _ in "rv")
    masks = [torch.rand(n, device=DEVICE) < (1.0 if kept is None else kept) for n in lengths]
    gammas, lams = (torch.rand(batch, device=DEVICE) * 0.5 + 0.5 for _ in "γλ")
    bootstrap = torch.randn(batch, device=DEVICE) if truncated else None
    options: dict[str, Any] = {
        "gamma": gammas if per_sequence[0] else 0.97,
        "lam": lams if per_sequence[1] else 0.9,
        "bootstrap": bootstrap,
    }
    cu_seqlens = bounds(lengths, torch.int64 if wide_bounds else torch.int32)

    with small_blocks():
        mask = None if kept is None else packed(masks)
        given = operands(packed(v), packed(r), mask, cu_seqlens=cu_seqlens, **options)
        flat = kernels.gae(*given)
        # NaN in the padding: what a masked token holds is not used.
        grid_mask = padded(masks, width)
        grid = kernels.gae(
            *operands(padded(v, width, math.nan), padded(r, width, math.nan), grid_mask, **options)
        )
    in_row = padded([torch.ones_like(row) for row in masks], width)
    for one, other in zip(flat, grid, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other[in_row])
        assert not other[~in_row].any()

    for found, wanted in zip(flat, definition.gae(*in_fp64(given)), strict=True):
        assert_close(found, wanted)

    # The rows with their gaps cut out, as a batch of shorter rows.
    left = [int(row.sum()) for row in masks]
    cut = [packed([row[m] for row, m in zip(rows, masks, strict=True)]) for rows in (v, r)]
    with small_blocks():
        compressed = kernels.gae(*operands(*cut, cu_seqlens=bounds(left), **options))
    for one, other in zip(flat, compressed, strict=True):
        assert_close(one[packed(masks)], other, 1e-6)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
def test_discounts_at_their_ends(gamma: float, lam: float) -> None:
    torch.manual_seed(0)
    v, r = torch.randn(2, 1, 40, device=DEVICE)
    mask, ends = torch.rand(1, 40, device=DEVICE) < 0.7, torch.tensor([0.5], device=DEVICE)
    given = operands(v, r, mask, gamma=gamma, lam=lam, bootstrap=ends)
    with small_blocks():
        found = kernels.gae(*given)
    for one, other in zip(found, definition.gae(*in_fp64(given)), strict=True):
        assert_close(one, other)


def log_step_scan(self: Any, operands: Any) -> list[Any]:
    """The interpreter's scan in log₂(n) vector steps in place of n scalar ones, 50 times faster.

    The order of the sums becomes a tree, as on a device.
    """
    scanned = list(operands)
    lane = np.arange(scanned[0].handle.data.size)
    distance = 1
    while distance < lane.size:
        earlier = [self.to_tensor(np.roll(x.handle.data, distance), x.dtype) for x in scanned]
        joined = self.combine_fn.fn(*earlier, *scanned)
        scanned = [
            self.to_tensor(np.where(lane < distance, x.handle.data, y.handle.data), x.dtype)
            for x, y in zip(scanned, joined, strict=True)
        ]
        distance *= 2
    return scanned


@pytest.fixture
def fast_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter.ScanOps, "generic_scan", log_step_scan)


def test_blocks_of_the_real_size() -> None:
    """Two chunks, the second one short, in the interpreter's own order of sums."""
    torch.manual_seed(0)
    v, r = torch.randn(2, 1, 8500, device=DEVICE)
    mask = torch.rand(1, 8500, device=DEVICE) < 0.9
    given = operands(v, r, mask, gamma=0.999, lam=0.99)
    for one, other in zip(kernels.gae(*given), definition.gae(*in_fp64(given)), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(
    ("gamma", "lam", "offset", "tokens"),
    [
        (1.0, 1.0, 3.0, 20_000),
        pytest.param(1.0, 1.0, 3.0, 131_072, marks=pytest.mark.slow),
        pytest.param(0.99, 0.95, 0.0, 131_072, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("fast_interpreter")
def test_as_accurate_as_an_fp64_loop(gamma: float, lam: float, offset: float, tokens: int) -> None:
    """Up to 16 chunks of 32 blocks. At γλ = 1 every advantage is a sum to the end.

    Relative to the root mean square: an advantage that happens to be near 0 is the difference of
    larger numbers, which are rounded to fp32 before they meet.
    """
    torch.manual_seed(0)
    v, r = torch.randn(2, 1, tokens, device=DEVICE) + offset
    given = operands(v, r, gamma=gamma, lam=lam)
    for one, other in zip(kernels.gae(*given), definition.gae(*in_fp64(given)), strict=True):
        error = (one.cpu().double() - other).abs()
        assert error.max() <= TOLERANCE * other.square().mean().sqrt()
        assert error.norm() <= 0.1 * TOLERANCE * other.norm()


# ---------------------------------------------------------------------------- shaping and whitening


@settings(max_examples=6, deadline=None)
@given(
    lengths=lengths_of_batches,
    estimator=st.sampled_from(["k1", "k2", "k3", None]),
    token_rewards=st.booleans(),
    score_clip=st.sampled_from([None, 0.5]),
    truncated=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_shaping(
    lengths: list[int],
    estimator: str | None,
    token_rewards: bool,
    score_clip: float | None,
    truncated: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    batch, width, beta = len(lengths), max(lengths) + 3, 0.3
    v, lp, ref, extra = ([torch.randn(n, device=DEVICE) for n in lengths] for _ in range(4))
    masks = [torch.rand(n, device=DEVICE) < 0.7 for n in lengths]
    scores = 2 * torch.randn(batch, device=DEVICE)
    bootstrap = torch.randn(batch, device=DEVICE) if truncated else None
    how: dict[str, Any] = {"gamma": 0.98, "lam": 0.93, "bootstrap": bootstrap}

    def records(arrange: Callable[[list[Tensor]], Tensor], **layout: Any) -> tuple[Any, ...]:
        rewards = arrange(extra) if token_rewards else None
        trajectory, discounts = operands(arrange(v), rewards, arrange(masks), **how, **layout)
        shaping = Shaping(scores, arrange(lp), score_clip=score_clip)
        if estimator is not None:
            shaping = shaping._replace(
                ref_logprobs=arrange(ref), kl_coef=beta, kl_estimator=estimator
            )
        return trajectory, shaping, discounts

    in_a_row = records(packed, cu_seqlens=bounds(lengths))
    with small_blocks():
        flat = kernels.shaped_advantages(*in_a_row)
        grid = kernels.shaped_advantages(*records(lambda rows: padded(rows, width)))
    in_row = padded([torch.ones_like(row) for row in masks], width)
    assert torch.equal(flat.advantages, grid.advantages[in_row])
    assert torch.equal(flat.returns, grid.returns[in_row])
    assert torch.equal(flat.kl, grid.kl)
    assert torch.equal(flat.moments, grid.moments)
    wanted = definition.shaped_advantages(*map(in_fp64, in_a_row))
    for found, exact in zip(flat, wanted, strict=True):
        assert_close(found, exact)


def test_a_nan_is_not_hidden() -> None:
    """A broken reward model shows in its own sequence, through the clip, and nowhere else."""
    scores = torch.tensor([1.0, math.nan], device=DEVICE)
    x = torch.zeros(2, 40, device=DEVICE)
    mask = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    with small_blocks():
        trajectory, discounts = operands(x, None, mask)
        shaping = Shaping(scores, x, score_clip=0.5)
        found = kernels.shaped_advantages(trajectory, shaping, discounts)
    assert found.advantages[1].isnan().all()
    assert found.advantages[0].isfinite().all()
    assert found.moments[1:].isnan().all()


def test_sums_longer_than_their_lanes() -> None:
    """More than 4 chunks in a row and more than 4 rows in the batch, with 4 lanes of each."""
    torch.manual_seed(0)
    x, ref = torch.randn(5, 70, device=DEVICE), torch.randn(5, 70, device=DEVICE)
    mask = torch.rand(5, 70, device=DEVICE) < 0.8
    scores = torch.randn(5, device=DEVICE)
    trajectory, discounts = operands(x, None, mask, gamma=0.99)
    given = (trajectory, Shaping(scores, x, ref, kl_coef=0.1), discounts)
    with small_blocks():
        found = kernels.shaped_advantages(*given)
    expected = definition.shaped_advantages(*map(in_fp64, given))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


@settings(max_examples=10, deadline=None)
@given(
    elements=st.sampled_from([0, 1, 2, 7, 8, 16, 17, 50]),
    masked=st.booleans(),
    shift_mean=st.booleans(),
    moments_given=st.booleans(),
    mean=st.sampled_from([0.0, 1000.0]),
    seed=st.integers(0, 2**31),
)
def test_whiten(
    elements: int, masked: bool, shift_mean: bool, moments_given: bool, mean: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(elements, device=DEVICE) + mean
    mask = torch.rand(elements, device=DEVICE) < 0.6 if masked else None
    poisoned = x if mask is None else torch.where(mask, x, math.nan)
    moments = None
    if moments_given:
        moments = torch.tensor([100.0, 100 * mean, 100 * mean**2 + 250.0], dtype=torch.float64)
    kept = (x if mask is None else x[mask]).double().cpu()
    centre = mean if moments_given else kept.mean().nan_to_num()
    if moments_given:
        deviation = math.sqrt(250 / 99 + 1e-8)
    else:
        deviation = (kept.var().nan_to_num() + 1e-8).sqrt() if len(kept) > 1 else 1e-4
    wanted = (x.double().cpu() - centre) / deviation + (0.0 if shift_mean else centre)
    if mask is not None:
        wanted = torch.where(mask.cpu(), wanted, 0.0)
    with small_blocks():
        moments = None if moments is None else moments.to(DEVICE)
        found = kernels.whiten(poisoned, mask, shift_mean=shift_mean, moments=moments)
        sums = kernels.whitening_moments(poisoned, mask)
    assert found.dtype == torch.float32
    assert_close(found, wanted)
    assert sums.tolist() == pytest.approx(
        [len(kept), kept.sum().item(), kept.square().sum().item()], rel=1e-12
    )


# ----------------------------------------------------------------------------- odd shapes and input


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty_batches(shape: tuple[int, int]) -> None:
    x = torch.zeros(shape, device=DEVICE)
    mask = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
    scores = torch.ones(shape[0], device=DEVICE)
    found = []
    for arrange, starts in ((Tensor.clone, None), (Tensor.flatten, bounds([0] * shape[0]))):
        trajectory, discounts = operands(arrange(x), None, arrange(mask), cu_seqlens=starts)
        shaping = Shaping(scores, arrange(x), arrange(x), 0.1)
        with small_blocks():
            found.append(kernels.shaped_advantages(trajectory, shaping, discounts))
    for out in found:
        assert out.kl.tolist() == [0.0] * shape[0]
        assert out.moments.tolist() == [0.0] * 3


@pytest.mark.parametrize("wrong", [[0, 90, 20, 40], [-50, 10, 5, 99], [40, 40, 40, 40]])
def test_wrong_cu_seqlens_stay_inside(wrong: list[int]) -> None:
    """On a device they cannot be checked without waiting for it: wrong numbers, no stray access."""
    room = torch.full((3, 40), 7.0, device=DEVICE)
    mask = torch.ones(40, dtype=torch.bool, device=DEVICE)
    scores = torch.zeros(3, device=DEVICE)
    outputs = []

    def watched(*shape: Any, **options: Any) -> Tensor:
        outputs.append(torch.full((3, *shape[0]), 7.0, **options))
        return outputs[-1][1]

    with small_blocks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, **options: watched(*shape, **options))
        patch.setattr(
            torch, "empty_like", lambda x: watched(x.shape, dtype=x.dtype, device=x.device)
        )
        trajectory, discounts = operands(
            room[1], room[1], mask, cu_seqlens=torch.tensor(wrong, device=DEVICE), lam=1.0
        )
        kernels._scan(trajectory, Shaping(scores, room[1]), discounts)
    assert len(outputs) >= 4
    for buffer in outputs:
        assert (buffer[0] == 7.0).all()
        assert (buffer[2] == 7.0).all()


def test_strided_tensors() -> None:
    torch.manual_seed(0)
    r, v = torch.randn(3, 21, device=DEVICE), torch.randn(20, 3, device=DEVICE)
    mask = torch.rand(3, 21, device=DEVICE) < 0.7
    with small_blocks():
        found = kernels.gae(*operands(v.T, r[:, :-1], mask[:, 1:]))
        dense = operands(v.T.contiguous(), r[:, :-1].clone(), mask[:, 1:].clone())
        expected = kernels.gae(*dense)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_refusals() -> None:
    x = torch.zeros(2, 3, dtype=torch.float64, device=DEVICE)
    mask = torch.ones(2, 3, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match="values must be bfloat16, float16 or float32"):
        kernels.gae(*operands(x, x))
    with pytest.raises(ValueError, match="x must be bfloat16, float16 or float32"):
        kernels.whiten(x)
    x = x.float()
    trajectory, discounts = operands(x, None, mask)
    shaping = Shaping(x[:, 0], x, x, kl_estimator="full")
    with pytest.raises(ValueError, match="kl_estimator must be k1, k2 or k3, got 'full'"):
        kernels.shaped_advantages(trajectory, shaping, discounts)


# ------------------------------------------------------------------------------ public functions


def test_eager_and_compiled_calls_give_the_same_bits_every_run() -> None:
    values, logprobs = torch.randn(2, 3, 40, device=DEVICE)
    batch = (
        torch.randn(3, device=DEVICE),
        values,
        logprobs,
        torch.rand(3, 40, device=DEVICE) < 0.8,
    )

    def call(scores: Tensor, values: Tensor, logprobs: Tensor, mask: Tensor) -> Any:
        return fastppo.compute_advantages(
            scores, values, logprobs, logprobs * 0.9, mask, kl_coef=0.1, backend="triton"
        )

    with small_blocks():
        first = call(*batch)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for again in (call(*batch), compiled(*batch)):
            for one, other in zip(again, first, strict=True):
                assert torch.equal(one, other)
