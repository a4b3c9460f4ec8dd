"""Fingerprints: short texts that differ where two datasets, files or models do.

A run's checkpoint has those of its prompts, its rewards and the model that it started from, so that
a resumed run can say which of them have changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from modulefinder import ModuleFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

WORDS = 1024
"""Words of 64 bits in a row of a tensor's sums."""

DIGITS = 16
"""Hexadecimal digits of a fingerprint: enough against accidents, short enough to be shown."""


def of_weights(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Fingerprint of named tensors: names, shapes, dtypes, and every bit of each."""
    import torch  # a fingerprint of a file needs none

    digest = hashlib.sha256()
    for name, weight in weights:
        digest.update(f"{name} {list(weight.shape)} {weight.dtype} ".encode())
        for part in _sums(weight.detach()):
            digest.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:DIGITS]


def _sums(weight: Tensor) -> list[Tensor]:
    """Sums modulo 2⁶⁴ of the rows and of the columns of a tensor's bits, and the bytes that fill no
    row. They are made where the tensor is, at the speed of its memory."""
    import torch

    flat = weight.reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()  # words begin at multiples of 8 bytes
    flat = flat.view(torch.uint8)
    in_words = len(flat) - len(flat) % (8 * WORDS)
    words = flat[:in_words].view(torch.int64).view(-1, WORDS)
    return [words.sum(0), words.sum(1), flat[in_words:]]


def of_rows(rows: Iterable[Any]) -> str:
    """Fingerprint of rows as JSON has them; what JSON cannot hold counts by its type."""
    digest = hashlib.sha256()
    for row in rows:
        text = json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__)
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()[:DIGITS]


def of_file(path: str | Path) -> str:
    """Fingerprint of a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]


def of_code(path: str | Path) -> str:
    """Fingerprint of a Python file and of what it imports from its folder; of a module in a
    package, of what it imports from the package."""
    file = Path(path).resolve()
    name, folder = file.stem, file.parent
    while (folder / "__init__.py").exists():
        name, folder = f"{folder.name}.{name}", folder.parent
    # `fastppo` itself may lie beside a file in a checkout; of that a run knows the version.
    excludes = {"fastppo"}
    is_in_package = "." in name
    if is_in_package:  # beside a package there may be all packages of an environment
        excludes |= {entry.stem for entry in folder.iterdir()} - {name.partition(".")[0]}
    finder = ModuleFinder(path=[str(folder)], excludes=[*excludes])
    try:
        if is_in_package:
            finder.import_hook(name)
        else:
            finder.run_script(str(file))
    except ImportError:  # `from . import` where no `__init__.py` says what the package is
        return _of_files(file.parent.glob("*.py"))
    files = {getattr(module, "__file__", None) for module in finder.modules.values()}
    return _of_files(filter(None, files))


def _of_files(files: Iterable[str | Path]) -> str:
    return of_text(" ".join(of_file(file) for file in sorted(files)))


def of_text(text: str) -> str:
    """Fingerprint of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
