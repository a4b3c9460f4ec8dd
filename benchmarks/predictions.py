"""Predict GPU times from bytes, FLOP and counted instructions. Nothing here is measured.

`python -m benchmarks.docs` writes the table into docs/benchmarks.md, next to published times of
other packages and, once a GPU has run the suite, its results.

A prediction is a range. The low end is the largest of the times for bytes, instructions and
exponentials at the card's full rate, plus the matrix products. The high end adds everything without
overlap: too few loads in flight, empty issue slots, row ends, and the traffic of an fp32 dW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from fastppo_kernels import linear

from benchmarks.results import Results
from benchmarks.shapes import MODELS, Model
from benchmarks.units import seconds

NOT_MEASURED = "not measured"

MATMUL_RATES = (700e12, 750e12)
"""FLOP/s of bf16 products inside an operation, from the best peers' times on these cards: 8·N·H·V
in 50.2 ms and 6·N·H·V in 34.4 ms (`HEAD_PEERS`)."""

MULTIPROCESSORS = 132
CLOCK = 1.75e9
"""Clock rate of both cards in Hz."""
ISSUED = 128
"""Thread instructions per multiprocessor and clock: 4 warps of 32 threads."""
EXPONENTIALS = 16
"""Exponentials per multiprocessor and clock."""

ISSUE_SHARE = 0.85
"""Share of issue slots that a loop fills; assumed."""
LATENCY = 600e-9
"""Latency of a load from busy memory in seconds; assumed."""
ROW_END = 2900 / CLOCK
"""Seconds from the last load of a row to the first of the next, counted in the machine code."""
BLOCK_LATENCY = 0.94e-6
"""Seconds for a block of a scan: its loads, then the shuffles of its 256 tokens."""


class Card(NamedTuple):
    name: str
    copy: float
    """Bytes read and written per second by a copy."""


CARDS = (Card("H100", 3.0e12), Card("H200", 4.3e12))
"""Cards to predict for. The H200's copy reaches 90 % of its 4.8 TB/s. The same share of 3.35 TB/s
is assumed for the H100; TRL's kernel reads its logits at 2.8 TB/s there (`TRL_STATISTICS`)."""


class Range(NamedTuple):
    low: float
    high: float

    def plus(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)


class RowKernel(NamedTuple):
    """Kernel over rows of bf16 logits, with counts per element on sm_90.

    The counts come from `tests/tools/cost.py`; a test compares them with kernels/NOTES.md.
    """

    passes: int
    """Number of passes over a row in memory: logits, reference logits, gradient."""
    instructions: float
    exponentials: float
    programs: int
    """Number of resident programs per multiprocessor."""
    in_flight: int
    """Bytes in flight per multiprocessor."""


ROW_KERNELS = {
    "statistics": RowKernel(1, 7.2, 1.0, 2, 2**15),
    "statistics' backward": RowKernel(2, 7.9, 1.0, 2, 2**15),
    "loss": RowKernel(2, 14.1, 2.0, 1, 2**15),
    "loss, V = 50257": RowKernel(2, 13.9, 2.0, 2, 2**15),
    "full KL": RowKernel(3, 34.2, 3.2, 1, 2**14),
    "soft-cap": RowKernel(2, 53.4, 6.1, 1, 2**14),
}


def rows(kernel: RowKernel, n: int, vocab: int, card: Card) -> Range:
    """Predict the seconds of a kernel over N rows of bf16 logits."""
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
    """Return the chunks of the fused head's loss, by its own rule."""
    weight = torch.empty(model.vocab, model.hidden, dtype=torch.bfloat16, device="meta")
    spared = linear.accumulator_rows(weight, torch.bfloat16)
    held = linear.chunk_rows(
        n, model.vocab, torch.device("cuda"), width=model.hidden, spared_rows=spared
    )
    return math.ceil(n / held)


def _dw_traffic(n: int, model: Model, card: Card) -> float:
    """Predict the seconds for the traffic of an fp32 dW, which a single chunk does not need.

    The first chunk writes dW, the others read and write it, and a last pass reads it to cast it.
    """
    chunks = _chunks(n, model)
    if chunks == 1:
        return 0.0
    return (4 + 8 * (chunks - 1) + 6) * model.hidden * model.vocab / card.copy


def _products(count: int, n: int, model: Model, rate: float) -> float:
    """Predict the seconds of `count` products [n, H] × [H, V]."""
    return 2 * count * n * model.hidden * model.vocab / rate


def head_loss(n: int, model: Model, card: Card, rate: float) -> Range:
    """Predict the loss from hidden states with gradients: three products and the row kernel."""
    products = _products(3, n, model, rate)
    around = Range(products, products + _dw_traffic(n, model, card))
    return around.plus(rows(ROW_KERNELS["loss"], n, model.vocab, card))


