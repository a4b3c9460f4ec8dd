"""The Triton kernels for GAE, reward shaping and whitening, against a plain loop in fp64.

On a GPU as compiled; elsewhere under Triton's interpreter, where a scan costs about 0.1 ms a token:
sizes are small, and so are the blocks, for a row of 40 tokens to have several chunks. Which test
takes which path of the kernels:

    row in one chunk, one block            test_ragged_batches (the shorter lengths)
    several blocks in a chunk              test_ragged_batches
    several chunks: aggregate, carry       test_ragged_batches, test_as_accurate_as_an_fp64_loop
    blocks and chunks of the real size     test_blocks_of_the_real_size
    packed: search, unused slots           test_ragged_batches, test_wrong_cu_seqlens_stay_inside
    packed, all in one chunk: no maps      test_ragged_batches (few tokens)
    mask, none; γ, λ, one or per sequence  test_ragged_batches
    bootstrap, none                        test_ragged_batches
    k1, k2, k3; no reference; no rewards   test_shaping
    k3: series, exponential, clamp         test_k3_near_and_far
    score clipped above, below, NaN        test_shaping, test_a_nan_is_not_hidden
    sums: one slot per row, then per chunk test_shaping
    more chunks, rows than lanes of a sum  test_sums_longer_than_their_lanes
    moments of a tensor, mask or none      test_whiten
    whiten, moments given or not, mean     test_whiten
    nothing at all: B = 0, T = 0           test_empty_batches
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is a Linux package")

from fastppo_kernels import advantages as kernels
from fastppo_kernels import reference

import fastppo
from fastppo import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # there the compiled kernels run

TOLERANCE = 1e-5
"""Of the largest value. fp32 trees over random signs come to about 5e-7."""


@contextlib.contextmanager
def small_blocks(block: int = 8, chunk_blocks: int = 2) -> Iterator[None]:
    """Every length in a few dozen tokens: one block, one chunk, many chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "BLOCK", block)
        patch.setattr(kernels, "CHUNK_BLOCKS", chunk_blocks)
        patch.setattr(kernels, "_SUM_LANES", 4)
        patch.setattr(kernels, "_MOMENT_LANES", 4)
        patch.setattr(kernels, "_FLAT_BLOCK", 8)
        patch.setattr(kernels, "_FLAT_STEPS", 2)
        yield


# ----------------------------------------------------------------------------------- the plain loop


