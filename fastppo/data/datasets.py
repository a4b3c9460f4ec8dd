"""Load rows from JSONL, Parquet, a saved `datasets` directory or a hub dataset, and shuffle them.

The order depends on the seed and the epoch alone, so one number describes the position in the data,
and a run can resume from it.
"""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fastppo.data.files import MissingPathError, write_whole

Rows = list[dict[str, Any]]

JSONL = (".jsonl", ".json", ".ndjson")
"""Suffixes of files with one JSON object per line."""


class DataError(ValueError):
    """Raised for unusable data; the message says where and why."""


class NoSuchDataError(DataError, MissingPathError):
    """Raised for a missing file or directory."""


def load_rows(source: str, split: str = "train") -> Rows:
    """Load all rows of a JSONL or Parquet file, a `save_to_disk` directory, or a hub dataset.

    Raises:
        DataError: the source is missing, empty or unreadable, or has a malformed line.
    """
    path = Path(source)
    check_source(source)
    if path.suffix in JSONL:
        rows = list(read_jsonl(path))
    elif path.suffix == ".parquet":
        from datasets import Dataset

        try:
            rows = Dataset.from_parquet(str(path)).to_list()
        except Exception as error:  # datasets raises many types
            raise DataError(f"{source}: not a readable Parquet file: {_cause(error)}") from error
    else:
        rows = _load_datasets(source, split)
    if not rows:
        raise DataError(f"{source}: the dataset is empty")
    return rows


def check_source(source: str) -> None:
    """Raise DataError for a missing file or directory, or a file of another type."""
    path = Path(source)
    if path.suffix in (*JSONL, ".parquet"):
        if not path.is_file():
            raise NoSuchDataError(f"{source}: no such file", source)
    elif path.is_file():
        raise DataError(f"{source}: expected .jsonl or .parquet, got {path.suffix or 'no suffix'}")
    elif is_missing_path(source):
        raise NoSuchDataError(f"{source}: no such file or directory", source)


def column_names(rows: Iterable[dict[str, Any]], column: str) -> list[str]:
    """Return the columns of all rows, without the prompt column."""
    names = dict.fromkeys(key for row in rows for key in row)
    return [name for name in names if name != column]


def write_rows(path: Path, rows: Rows) -> None:
    """Write rows to a JSONL file."""
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_whole(path, "".join(lines))


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSONL file; raise DataError for a malformed line."""
    try:
        # Lines are read as bytes: Python splits text at characters that are valid within JSON.
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield _row(line.removesuffix(b"\n"), f"{path}, line {number}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _row(line: bytes, where: str) -> dict[str, Any]:
    """Parse one line; raise DataError if it is malformed."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 (byte {error.start + 1} of the line)") from error
    if not isinstance(row, dict):
        raise DataError(
            f'{where}: expected an object like {{"prompt": …}}, got {type(row).__name__}'
        )
    return row


def _cause(error: BaseException) -> str:
    """Return the first cause of an error, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def _load_datasets(source: str, split: str) -> Rows:
    from datasets import DatasetDict, load_dataset, load_from_disk

    from fastppo.data.hub import check_reachable  # imports an HTTP client

    path = Path(source)
    markers = ("state.json", "dataset_dict.json")  # files that save_to_disk writes
    if path.is_dir() and any((path / marker).exists() for marker in markers):
        try:
            dataset = load_from_disk(source)
            if isinstance(dataset, DatasetDict) and split in dataset:
                dataset = dataset[split]
            rows = None if isinstance(dataset, DatasetDict) else dataset.to_list()
        except Exception as error:  # datasets raises many types
            raise DataError(f"{source}: cannot be read: {_cause(error)}") from error
        if rows is None:
            raise DataError(f"{source}: no split {split!r}; it has {', '.join(dataset)}")
        return rows
    if not path.is_dir():
        try:
            check_reachable(source, "README.md", "dataset")
        except ConnectionError as error:
            raise DataError(f"{source}: no such file or directory, and {error}") from error
    try:
        return load_dataset(source, split=split).to_list()
    except Exception as error:  # datasets raises many types
        raise DataError(
            f"{source}: expected a .jsonl or .parquet file, a save_to_disk directory or a hub "
            f"dataset ({_cause(error)})"
        ) from error


def is_missing_path(name: str) -> bool:
    """Return whether a name is a path that does not exist and cannot be a hub name (`owner/name`).

    A name below `runs/`, the folder of the default `output_dir`, counts as a path.
    """
    is_path = name.count("/") > 1 or name.endswith("/") or name.startswith((".", "/", "~", "runs/"))
    return is_path and not Path(name).exists()


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """Return a permutation of range(count), determined by seed and epoch."""
    import torch  # options are checked without it

    # The prime keeps the (seed, epoch) pairs of different runs apart.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator).tolist()


def visited(count: int, start: int, seed: int) -> Iterator[int]:
    """Yield rows from position `start` of an endless sequence of shuffled epochs."""
    epoch, offset = divmod(start, count)
    while True:
        yield from shuffled(count, seed, epoch)[offset:]
        epoch += 1
        offset = 0


def visiting_order(count: int, start: int, size: int, seed: int) -> list[int]:
    """Return the next `size` rows of `visited`."""
    return list(itertools.islice(visited(count, start, seed), size))
