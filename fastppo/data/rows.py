"""Rows of JSONL, Parquet, a saved `datasets` directory or a hub dataset, and the order of visiting.

Rows are visited in a shuffled order that follows from the seed and the epoch alone, so a position
is a number and a run can go on where it stopped.
"""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fastppo.data.files import MissingPathError, write_whole

Rows = list[dict[str, Any]]

JSONL = (".jsonl", ".json", ".ndjson")
"""Suffixes of files with a JSON object per line."""


class DataError(ValueError):
    """A dataset cannot be used: says where and why."""


class NoSuchDataError(DataError, MissingPathError):
    """There is no file or directory of that name."""


def load_rows(source: str, split: str = "train") -> Rows:
    """All rows of a JSONL or Parquet file, a directory of `save_to_disk`, or a hub dataset.

    Raises:
        DataError: nothing there, an empty dataset, or a malformed line, with its number.
    """
    path = Path(source)
    check_source(source)
    if path.suffix in JSONL:
        rows = list(read_jsonl(path))
    elif path.suffix == ".parquet":
        from datasets import Dataset

        try:
            rows = Dataset.from_parquet(str(path)).to_list()
        except Exception as error:  # the library raises many kinds; the message carries the cause
            raise DataError(
                f"{source}: not a Parquet file that can be read: {_cause(error)}"
            ) from error
    else:
        rows = _load_datasets(source, split)
    if not rows:
        raise DataError(f"{source}: the dataset is empty")
    return rows


def check_source(source: str) -> None:
    """Raises DataError if a name can only be a file or directory, and there is none."""
    path = Path(source)
    if path.suffix in (*JSONL, ".parquet"):
        if not path.is_file():
            raise NoSuchDataError(f"{source}: no such file", source)
    elif path.is_file():
        raise DataError(f"{source}: expected .jsonl or .parquet, got {path.suffix or 'no suffix'}")
    elif is_missing_path(source):
        raise NoSuchDataError(f"{source}: there is no such file or directory", source)


def column_names(rows: Iterable[dict[str, Any]], column: str) -> list[str]:
    """The columns besides the prompt's that any of the rows has."""
    names = dict.fromkeys(key for row in rows for key in row)
    return [name for name in names if name != column]


def check_prompt_column(row: dict[str, Any], column: str, source: str) -> None:
    """Raises DataError where the first row has no prompt."""
    if column not in row:
        raise DataError(f"{source}: no column {column!r}; there are {', '.join(row) or 'none'}")


def write_rows(path: Path, rows: Rows) -> None:
    """Writes a JSONL file."""
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_whole(path, "".join(lines))


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file, one after the other; raises DataError at a malformed line."""
    try:
        # In bytes: Python's lines would also end at characters that JSON may hold.
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield _row(line.removesuffix(b"\n"), f"{path}, line {number}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _row(line: bytes, where: str) -> dict[str, Any]:
    """The row of a line; raises DataError where it is malformed."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 (byte {error.start + 1} of the line)") from error
    except (ValueError, RecursionError) as error:  # a number too long, nesting too deep
        raise DataError(f"{where}: a value that cannot be read ({_cause(error)})") from None
    if not isinstance(row, dict):
        raise DataError(
            f'{where}: expected an object like {{"prompt": …}}, got {type(row).__name__}'
        )
    if b"\\ud" in line.lower() and _is_broken(row):
        raise DataError(f"{where}: a text has half of a surrogate pair, not a character")
    return row


def _is_broken(row: dict[str, Any]) -> bool:
    """Whether a text in a row cannot be written as UTF-8."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _cause(error: BaseException) -> str:
    """The first cause of an error, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def _load_datasets(source: str, split: str) -> Rows:
    from datasets import DatasetDict, load_dataset, load_from_disk

    path = Path(source)
    markers = ("state.json", "dataset_dict.json")  # what save_to_disk writes
    if path.is_dir() and any((path / marker).exists() for marker in markers):
        try:
            dataset = load_from_disk(source)
            if isinstance(dataset, DatasetDict) and split in dataset:
                dataset = dataset[split]
            rows = None if isinstance(dataset, DatasetDict) else dataset.to_list()
        except Exception as error:  # the library raises many kinds; the message carries the cause
            raise DataError(f"{source}: cannot be read: {_cause(error)}") from error
        if rows is None:
            raise DataError(f"{source}: no split {split!r}; it has {', '.join(dataset)}")
        return rows
    try:
        return load_dataset(source, split=split).to_list()
    except Exception as error:  # the library raises many kinds; the message carries the cause
        raise DataError(
            f"{source}: neither a .jsonl or .parquet file, nor a directory of save_to_disk, "
            f"nor a hub dataset that loads ({_cause(error)})"
        ) from error


def is_missing_path(name: str) -> bool:
    """Whether a name can only be a path, and there is nothing: no hub name has two slashes, ends
    with one, or begins with one, a dot or a tilde; and runs are written below `runs/`."""
    only_a_path = name.count("/") > 1 or name.endswith("/")
    only_a_path = only_a_path or name.startswith((".", "/", "~", "runs/"))
    return only_a_path and not Path(name).exists()


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(count) that depends on (seed, epoch) alone."""
    import torch  # rows are read before that

    # Seeds of neighbouring runs and epochs must not meet: 1_000_003 is a prime beyond any epoch.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator).tolist()


def visited(
    count: int, start: int, seed: int, key: Callable[[int], float] | None = None
) -> Iterator[int]:
    """The rows from position `start` of the endless sequence of epochs, shuffled passes over all.

    Args:
        key: epochs are sorted by it, least first; equal rows stay shuffled.
    """
    epoch, offset = divmod(start, count)
    while True:
        order = shuffled(count, seed, epoch)
        if key is not None:
            order.sort(key=key)
        yield from order[offset:]
        epoch += 1
        offset = 0


def visiting_order(count: int, start: int, size: int, seed: int) -> list[int]:
    """The next `size` of `visited`."""
    return list(itertools.islice(visited(count, start, seed), size))
