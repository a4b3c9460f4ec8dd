"""Rows with a gradient first: their order, the kernel that moves them, and the products over them.

Under Triton's interpreter on a CPU, compiled where there is a GPU. What is moved keeps its bits; a
product of bf16 matrices may round differently from that of plain PyTorch over the same rows, by one
rounding of bf16. `test_linear.py` runs the loss on top.
"""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor
from waits import counted, refused_by_torch

pytest.importorskip("triton", reason="Triton is not installed")

from fastppo_kernels import triton_live_rows as live

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cuda" and torch.cuda.get_device_capability() not in live.COUNTS:
    pytest.skip("grouped_mm fetches the count on this GPU", allow_module_level=True)
N, H = 24, 16
PATTERNS = {
    "all": [1] * N,
    "none": [0] * N,
    "the first": [1] + [0] * (N - 1),
    "the last": [0] * (N - 1) + [1],
    "behind the dead": [0] * 10 + [1] * (N - 10),
    "before the dead": [1] * 10 + [0] * (N - 10),
    "every third": [int(i % 3 == 0) for i in range(N)],
    "all but two": [int(i not in (0, 7)) for i in range(N)],
}
patterns = pytest.mark.parametrize("pattern", PATTERNS)


def rows_alive(pattern: str) -> Tensor:
    return torch.tensor(PATTERNS[pattern], dtype=torch.bool, device=DEVICE)


