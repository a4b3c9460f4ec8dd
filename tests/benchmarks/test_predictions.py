"""Predicted GPU times, against a calculation by hand and the counts in the notes."""

from __future__ import annotations

import re

import pytest

from benchmarks import docs, predictions
from benchmarks.shapes import MODELS


def test_predictions_agree_with_a_calculation_by_hand() -> None:
    """In ms, at the shape of Liger-Kernel's and QuACK's figures: three products and the loss."""
    h200 = predictions.CARDS[1]
    llama = MODELS["llama-3.1-8b"]
    logits = 8192 * 128256 * 2
    loss = predictions.head_loss(8192, llama, h200, 750e12)
    products = 6 * 8192 * 4096 * 128256 / 750e12
    assert loss.low == pytest.approx(products + 2 * logits / 4.3e12)
    assert loss.high == pytest.approx(loss.low + 63 * 2900 / 1.75e9)  # one chunk
    # Two chunks of 4096 rows write dW in fp32, read and write it, read and cast it.
    qwen = MODELS["qwen2.5-0.5b"]
    rows = predictions.rows(predictions.ROW_KERNELS["loss"], 8192, qwen.vocab, h200)
    loss = predictions.head_loss(8192, qwen, h200, 700e12)
    traffic = 18 * 896 * 151936 / 4.3e12
    assert loss.high - loss.low == pytest.approx(traffic + rows.high - rows.low)
    assert predictions.scan(17, 34.4, 2048, 4096, h200).low == pytest.approx(17 * 2**23 / 4.3e12)


def test_decoding_reads_weights_and_cache_once_per_step() -> None:
    """Qwen2.5 7B has 7.07 billion parameters without its embedding."""
    model = MODELS["qwen2.5-7b"]
    weights, cache = predictions.decoding_bytes(model, 64, 512)
    assert weights == pytest.approx(2 * 7.07e9, rel=1e-3)
    assert cache == 64 * 512 * 28 * 2 * (4 * 128) * 2
    step = predictions.decoding_step(model, launches=1)
    assert step.low == pytest.approx((weights + cache) / 3.35e12)
    assert predictions.decoding_step(model, launches=2000).low == pytest.approx(0.01)


def test_predictions_use_the_instruction_counts_of_the_notes() -> None:
    """The counts agree within 5 %."""
    notes = (docs.ROOT / "kernels" / "NOTES.md").read_text("utf-8")
    for launch, kernel in predictions.ROW_KERNELS.items():
        row = re.search(rf"^\| {re.escape(launch)} \| ([^|]+) \| ([^|]+) \|", notes, re.MULTILINE)
        assert row is not None, launch
        instructions = sum(float(count) for count in row[1].split("/"))
        exponentials = sum(float(pipes.split(",")[1]) for pipes in row[2].split("/"))
        assert kernel.instructions == pytest.approx(instructions, rel=0.05), launch
        assert kernel.exponentials == pytest.approx(exponentials, rel=0.05), launch