def head_logprobs(n: int, model: Model, card: Card, rate: float) -> Range:
    """Predict logprobs from hidden states: one product, with logits written and read."""
    product = _products(1, n, model, rate)
    written = 2 * n * model.vocab / card.copy
    return Range(product, product + written).plus(
        rows(ROW_KERNELS["statistics"], n, model.vocab, card)
    )


def head_statistics(n: int, model: Model, card: Card, rate: float) -> Range:
    """Predict logprobs and entropy from hidden states with gradients.

    The logits are computed twice, so there are four products.
    """
    products = _products(3, n, model, rate)
    backward = Range(products, products + _dw_traffic(n, model, card))
    backward = backward.plus(rows(ROW_KERNELS["statistics' backward"], n, model.vocab, card))
    return head_logprobs(n, model, card, rate).plus(backward)


def scan(bytes_: float, instructions: float, batch: int, length: int, card: Card) -> Range:
    """Predict the seconds of a scan of [batch, length] tokens.

    All rows run in parallel, and the blocks of a row one after another.
    """
    tokens = batch * length
    issue = instructions * tokens / (ISSUED * MULTIPROCESSORS * CLOCK)
    low = max(bytes_ * tokens / card.copy, issue)
    return Range(low, low + math.ceil(length / 256) * BLOCK_LATENCY)


def whitening(batch: int, length: int, card: Card) -> Range:
    """Predict the seconds of whitening with known moments.

    For each token, 4 bytes are written, the mask is read, and 4 bytes are read from cache or
    memory.
    """
    tokens = batch * length
    return Range(5 * tokens / card.copy, 9 * tokens / card.copy)


# ---------------------------------------------------------------------------------------- decoding

PEAK = 3.35e12
"""Bytes read per second by an H100, from its data sheet; the low end of a step."""
LAUNCH = 5e-6
"""Seconds of the host for one launch from PyTorch; assumed."""
DECODED_ROWS = 64
CONTEXT = 512
"""Tokens in the cache of each row, the mean over a response."""
FIXED_LAUNCHES = 21
LAYER_LAUNCHES = 43
"""Launches of the decoder per token, and per token and layer, for prompts of one length under
autocast, counted on a simulated device."""


def decoding_bytes(model: Model, rows: int, context: int) -> tuple[int, int]:
    """Return the bytes of (weights, KV cache) in bf16 that a decoding step reads."""
    head = model.hidden // model.heads
    attention = 2 * model.hidden * (model.heads + model.kv_heads) * head
    products = model.layers * (attention + 3 * model.hidden * model.intermediate)
    cache = 2 * rows * context * model.layers * model.kv_heads * head
    return 2 * (products + model.vocab * model.hidden), 2 * cache


def decoding_step(model: Model, launches: int) -> Range:
    """Predict the seconds of a decoding step on an H100: what is read, and the launches.

    At the low end the device works while the host launches, at the high end one waits for the
    other.
    """
    read = sum(decoding_bytes(model, DECODED_ROWS, CONTEXT))
    host = launches * LAUNCH
    return Range(max(read / PEAK, host), read / CARDS[0].copy + host)


def decoding_table() -> list[list[str]]:
    """Return a header and a row per model."""
    header = ["model", "read per step", "launches", "decoder", "a step in one CUDA graph"]
    cells = [[*header, "measured"]]
    for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"):
        model = MODELS[name]
        weights, cache = decoding_bytes(model, DECODED_ROWS, CONTEXT)
        launches = FIXED_LAUNCHES + LAYER_LAUNCHES * model.layers
        speeds = [_tokens_per_second(decoding_step(model, count)) for count in (launches, 1)]
        read = f"{weights / 1e9:.2f} GB of weights, {cache / 1e9:.2f} GB of cache"
        cells.append([name, read, str(launches), *speeds, NOT_MEASURED])
    return cells


def _tokens_per_second(step: Range) -> str:
    low, high = DECODED_ROWS / step.high, DECODED_ROWS / step.low
    return f"{low / 1000:.1f} to {high / 1000:.1f} k"


# --------------------------------------------------------------------------------------- the table


class Work(NamedTuple):
    name: str
    """Name of the case in the suite, if there is one."""
    shape: str
    predict: Callable[..., Range]
    """Function of the card, and of the FLOP/s of products if there are any."""
    has_products: bool
    peers: str


