"""What the GPU's rows should come to: computed from bytes, FLOP and counted instructions.

Nothing here is measured. `table` sets each prediction beside what the authors of others have
measured at the shape, and beside the suite's own result where a GPU has run it;
`python -m benchmarks docs` writes it into docs/benchmarks.md.

A prediction is a range. Its low end is the largest of what a kernel moves, issues and
exponentiates, each at the card's full rate, after the matrix products at theirs. Its high end adds
what may not overlap: loads that are too few in flight to reach the memory's speed, issue slots that
stay empty, the ends of rows, and the traffic of an fp32 dW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from fastppo_kernels import linear

from benchmarks.report import seconds
from benchmarks.shapes import MODELS, Model

MATMUL_RATES = (700e12, 750e12)
"""FLOP/s of bf16 products inside an operation: what the best peers' times come to on these cards,
8·N·H·V over 50.2 ms and 6·N·H·V over 34.4 ms (`HEAD_PEERS`)."""

MULTIPROCESSORS = 132
CLOCK = 1.75e9
"""Hz, of both cards."""
ISSUED = 128
"""Instructions of threads that a multiprocessor issues in a clock: 4 of a warp's."""
EXPONENTIALS = 16
"""That a multiprocessor forms in a clock."""

ISSUE_SHARE = 0.85
"""Of the issue slots that a loop fills: assumed."""
LATENCY = 600e-9
"""Seconds of a load from memory under load: assumed."""
ROW_END = 2900 / CLOCK
"""Seconds between the last load of a row and the first of the next, where nothing else runs:
counted in the machine code."""
BLOCK_LATENCY = 0.94e-6
"""Seconds of a block of a scan: its loads and the shuffles of its 256 tokens, one after another."""


class Card(NamedTuple):
    name: str
    copy: float
    """Bytes per second, read and written counted."""


CARDS = (Card("H100", 3.0e12), Card("H200", 4.3e12))
"""The H200's copy is 90 % of its 4.8 TB/s; the H100's is taken to be that share of its 3.35. TRL's
kernel reads its logits at 2.8 there (`TRL_STATISTICS`)."""


class Range(NamedTuple):
    low: float
    high: float

    def plus(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)


class RowKernel(NamedTuple):
    """A kernel over rows of bf16 logits. Counts per element come from `tests/tools/cost.py`, for
    sm_90. A test compares them with the table in kernels/NOTES.md."""

    passes: int
    """Over memory, of one row: logits, reference's logits, gradient."""
    instructions: float
    exponentials: float
    programs: int
    """Resident on a multiprocessor."""
    in_flight: int
    """Bytes of a multiprocessor's loads."""


ROW_KERNELS = {
    "statistics": RowKernel(1, 7.2, 1.0, 2, 2**15),
    "statistics' backward": RowKernel(2, 7.9, 1.0, 2, 2**15),
    "loss": RowKernel(2, 14.1, 2.0, 1, 2**15),
    "loss, V = 50257": RowKernel(2, 13.9, 2.0, 2, 2**15),
    "full KL": RowKernel(3, 34.2, 3.2, 1, 2**14),
    "soft-cap": RowKernel(2, 53.4, 6.1, 1, 2**14),
}


def rows(kernel: RowKernel, n: int, vocab: int, card: Card) -> Range:
    """Seconds of a kernel over N rows of logits in bf16."""
    elements = n * vocab
    moved = 2 * elements * kernel.passes
    slots = MULTIPROCESSORS * CLOCK
    issue = kernel.instructions * elements / (ISSUED * slots)
    exponentials = kernel.exponentials * elements / (EXPONENTIALS * slots)
    busy = max(issue, exponentials)
    reached = min(card.copy, kernel.in_flight * MULTIPROCESSORS / LATENCY)
    ends = math.ceil(n / (MULTIPROCESSORS * kernel.programs)) * ROW_END
    return Range(max(moved / card.copy, busy), max(moved / reached, busy / ISSUE_SHARE) + ends)