def loop(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float,
    lam: float,
    bootstrap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """GAE of one sequence [T] in Python floats, from the definition with V_next and A_next."""
    valid = [True] * len(values) if mask is None else mask.tolist()
    advantages, returns = [0.0] * len(values), [0.0] * len(values)
    next_value, next_advantage = bootstrap, 0.0
    r, v = rewards.double().tolist(), values.double().tolist()
    for t in reversed(range(len(v))):
        if not valid[t]:
            continue
        next_advantage = r[t] + gamma * next_value - v[t] + gamma * lam * next_advantage
        next_value = v[t]
        advantages[t], returns[t] = next_advantage, next_advantage + v[t]
    return torch.tensor(advantages).double(), torch.tensor(returns).double()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """The largest error, relative to the largest value (or to 1, near which all inputs are)."""
    assert actual.shape == expected.shape
    if expected.numel():
        error = (actual.double().cpu() - expected.double().cpu()).abs().max().item()
        assert error <= tolerance * max(1.0, expected.abs().max().item())


def packed(rows: list[Tensor]) -> Tensor:
    return torch.cat([row.new_zeros(0) for row in rows[:1]] + rows)


def padded(rows: list[Tensor], length: int, fill: float = 0.0) -> Tensor:
    out = rows[0].new_full((len(rows), length), fill)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out


def bounds(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=DEVICE)


def split(x: Tensor, lengths: list[int]) -> list[Tensor]:
    return list(x.split(lengths))


# ---------------------------------------------------------------------------------------------- GAE

lengths_of_batches = st.lists(
    st.one_of(st.sampled_from([0, 1, 7, 8, 9, 15, 16, 17, 32, 33]), st.integers(0, 50)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=30, deadline=None)
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
        flat = kernels.gae(packed(r), packed(v), mask, cu_seqlens=cu_seqlens, **options)
        # NaN in the padding: what a masked token holds is not used.
        grid_mask = padded(masks, width)
        grid = kernels.gae(
            padded(r, width, math.nan), padded(v, width, math.nan), grid_mask, **options
        )
    in_row = padded([torch.ones_like(row) for row in masks], width)
    for one, other in zip(flat, grid, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other[in_row])
        assert not other[~in_row].any()

    for i in range(batch):
        row_options = {
            "gamma": float(gammas[i]) if per_sequence[0] else 0.97,
            "lam": float(lams[i]) if per_sequence[1] else 0.9,
            "bootstrap": 0.0 if bootstrap is None else float(bootstrap[i]),
        }
        expected = loop(r[i], v[i], masks[i], **row_options)
        for found, wanted in zip(flat, expected, strict=True):
            assert_close(split(found, lengths)[i], wanted)

    # The rows with their gaps cut out, as a batch of shorter rows.
    left = [int(row.sum()) for row in masks]
    cut = [packed([row[m] for row, m in zip(rows, masks, strict=True)]) for rows in (r, v)]
    with small_blocks():
        compressed = kernels.gae(*cut, cu_seqlens=bounds(left), **options)
    for one, other in zip(flat, compressed, strict=True):
        assert_close(one[packed(masks)], other, 1e-6)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_discounts_at_their_ends(gamma: float, lam: float) -> None:
    torch.manual_seed(0)
    r, v, m = torch.randn(40), torch.randn(40), torch.rand(40) < 0.7
    expected = loop(r, v, m, gamma=gamma, lam=lam, bootstrap=0.5)
    with small_blocks():
        found = kernels.gae(
            *(x[None].to(DEVICE) for x in (r, v, m)),
            gamma=gamma,
            lam=lam,
            bootstrap=torch.tensor([0.5], device=DEVICE),
        )
    for one, other in zip(found, expected, strict=True):
        assert_close(one[0], other)


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
    r, v, m = torch.randn(8500), torch.randn(8500), torch.rand(8500) < 0.9
    found = kernels.gae(*(x[None].to(DEVICE) for x in (r, v, m)), gamma=0.999, lam=0.99)
    for one, other in zip(found, loop(r, v, m, gamma=0.999, lam=0.99), strict=True):
        assert_close(one[0], other)


@pytest.mark.parametrize(("gamma", "lam", "offset"), [(1.0, 1.0, 3.0), (0.99, 0.95, 0.0)])
@pytest.mark.usefixtures("fast_interpreter")
def test_as_accurate_as_an_fp64_loop(gamma: float, lam: float, offset: float) -> None:
    """131072 tokens: 16 chunks of 16 blocks. At γλ = 1 every advantage is a sum to the end.

    Relative to the root mean square: an advantage that happens to be near 0 is the difference of
    larger numbers, which are rounded to fp32 before they meet.
    """
    tokens = 131072
    torch.manual_seed(0)
    r, v = torch.randn(tokens) + offset, torch.randn(tokens) + offset
    expected = loop(r, v, gamma=gamma, lam=lam)
    found = kernels.gae(r[None].to(DEVICE), v[None].to(DEVICE), gamma=gamma, lam=lam)
    for one, other in zip(found, expected, strict=True):
        error = (one[0].cpu().double() - other).abs()
        assert error.max() <= TOLERANCE * other.square().mean().sqrt()
        assert error.norm() <= 0.1 * TOLERANCE * other.norm()


# ---------------------------------------------------------------------------- shaping and whitening


def naive_kl(d: float, estimator: str) -> float:
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2
    return math.expm1(min(max(-d, -20.0), 20.0)) + d


@settings(max_examples=20, deadline=None)
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
    options: dict[str, Any] = {
        "kl_coef": beta if estimator else 0.0,
        "kl_estimator": estimator or "k1",
        "gamma": 0.98,
        "lam": 0.93,
        "bootstrap": bootstrap,
        "score_clip": score_clip,
    }

    def shaped(arrange: Callable[[list[Tensor]], Tensor], **layout: Any) -> reference.Advantages:
        return kernels.shaped_advantages(
            scores,
            arrange(v),
            arrange(lp),
            arrange(ref) if estimator else None,
            arrange(masks),
            token_rewards=arrange(extra) if token_rewards else None,
            **layout,
            **options,
        )

    with small_blocks():
        flat = shaped(packed, cu_seqlens=bounds(lengths))
        grid = shaped(lambda rows: padded(rows, width))
    in_row = padded([torch.ones_like(row) for row in masks], width)
    assert torch.equal(flat.advantages, grid.advantages[in_row])
    assert torch.equal(flat.returns, grid.returns[in_row])
    assert torch.equal(flat.kl, grid.kl)
    assert torch.equal(flat.moments, grid.moments)

    wanted_kl, wanted = [], []
    for i in range(batch):
        differences = (lp[i].double() - ref[i].double()).tolist()
        kl = [naive_kl(d, estimator) if estimator else 0.0 for d in differences]
        kl = [k if m else 0.0 for k, m in zip(kl, masks[i].tolist(), strict=True)]
        rewards = [-options["kl_coef"] * k for k in kl]
        if token_rewards:
            rewards = [a + b for a, b in zip(rewards, extra[i].tolist(), strict=True)]
        score = float(scores[i])
        if score_clip is not None:
            score = min(max(score, -score_clip), score_clip)
        last = max(masks[i].nonzero().flatten().tolist(), default=None)
        if last is not None:
            rewards[last] += score
        wanted_kl.append(sum(kl))
        wanted.append(
            loop(
                torch.tensor(rewards, dtype=torch.float64),
                v[i],
                masks[i],
                gamma=0.98,
                lam=0.93,
                bootstrap=0.0 if bootstrap is None else float(bootstrap[i]),
            )
        )
    assert_close(flat.advantages, packed([a for a, _ in wanted]))
    assert_close(flat.returns, packed([b for _, b in wanted]))
    assert_close(flat.kl, torch.tensor(wanted_kl))
    valid = packed([a for a, _ in wanted])[packed(masks).cpu()]
    moments = torch.tensor([len(valid), valid.sum(), valid.square().sum()], dtype=torch.float64)
    assert_close(flat.moments, moments)


def test_k3_near_and_far() -> None:
    """The series below ½, the exponential above, the clamp beyond 20: relative to each value."""
    d = torch.tensor([1e-6, -1e-4, 0.01, 0.3, 0.49, -0.49, 0.51, -0.51, 2.0, -7.0, 25.0, -25.0])
    n = len(d)
    zero = torch.zeros(n, 1, device=DEVICE)
    mask = torch.ones(n, 1, dtype=torch.bool, device=DEVICE)
    with small_blocks():
        found = kernels.shaped_advantages(
            zero[:, 0], zero, d.to(DEVICE)[:, None], zero, mask, kl_estimator="k3"
        )
    exact = d.double()
    wanted = torch.expm1((-exact).clamp(-20, 20)) + exact
    # The definition in fp64 loses digits to its own subtraction below: d²/2 − d³/6 there.
    small = exact.abs() < 1e-3
    wanted = torch.where(small, exact**2 / 2 - exact**3 / 6, wanted)
    torch.testing.assert_close(found.kl.cpu().double(), wanted, rtol=2e-6, atol=0)


def test_a_nan_is_not_hidden() -> None:
    """A broken reward model shows in its own sequence, through the clip, and nowhere else."""
    scores = torch.tensor([1.0, math.nan], device=DEVICE)
    x = torch.zeros(2, 40, device=DEVICE)
    mask = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    with small_blocks():
        found = kernels.shaped_advantages(scores, x, x, None, mask, score_clip=0.5)
    assert found.advantages[1].isnan().all()
    assert found.advantages[0].isfinite().all()
    assert found.moments[1:].isnan().all()


def test_sums_longer_than_their_lanes() -> None:
    """More than 4 chunks in a row and more than 4 rows in the batch, with 4 lanes of each."""
    torch.manual_seed(0)
    x, ref = torch.randn(6, 100, device=DEVICE), torch.randn(6, 100, device=DEVICE)
    mask = torch.rand(6, 100, device=DEVICE) < 0.8
    scores = torch.randn(6, device=DEVICE)
    with small_blocks():
        found = kernels.shaped_advantages(scores, x, x, ref, mask, kl_coef=0.1, gamma=0.99)
    expected = reference.shaped_advantages(scores, x, x, ref, mask, kl_coef=0.1, gamma=0.99)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


@settings(max_examples=15, deadline=None)
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


def test_two_ranks_whiten_as_one() -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(4, 9, device=DEVICE), torch.rand(4, 9, device=DEVICE) < 0.7
    with small_blocks():
        moments = sum(kernels.whitening_moments(x[i], mask[i]) for i in range(4))
        parts = [kernels.whiten(x[i], mask[i], moments=moments) for i in range(4)]
        whole = kernels.whiten(x, mask)
    assert_close(torch.stack(parts), whole, 1e-6)


# ----------------------------------------------------------------------------- odd shapes and input


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty_batches(shape: tuple[int, int]) -> None:
    x = torch.zeros(shape, device=DEVICE)
    mask = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
    scores = torch.ones(shape[0], device=DEVICE)
    with small_blocks():
        grid = kernels.shaped_advantages(scores, x, x, x, mask)
        flat = kernels.shaped_advantages(
            scores, *(y.flatten() for y in (x, x, x, mask)), cu_seqlens=bounds([0] * shape[0])
        )
    for found in (grid, flat):
        assert found.kl.tolist() == [0.0] * shape[0]
        assert found.moments.tolist() == [0.0] * 3


@pytest.mark.parametrize(
    "wrong", [[0, 90, 20, 40], [30, 10, 5, 40], [-50, 10, 20, 99], [40, 40, 40, 40]]
)
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
        kernels._scan(
            room[1],
            mask,
            room[1],
            torch.tensor(wrong, device=DEVICE),
            1.0,
            1.0,
            None,
            scores=scores,
            want_sums=True,
        )
    assert len(outputs) >= 4
    for buffer in outputs:
        assert (buffer[0] == 7.0).all()
        assert (buffer[2] == 7.0).all()


def test_strided_tensors() -> None:
    torch.manual_seed(0)
    r, v = torch.randn(3, 21, device=DEVICE), torch.randn(20, 3, device=DEVICE)
    mask = torch.rand(3, 21, device=DEVICE) < 0.7
    with small_blocks():
        found = kernels.gae(r[:, :-1], v.T, mask[:, 1:])
        expected = kernels.gae(r[:, :-1].clone(), v.T.contiguous(), mask[:, 1:].clone())
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_refusals() -> None:
    x = torch.zeros(2, 3, dtype=torch.float64, device=DEVICE)
    mask = torch.ones(2, 3, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match="values must be bfloat16, float16 or float32"):
        kernels.gae(x, x)
    with pytest.raises(ValueError, match="x must be bfloat16, float16 or float32"):
        kernels.whiten(x)
    x = x.float()
    with pytest.raises(ValueError, match="kl_estimator must be k1, k2 or k3, got 'full'"):
        kernels.shaped_advantages(x[:, 0], x, x, x, mask, kl_estimator="full")


# ------------------------------------------------------------------------------------- as operators


def public_call(backend: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Any]:
    def call(scores: Tensor, values: Tensor, logprobs: Tensor, mask: Tensor) -> Any:
        return fastppo.compute_advantages(
            scores,
            values,
            logprobs,
            logprobs * 0.9,
            mask,
            kl_coef=0.1,
            kl_estimator="k3",
            gamma=0.99,
            lam=0.95,
            backend=backend,
        )

    return call


def batch_of(shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, logprobs = (torch.randn(shape, device=DEVICE) for _ in range(2))
    return (
        torch.randn(shape[0], device=DEVICE),
        values,
        logprobs,
        torch.rand(shape, device=DEVICE) < 0.8,
    )


def test_the_public_functions_reach_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for name in ("gae", "shaped_advantages", "whiten"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *a, _n=name, _k=kernel, **o: (called.append(_n), _k(*a, **o))[1]
        )
    batch = batch_of((3, 40))
    _, values, logprobs, mask = batch
    with small_blocks():
        found = public_call("triton")(*batch)
        found_gae = fastppo.gae(values, logprobs, mask, backend="triton")
    assert called == ["shaped_advantages", "whiten", "gae"]
    for one, other in zip(found, public_call("torch")(*batch), strict=True):
        assert_close(one, other)
    expected_gae = fastppo.gae(values, logprobs, mask, backend="torch")
    for one, other in zip(found_gae, expected_gae, strict=True):
        assert_close(one, other)


def test_triton_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 3)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        fastppo.gae(x, x, backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="float64"):
        fastppo.whiten(x.double(), backend="triton")


def test_compiles_whole() -> None:
    batch = batch_of((3, 40))
    with small_blocks():
        compiled = torch.compile(public_call("triton"), fullgraph=True, backend="aot_eager")
        for one, other in zip(compiled(*batch), public_call("triton")(*batch), strict=True):
            assert torch.equal(one, other)


def test_operators_keep_their_contract() -> None:
    """Schema, no mutation, and fake kernels with the real shapes and dtypes."""
    scores, values, logprobs, mask = batch_of((3, 40))
    checks = ("test_schema", "test_faketensor")
    none = None
    with small_blocks():
        torch.library.opcheck(
            ops.gae_op,
            (values, logprobs, mask, none, none, none, none),
            {"gamma": 1.0, "lam": 0.9, "backend": "triton"},
            test_utils=checks,
        )
        torch.library.opcheck(
            ops.shaped_advantages_op,
            (scores, values, logprobs, values, mask, none, none, none, none, none),
            {
                "gamma": 1.0,
                "lam": 0.9,
                "kl_coef": 0.1,
                "kl_estimator": "k1",
                "score_clip": none,
                "backend": "triton",
            },
            test_utils=checks,
        )
        torch.library.opcheck(
            ops.whiten_op,
            (values, mask, none),
            {"shift_mean": True, "backend": "triton"},
            test_utils=checks,
        )


def test_the_same_bits_every_run() -> None:
    batch = batch_of((5, 60))
    with small_blocks():
        first = public_call("triton")(*batch)
        for _ in range(3):
            for one, other in zip(public_call("triton")(*batch), first, strict=True):
                assert torch.equal(one, other)


# ----------------------------------------------------------------------------------- the CPU's path


def test_vectorised_reference_is_ten_times_faster_than_the_loop() -> None:
    """At B = 64, T = 4096, without a gap: measured at 25 on one idle core.

    Processor time on one thread, the two in turns, and the fastest run of each: what else the
    machine does can only slow a run down. More rounds are taken while the ratio falls short, so
    noise passes in the end and a slow path never does.
    """
    torch.manual_seed(0)
    r, v = torch.randn(64, 4096), torch.randn(64, 4096)
    mask = torch.ones(64, 4096, dtype=torch.bool)

    def seconds(function: Callable[..., Any]) -> float:
        start = time.process_time()
        function(r, v, mask, gamma=0.99, lam=0.95)
        return time.process_time() - start

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        slow, fast = [], []
        for done in range(20):
            slow.append(seconds(reference.gae_loop))
            fast += [seconds(reference.gae) for _ in range(4)]
            if done >= 2 and min(slow) >= 10 * min(fast):
                break
    finally:
        torch.set_num_threads(threads)
    assert min(slow) >= 10 * min(fast), (min(slow), min(fast))


# ------------------------------------------------------------------------------ what needs a device

LARGE = [(64, 131072), (1024, 8192), (8192, 1024)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def ragged_lengths(total: int) -> list[int]:
    """From 0 to 131072 tokens, long and short ones in turn, `total` in all."""
    lengths: list[int] = []
    for length in itertools.cycle([0, 1, 131072, 100, 8192, 8193, 777, 40000, 16384]):
        lengths.append(min(length, total - sum(lengths)))
        if sum(lengths) == total:
            return lengths
    raise AssertionError


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", LARGE)
def test_large_batches(shape: tuple[int, int]) -> None:
    """8.4 M tokens, padded, against the definition, whose sums are fp64."""
    batch = batch_of(shape)
    for one, other in zip(public_call("triton")(*batch), public_call("torch")(*batch), strict=True):
        assert_close(one, other)


@pytest.mark.gpu
@needs_gpu
def test_large_ragged_batches() -> None:
    lengths = ragged_lengths(2**23)
    cu_seqlens = bounds(lengths)
    _, r, v, mask = (x.flatten() for x in batch_of((1, 2**23)))
    found = fastppo.gae(r, v, mask, cu_seqlens=cu_seqlens, backend="triton")
    expected = fastppo.gae(r, v, mask, cu_seqlens=cu_seqlens, backend="torch")
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)

    # The first rows, padded: the same bits on a device too.
    rows = len(lengths[:9])
    in_row = (
        torch.arange(131072 + 5, device=DEVICE) < torch.tensor(lengths[:9], device=DEVICE)[:, None]
    )
    taken = int(cu_seqlens[rows])
    grid = []
    for x in (r, v, mask):
        grid.append(x.new_zeros(in_row.shape))
        grid[-1][in_row] = x[:taken]
    for one, other in zip(fastppo.gae(*grid, backend="triton"), found, strict=True):
        assert torch.equal(one[in_row], other[:taken])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", LARGE)
def test_the_same_bits_in_a_hundred_runs(shape: tuple[int, int]) -> None:
    batch = batch_of(shape)
    first = public_call("triton")(*batch)
    for _ in range(100):
        for one, other in zip(public_call("triton")(*batch), first, strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", [(4, 1000), (4, 20000)])
def test_captured_in_a_cuda_graph(shape: tuple[int, int]) -> None:
    """Replayed on other input, so that nothing of the first run can be left in the graph."""
    call = public_call("triton")
    batch = batch_of(shape)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(*batch)  # compiles the kernels, which a capture must not
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*batch)
    for x, fresh in zip(batch, batch_of(shape), strict=True):
        x.copy_(fresh)
    graph.replay()
    for one, other in zip(captured, call(*batch), strict=True):
        assert torch.equal(one, other)