TRL_STATISTICS = "TRL, H100: 0.89 ms (huggingface/trl, issue 7244)"
HEAD_PEERS = (
    "cross-entropy, H200: Liger-Kernel 34.4 ms (its pull request 1356), QuACK 0.6.5 35.5 ms; "
    "B200: Liger-Kernel 17.5 ms (its pull request 1339)"
)
LOGPROBS_PEERS = (
    "cross-entropy, H200: Liger-Kernel 13.59 ms, QuACK 13.69 ms, not stated whether with gradients "
    "(Liger-Kernel, pull request 1348)"
)
STATISTICS_PEERS = (
    "H100: Liger-Kernel 50.2 ms, verl's form 165.6 ms (Liger-Kernel, pull request 1370); at a "
    "shape not named in its summary: Liger-Kernel's cuTile 26.15 ms, B200 12.01 ms (its pull "
    "request 1359)"
)
GAE_PEERS = {
    128: "H100: rl-triton 4.4 µs on the device, 34 µs for a call",
    2048: "H100: rl-triton 81 µs on the device, 105 µs for a call",
    8192: "H100: rl-triton 303 µs on the device, 327 µs for a call",
}
"""Published times by number of sequences of 4096 tokens, from
benchmarks/gae_vs_pufferlib-2026-08-05.md of simonsays1980/rl-triton. It writes advantages but no
returns."""

N = 8192
BATCH = 2048
LENGTH = 4096


def works() -> list[Work]:
    cases = []
    for name, kernel, model, n, peers in (
        ("token_stats", "statistics", "qwen3-8b", N, TRL_STATISTICS),
        ("ppo_loss", "loss", "qwen3-8b", N, ""),
        ("ppo_loss, full KL", "full KL", "qwen3-8b", N, ""),
        ("ppo_loss, soft-cap", "soft-cap", "qwen3-8b", N, ""),
        ("ppo_loss", "loss, V = 50257", "gpt2", N - 1, ""),
    ):
        predict = partial(rows, ROW_KERNELS[kernel], n, MODELS[model].vocab)
        cases.append(Work(name, f"{model}, N={n}", predict, False, peers))
    for name, head, model, n, peers in (
        ("linear_ppo_loss", head_loss, "llama-3.1-8b", N, HEAD_PEERS),
        ("linear_ppo_loss", head_loss, "ministral-8b", N, ""),
        ("linear_token_stats, gradients", head_statistics, "ministral-8b", N, STATISTICS_PEERS),
        ("linear_ppo_loss", head_loss, "qwen3-8b", N, ""),
        ("linear_ppo_loss", head_loss, "qwen3-8b", 4 * N, ""),
        ("linear_ppo_loss", head_loss, "llama-3.1-8b", 4 * N, ""),
        ("linear_ppo_loss", head_loss, "llama-3.2-1b", N, ""),
        ("linear_ppo_loss", head_loss, "qwen2.5-0.5b", N, ""),
        ("linear_ppo_loss", head_loss, "llama-2-7b", N, ""),
        ("linear_token_logprobs", head_logprobs, "llama-3.1-8b", N, LOGPROBS_PEERS),
        ("linear_token_logprobs", head_logprobs, "qwen3-8b", N, ""),
        ("linear_token_logprobs", head_logprobs, "qwen3-8b", 4 * N, ""),
    ):
        predict = partial(head, n, MODELS[model])
        cases.append(Work(name, f"{model}, N={n}", predict, True, peers))
    for name, predict, batch, peers in (
        *(("gae", partial(scan, 17, 34.4, b, LENGTH), b, GAE_PEERS[b]) for b in GAE_PEERS),
        ("compute_advantages, before whitening", partial(scan, 21, 46.6, BATCH, LENGTH), BATCH, ""),
        ("whiten", partial(whitening, BATCH, LENGTH), BATCH, ""),
    ):
        cases.append(Work(name, f"B={batch}, T={LENGTH}", predict, False, peers))
    return cases


HEADER = ["operation", *(card.name for card in CARDS), "published by others", "measured"]


def table(devices: Sequence[Results]) -> list[list[str]]:
    """Return a row per work, with the columns of `HEADER`. Products span `MATMUL_RATES`.

    Args:
        devices: results of the suite, for the last column.
    """
    cells = []
    for work in works():
        by_card = [_cell(work, card) for card in CARDS]
        measured = _measured(work, devices)
        cells.append([f"{work.name}, {work.shape}", *by_card, work.peers, measured])
    return cells


def _cell(work: Work, card: Card) -> str:
    if work.has_products:
        slow, fast = (work.predict(card, rate) for rate in MATMUL_RATES)
        return _shown(Range(fast.low, slow.high))
    return _shown(work.predict(card))


def _shown(one: Range) -> str:
    """Format a range as "1.16 to 1.26 ms"."""
    low, unit = seconds(one.low).split()
    high = seconds(one.high)
    if not high.endswith(f" {unit}"):
        return f"{low} {unit} to {high}"
    return high if high == f"{low} {unit}" else f"{low} to {high}"


def _measured(work: Work, devices: Sequence[Results]) -> str:
    times = []
    for device in devices:
        for _, test in device.having("floor_seconds") if device.is_on_gpu else []:
            info = test["extra_info"]
            if (info["provider"], info["case"], info["shape"]) == (
                "FastPPO",
                work.name,
                work.shape,
            ):
                times.append(f"{device.device['name']}: {seconds(test['stats']['median'])}")
    return "; ".join(times) or NOT_MEASURED
