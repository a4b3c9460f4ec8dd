"""Prompts from JSONL, Parquet, a saved `datasets` directory or a hub name.

A dataset is a list of rows; one column holds the prompt, a string or a list of chat messages
(rendered with the tokenizer's chat template), and the other columns go to the rewards. Rows are
visited in a shuffled order that follows from the seed and the epoch alone, so a position is a
number and a run can go on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import torch

from fastppo import validation

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
                    f'{path}, line {number}: want an object like {{"prompt": …}}, '
                    f"got {type(row).__name__}"
                )
            rows.append(row)
    return rows


def _load_datasets(source: str, split: str) -> Rows:
    from datasets import DatasetDict, load_dataset, load_from_disk

    path = Path(source)
    if path.is_file():
        raise DataError(f"{source}: want .jsonl or .parquet, got {path.suffix or 'no suffix'}")
    if validation.absent_path(source):
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
    except Exception as error:  # the library raises many kinds; each is told on with its cause
        raise DataError(
            f"{source}: neither a .jsonl or .parquet file, nor a directory of save_to_disk, "
            f"nor a hub dataset that loads ({type(error).__name__}: {error})"
        ) from error


@dataclass(slots=True)
class Prompts:
    """Tokenised prompts with what the rewards see of them."""

    prompts: list[Any]
    """As in the dataset: strings, or lists of chat messages."""
    token_ids: list[list[int]]
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: Sequence[int]) -> Prompts:
        return Prompts(
            [self.prompts[i] for i in rows],
            [self.token_ids[i] for i in rows],
            {name: [column[i] for i in rows] for name, column in self.columns.items()},
        )

    def at(self, start: int, count: int, seed: int) -> Prompts:
        """`count` prompts from position `start` of the endless shuffled sequence of epochs."""
        rows: list[int] = []
        while len(rows) < count:
            epoch, offset = divmod(start + len(rows), len(self))
            order = shuffled(len(self), seed, epoch)
            rows += order[offset : offset + count - len(rows)]
        return self.select(rows)


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(count) that depends on (seed, epoch) alone."""
    # Seeds of neighbouring runs and epochs must not meet: 1_000_003 is a prime beyond any epoch.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator).tolist()


def encode_prompts(
    rows: Rows,
    tokenizer: Any,
    *,
    column: str = "prompt",
    max_prompt_tokens: int,
    source: str = "prompts",
) -> Prompts:
    """Tokenises the prompt column.

    Args:
        max_prompt_tokens: longest prompt that leaves the context room for a response, tokens.

    Raises:
        DataError: a row without the column, an empty prompt, one of another type, or one that is
            too long, each with the row's number.
    """
    if column not in rows[0]:
        raise DataError(f"{source}: no column {column!r}; there are {', '.join(rows[0])}")
    prompts = Prompts([], [])
    names = [name for name in dict.fromkeys(key for row in rows for key in row) if name != column]
    for reserved in ("prompts", "completions", "completion_ids"):
        if reserved in names:
            raise DataError(f"{source}: a column may not be called {reserved!r}: rewards get it")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for number, row in enumerate(rows, 1):
        prompt = row.get(column)
        ids = encode_prompt(prompt, tokenizer, f"{source}, row {number}")
        if len(ids) > max_prompt_tokens:
            raise DataError(
                f"{source}, row {number}: the prompt has {len(ids)} tokens; at most "
                f"{max_prompt_tokens} leave the context room for max_new_tokens"
            )
        prompts.prompts.append(prompt)
        prompts.token_ids.append(ids)
        for name in names:
            columns[name].append(row.get(name))
    prompts.columns = columns
    return prompts


def encode_prompt(prompt: Any, tokenizer: Any, where: str) -> list[int]:
    """Ids of one prompt, to be continued: a string, or messages with the generation prompt.

    Raises:
        DataError: it is empty, of another type, or the chat template has no place for it; `where`
            opens the sentence.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{where}: the prompt is empty")
        ids = list(tokenizer(prompt)["input_ids"])
        plain = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if ids[-1:] == [tokenizer.eos_token_id] != plain[-1:]:
            ids.pop()  # some tokenizers end every text; a prompt is to be continued
    elif is_chat(prompt):
        if tokenizer.chat_template is None:
            raise DataError(f"{where}: chat messages, but the tokenizer has no chat template")
        try:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise DataError(f"{where}: the chat template refuses it: {error}") from error
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        raise DataError(
            f"{where}: a prompt is a string or a list of {{role, content}} messages, "
            f"got {_what(prompt)}"
        )
    if not ids:
        raise DataError(f"{where}: the prompt is empty")
    return list(ids)


def decode_completions(
    tokenizer: Any, prompt_ids: Sequence[list[int]], response_ids: Sequence[list[int]]
) -> list[str]:
    """The responses as texts without special tokens: what stands behind the prompt's text.

    Decoded together with their prompts, because a response decoded alone loses the space before
    its first word, and then prompt + completion is not the text that was written.
    """
    both = [[*p, *r] for p, r in zip(prompt_ids, response_ids, strict=True)]
    alone, heads, wholes = (
        tokenizer.batch_decode(ids, skip_special_tokens=True)
        for ids in (response_ids, prompt_ids, both)
    )
    return [
        whole[len(head) :] if whole.startswith(head) else response
        for response, head, whole in zip(alone, heads, wholes, strict=True)
    ]


def _what(value: Any) -> str:
    """What a value is that is neither a string nor a chat, for a message."""
    if not isinstance(value, (list, tuple)):
        return type(value).__name__
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            return f"a list whose item {i} is {type(message).__name__}"
        lacking = [key for key in ("role", "content") if key not in message]
        if lacking:
            return f"a message {i} without {' and '.join(lacking)}"
    return "an empty list"


def is_chat(value: Any) -> bool:
    """A non-empty list of messages with a role and a content."""
    return (
        isinstance(value, Iterable)
        and not isinstance(value, (str, dict))
        and len(list(value)) > 0
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    )