def _chunks(n: int, model: Model) -> int:
    """Of the fused head's loss, by its own rule."""
    weight = torch.empty(model.vocab, model.hidden, dtype=torch.bfloat16, device="meta")
    spared = linear.accumulator_rows(weight, torch.bfloat16)
    held = linear.chunk_rows(
        n, model.vocab, torch.device("cuda"), width=model.hidden, spared_rows=spared
    )
    return math.ceil(n / held)


def _dw_traffic(n: int, model: Model, card: Card) -> float:
    """Seconds for the fp32 dW of several chunks: written by the first, read and written by the
    others, read and cast after the last. One chunk has none."""
    chunks = _chunks(n, model)
    if chunks == 1:
        return 0.0
    return (4 + 8 * (chunks - 1) + 6) * model.hidden * model.vocab / card.copy


def _products(count: int, n: int, model: Model, rate: float) -> float:
    """Seconds of `count` products [n, H] × [H, V]."""
    return 2 * count * n * model.hidden * model.vocab / rate


def head_loss(n: int, model: Model, card: Card, rate: float) -> Range:
    """The loss from hidden states and its gradients: three products around the row kernel."""
    products = _products(3, n, model, rate)
    around = Range(products, products + _dw_traffic(n, model, card))
    return around.plus(rows(ROW_KERNELS["loss"], n, model.vocab, card))


def head_logprobs(n: int, model: Model, card: Card, rate: float) -> Range:
    """Logprobs from hidden states, no gradient: one product, whose logits are written and read."""
    product = _products(1, n, model, rate)
    written = 2 * n * model.vocab / card.copy
    return Range(product, product + written).plus(
        rows(ROW_KERNELS["statistics"], n, model.vocab, card)
    )


def head_statistics(n: int, model: Model, card: Card, rate: float) -> Range:
    """Logprobs and entropy from hidden states, and the gradients of any function of them: the
    logits are formed twice, four products."""
    products = _products(3, n, model, rate)
    backward = Range(products, products + _dw_traffic(n, model, card))
    backward = backward.plus(rows(ROW_KERNELS["statistics' backward"], n, model.vocab, card))
    return head_logprobs(n, model, card, rate).plus(backward)


def scan(bytes_: float, instructions: float, batch: int, length: int, card: Card) -> Range:
    """Seconds of a scan of [batch, length] tokens, of these bytes and instructions a token. All
    rows run at once, each a block after another."""
    tokens = batch * length
    issue = instructions * tokens / (ISSUED * MULTIPROCESSORS * CLOCK)
    low = max(bytes_ * tokens / card.copy, issue)
    return Range(low, low + math.ceil(length / 256) * BLOCK_LATENCY)


def whitening(batch: int, length: int, card: Card) -> Range:
    """Seconds of whitening with its moments known: 4 bytes written and a mask read a token, and the
    advantages, from the cache or from memory."""
    tokens = batch * length
    return Range(5 * tokens / card.copy, 9 * tokens / card.copy)


# --------------------------------------------------------------------------------------- the table


class Work(NamedTuple):
    name: str
    """A case of the suite, where it has one of this work at this shape."""
    shape: str
    predict: Callable[..., Range]
    """By card; of a head by card and FLOP/s of its products."""
    has_products: bool
    peers: str


TRL_STATISTICS = "TRL, H100: 0.89 ms (huggingface/trl, issue 7244)"
HEAD_PEERS = (
    "cross-entropy, H200: Liger-Kernel 34.4 ms (its pull request 1356), QuACK 0.6.5 35.5 ms"
)
STATISTICS_PEERS = (
    "H100: Liger-Kernel 50.2 ms, verl's form 165.6 ms (Liger-Kernel, pull request 1370)"
)
GAE_PEERS = "H100: rl-triton 81 µs (simonsays1980/rl-triton)"

