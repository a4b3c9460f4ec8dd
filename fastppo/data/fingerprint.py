"""Fingerprints: short texts that differ where two datasets, files or models do.

A run's checkpoint has those of its prompts, its rewards and the model that it started from, so that
a resumed run can say which of them have changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SAMPLED = 1024
"""Elements of a tensor that are read. In a model that was trained further nearly all differ."""

DIGITS = 16
"""Hexadecimal digits of a fingerprint: enough against accidents, short enough to be shown."""


def of_weights(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Of named tensors: names, shapes, dtypes, and the bits of evenly spaced elements of each."""
    digest = hashlib.sha256()
    for name, weight in weights:
        flat = weight.detach().reshape(-1)
        step = max(1, -(-flat.numel() // SAMPLED))
        sampled = flat[::step].contiguous().cpu()
        digest.update(f"{name} {list(weight.shape)} {weight.dtype} ".encode())
        digest.update(sampled.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:DIGITS]


def of_rows(rows: Iterable[Any]) -> str:
    """Of rows as JSON has them; what JSON cannot hold counts by its type."""
    digest = hashlib.sha256()
    for row in rows:
        text = json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__)
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()[:DIGITS]


def of_file(path: str | Path) -> str:
    """Of a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]


def of_text(text: str) -> str:
    """Of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
