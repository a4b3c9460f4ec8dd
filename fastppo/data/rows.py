"""Rows of JSONL, Parquet, a saved `datasets` directory or a hub dataset, and the order of visiting.

Rows are visited in a shuffled order that follows from the seed and the epoch alone, so a position
is a number and a run can go on where it stopped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

Rows = list[dict[str, Any]]


class DataError(ValueError):
    """A dataset cannot be used: says where and why."""


def load_rows(source: str, split: str = "train") -> Rows:
    """All rows of a JSONL or Parquet file, a directory of `save_to_disk`, or a hub dataset.

    Raises:
        DataError: nothing there, an empty dataset, or a malformed line, with its number.
    """
    path = Path(source)
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        rows = _load_jsonl(path)
    elif path.suffix == ".parquet":
        if not path.is_file():
            raise DataError(f"{source}: no such file")
        from datasets import Dataset

        rows = Dataset.from_parquet(str(path)).to_list()
    else:
        rows = _load_datasets(source, split)
    if not rows:
        raise DataError(f"{source}: the dataset is empty")
    return rows


def _load_jsonl(path: Path) -> Rows:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    rows: Rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not valid JSON ({error.msg} at column {error.colno})"
                ) from error
            if not isinstance(row, dict):
                raise DataError(
                    f'{path}, line {number}: expected an object like {{"prompt": …}}, '
                    f"got {type(row).__name__}"
                )
            rows.append(row)
    return rows


def _load_datasets(source: str, split: str) -> Rows:
    from datasets import DatasetDict, load_dataset, load_from_disk

    path = Path(source)
    if path.is_file():
        raise DataError(f"{source}: expected .jsonl or .parquet, got {path.suffix or 'no suffix'}")
    if is_missing_path(source):
        raise DataError(f"{source}: there is no such file or directory")
    markers = ("state.json", "dataset_dict.json")  # what save_to_disk writes
    if path.is_dir() and any((path / marker).exists() for marker in markers):
        dataset = load_from_disk(source)
        if isinstance(dataset, DatasetDict):
            if split not in dataset:
                raise DataError(f"{source}: no split {split!r}; it has {', '.join(dataset)}")
            dataset = dataset[split]
        return dataset.to_list()
    try:
        return load_dataset(source, split=split).to_list()
    except Exception as error:  # the library raises many kinds; the message carries the cause
        raise DataError(
            f"{source}: neither a .jsonl or .parquet file, nor a directory of save_to_disk, "
            f"nor a hub dataset that loads ({type(error).__name__}: {error})"
        ) from error


def is_missing_path(name: str) -> bool:
    """Whether a name can only be a path, and there is nothing: no hub name has two slashes, or
    begins with one, a dot or a tilde."""
    only_a_path = name.count("/") > 1 or name.startswith((".", "/", "~"))
    return only_a_path and not Path(name).exists()


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(count) that depends on (seed, epoch) alone."""
    # Seeds of neighbouring runs and epochs must not meet: 1_000_003 is a prime beyond any epoch.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator).tolist()


def visiting_order(count: int, start: int, size: int, seed: int) -> list[int]:
    """The `size` rows from position `start` of the endless shuffled sequence of epochs."""
    rows: list[int] = []
    while len(rows) < size:
        epoch, offset = divmod(start + len(rows), count)
        rows += shuffled(count, seed, epoch)[offset : offset + size - len(rows)]
    return rows