N = 8192
BATCH = 2048
LENGTH = 4096


def works() -> list[Work]:
    cases = []
    for name, kernel, model, n, peers in (
        ("statistics", "statistics", "qwen3-8b", N, TRL_STATISTICS),
        ("loss", "loss", "qwen3-8b", N, ""),
        ("loss, full KL", "full KL", "qwen3-8b", N, ""),
        ("loss, soft-cap", "soft-cap", "qwen3-8b", N, ""),
        ("loss", "loss, V = 50257", "gpt2", N - 1, ""),
    ):
        predict = partial(rows, ROW_KERNELS[kernel], n, MODELS[model].vocab)
        cases.append(Work(name, f"{model}, N={n}", predict, False, peers))
    for name, head, model, n, peers in (
        ("linear loss", head_loss, "llama-3.1-8b", N, HEAD_PEERS),
        ("linear loss", head_loss, "ministral-8b", N, ""),
        ("linear statistics, gradients", head_statistics, "ministral-8b", N, STATISTICS_PEERS),
        ("linear loss", head_loss, "qwen3-8b", N, ""),
        ("linear loss", head_loss, "qwen3-8b", 4 * N, ""),
        ("linear loss", head_loss, "llama-3.1-8b", 4 * N, ""),
        ("linear loss", head_loss, "llama-3.2-1b", N, ""),
        ("linear loss", head_loss, "qwen2.5-0.5b", N, ""),
        ("linear loss", head_loss, "llama-2-7b", N, ""),
        ("linear logprobs", head_logprobs, "llama-3.1-8b", N, ""),
        ("linear logprobs", head_logprobs, "qwen3-8b", N, ""),
        ("linear logprobs", head_logprobs, "qwen3-8b", 4 * N, ""),
    ):
        predict = partial(head, n, MODELS[model])
        cases.append(Work(name, f"{model}, N={n}", predict, True, peers))
    for name, predict, peers in (
        ("gae", partial(scan, 17, 34.4, BATCH, LENGTH), GAE_PEERS),
        ("advantages, before whitening", partial(scan, 21, 46.6, BATCH, LENGTH), ""),
        ("whiten", partial(whitening, BATCH, LENGTH), ""),
    ):
        cases.append(Work(name, f"B={BATCH}, T={LENGTH}", predict, False, peers))
    return cases


HEADER = ["work", *(card.name for card in CARDS), "others have measured", "measured"]
NOT_MEASURED = "not measured"


def table(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each work, under `HEADER`; of products the range over `MATMUL_RATES`.

    Args:
        records: results of the suite, from which the last column is taken.
    """
    cells = []
    for work in works():
        by_card = [_cell(work, card) for card in CARDS]
        measured = _measured(work, records)
        cells.append([f"{work.name}, {work.shape}", *by_card, work.peers, measured])
    return cells


def _cell(work: Work, card: Card) -> str:
    if work.has_products:
        slow, fast = (work.predict(card, rate) for rate in MATMUL_RATES)
        return _shown(Range(fast.low, slow.high))
    return _shown(work.predict(card))


def _shown(one: Range) -> str:
    """“1.16 to 1.26 ms”."""
    low, unit = seconds(one.low).split()
    high = seconds(one.high)
    if not high.endswith(f" {unit}"):
        return f"{low} {unit} to {high}"
    return high if high == f"{low} {unit}" else f"{low} to {high}"


def _measured(work: Work, records: Sequence[dict[str, Any]]) -> str:
    times = []
    for record in records:
        for case in record["cases"] if record["device"]["type"] == "cuda" else []:
            for row in case["rows"]:
                is_ours = row["provider"] == "FastPPO" and row["status"] == "timed"
                if is_ours and (case["case"], case["shape"]) == (work.name, work.shape):
                    name = record["device"]["name"]
                    times.append(f"{name}: {seconds(row['median_seconds'])}")
    return "; ".join(times) or NOT_MEASURED