def gradient(alive: Tensor, vocab: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[N, V] as the loop's buffer has it: rows a multiple of 128 bytes apart, with 0 in between;
    dead ones are 0."""
    step = 128 // dtype.itemsize
    buffer = torch.zeros(N, -(-vocab // step) * step, dtype=dtype, device=DEVICE)
    g = torch.Generator(DEVICE).manual_seed(1)
    buffer[:, :vocab] = torch.randn(N, vocab, device=DEVICE, generator=g).to(dtype)
    buffer[~alive, :vocab] = 0.0
    return buffer[:, :vocab]


# ----------------------------------------------------------------------------------- the order


@patterns
def test_the_order_brings_the_rows_with_a_gradient_forward_and_moves_no_other(pattern: str) -> None:
    alive = rows_alive(pattern)
    rows = live.live_rows(alive)
    count, place = int(alive.sum()), torch.arange(N, device=DEVICE)
    assert rows.number.tolist() == [max(1, count)]
    assert rows.number.dtype == torch.int32  # grouped_mm takes no other
    assert alive[rows.order].tolist() == [True] * count + [False] * (N - count)
    assert torch.equal(rows.order[rows.order], place)
    moved = rows.order != place
    assert int(moved.sum()) == 2 * int((~alive[:count]).sum())


def test_the_first_changes_places_with_the_first() -> None:
    """One order of many that would do: another one would give another rounding of dW."""
    alive = torch.tensor([0, 1, 0, 1, 0, 1, 1], dtype=torch.bool, device=DEVICE)
    assert live.live_rows(alive).order.tolist() == [5, 1, 6, 3, 4, 0, 2]


# ------------------------------------------------------------------------------------ the move


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [1, 7, 1003, live.MOVE_BLOCK + 5])
@patterns
def test_rows_are_moved_bit_by_bit(pattern: str, vocab: int, dtype: torch.dtype) -> None:
    """Rows off a vector's boundary, and of more than one tile."""
    alive = rows_alive(pattern)
    grad = gradient(alive, vocab, dtype)
    grad[alive, 0] = torch.inf  # a row that is not finite goes its way
    before = grad.clone()
    live.bring_forward(grad, live.live_rows(alive))
    count = int(alive.sum())
    wanted = before[live.live_rows(alive).order][:count]
    assert torch.equal(grad[:count], wanted)
    assert torch.equal(grad[max(1, count) :], before[max(1, count) :])


# -------------------------------------------------------------------------------- the products


@pytest.mark.parametrize("vocab", [64, 1003])
@patterns
def test_the_products_over_the_first_rows_are_those_over_all(pattern: str, vocab: int) -> None:
    alive = rows_alive(pattern)
    grad = gradient(alive, vocab)
    g = torch.Generator(DEVICE).manual_seed(2)
    head = torch.randn(vocab, H, device=DEVICE, generator=g).bfloat16()
    x = torch.randn(N, H, device=DEVICE, generator=g).bfloat16()
    wanted = grad.double() @ head.double(), grad.double().T @ x.double()
    rows = live.live_rows(alive)
    live.bring_forward(grad, rows)
    found = live.hidden_gradient(grad, head, rows), live.weight_gradient(grad, x, rows)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        assert one.shape == other.shape
        largest = other.abs().max().item()
        torch.testing.assert_close(one.double(), other, rtol=2**-8, atol=2**-16 * largest)
    assert (found[0][~alive] == 0).all()


@patterns
def test_what_is_behind_the_rows_with_a_gradient_is_not_read(pattern: str) -> None:
    """So the time is theirs: a row of NaN behind them changes nothing."""
    alive = rows_alive(pattern)
    grad = gradient(alive, 64)
    head, x = (
        torch.ones(64, H, device=DEVICE).bfloat16(),
        torch.ones(N, H, device=DEVICE).bfloat16(),
    )
    rows = live.live_rows(alive)
    live.bring_forward(grad, rows)
    grad[max(1, int(alive.sum())) :] = torch.nan
    assert live.hidden_gradient(grad, head, rows).isfinite().all()
    assert live.weight_gradient(grad, x, rows).isfinite().all()


def test_the_host_learns_neither_the_number_nor_the_order() -> None:
    alive = rows_alive("every third")
    grad, head = gradient(alive, 64), torch.ones(64, H, device=DEVICE).bfloat16()
    x = torch.ones(N, H, device=DEVICE).bfloat16()

    def everything() -> None:
        rows = live.live_rows(alive)
        live.bring_forward(grad, rows)
        live.hidden_gradient(grad, head, rows)
        live.weight_gradient(grad, x, rows)

    if DEVICE.type == "cuda":
        everything()  # compiles
        with refused_by_torch():
            everything()
    else:
        with counted() as reads:
            everything()
        assert not reads


def test_offsets_do_not_overflow_int32() -> None:
    """Rows 2³⁰ elements apart: the last begins behind 2³¹."""
    if DEVICE.type == "cuda":
        pytest.skip("test_linear_gpu.py does this on a GPU")
    apart, vocab = 2**30, 40
    # Anonymous memory that is never touched is never there.
    size = 2 * (3 * apart + vocab)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    far = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((4, vocab), (apart, 1))
    far.copy_(torch.arange(4).unsqueeze(1))
    alive = torch.tensor([False, True, True, True])
    live.bring_forward(far, live.live_rows(alive))
    assert far[:, 0].tolist() == [3.0, 1.0, 2.0, 3.0]


# ------------------------------------------------------------------------------- where it runs


def a_head(dtype: torch.dtype = torch.bfloat16, width: int = 16) -> Tensor:
    return torch.zeros(64, width, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("head", "served"),
    [
        (a_head(), True),
        (a_head(torch.float16), False),
        (a_head(torch.float32), False),
        (a_head(width=12), False),
        (torch.zeros(16, 1003, dtype=torch.bfloat16, device=DEVICE).T, False),
        (a_head(width=20)[:, :16], False),
        (a_head()[:1].expand(64, 16), False),
        (a_head().flatten()[3:-13].view(63, 16), False),
        (a_head().flatten()[8:-8].view(63, 16), True),
    ],
    ids=["bf16", "fp16", "fp32", "12 wide", "transposed", "cut", "expanded", "off 6", "off 16"],
)
def test_it_serves_bf16_whose_rows_begin_on_16_bytes(head: Tensor, served: bool) -> None:
    assert live.serves(head) is served


@pytest.mark.parametrize(
    ("capability", "served"),
    [((8, 0), False), ((9, 0), True), ((10, 0), True), ((10, 3), False), ((12, 0), False)],
)
def test_it_serves_gpus_that_read_the_number_themselves(
    capability: tuple[int, int], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch 2.11's and 2.13's sources; elsewhere `grouped_mm` copies it to the host."""

    class OnGpu(Tensor):
        is_cuda = True  # type: ignore[assignment]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert live.serves(a_head().as_subclass(OnGpu)) is served
