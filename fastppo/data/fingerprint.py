"""Fingerprints of datasets, files and models.

A checkpoint stores the fingerprints of the run's prompts, rewards and initial model, so that a
resumed run can report which of them changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NOT_OF_A_MODEL = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")
"""Fields of a config that describe how it was loaded, not the model."""

DIGITS = 16
"""Hexadecimal digits of a fingerprint: 64 bits."""


def of_weights(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Fingerprint of named tensors: names, shapes, dtypes and all bits."""
    import torch  # fingerprints of files work without it

    digest = hashlib.sha256()
    for name, weight in weights:
        digest.update(f"{name} {list(weight.shape)} {weight.dtype} ".encode())
        flat = weight.detach().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()[:DIGITS]


def of_model(model: Any) -> str:
    """Fingerprint of a transformers model: weights, config and generation config."""
    parts = [of_weights(model.named_parameters())]
    for config in (model.config, getattr(model, "generation_config", None)):
        values = {} if config is None else config.to_diff_dict()
        parts.append(of_rows([{k: v for k, v in values.items() if k not in NOT_OF_A_MODEL}]))
    return of_text(" ".join(parts))


def of_tokenizer(tokenizer: Any) -> str:
    """Fingerprint of a tokenizer: vocabulary and chat template."""
    return of_rows([tokenizer.get_vocab(), getattr(tokenizer, "chat_template", None)])


def of_rows(rows: Iterable[Any]) -> str:
    """Fingerprint of rows as JSON; a value without a JSON form counts by its type."""
    digest = hashlib.sha256()
    for row in rows:
        text = json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__)
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()[:DIGITS]


def of_file(path: str | Path) -> str:
    """Fingerprint of a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]


def of_text(text: str) -> str:
    """Fingerprint of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
