"""Tokenized prompts and the other columns of their rows.

One column of a dataset holds the prompt: a string, or a list of chat messages rendered by the
tokenizer's chat template. The other columns are passed to the rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastppo.data import fingerprint
from fastppo.data.chat import encode_prompt
from fastppo.data.datasets import DataError, Rows, column_names
from fastppo.data.images import ImagePrompt, encode_image_prompt

RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")
"""Arguments of every reward, which no column may be named after."""


@dataclass(slots=True)
class Prompts:
    """Tokenized prompts with their columns."""

    prompts: list[Any]
    """Strings or lists of chat messages, as in the dataset."""
    token_ids: list[list[int]]
    """Token ids of each prompt; an `ImagePrompt` has its images, too."""
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)

    def fingerprint(self) -> str:
        """Fingerprint of the prompts, their tokens and all columns."""
        rows = zip(self.prompts, self.token_ids, *self.columns.values(), strict=True)
        digests = [ids.images.digest for ids in self.token_ids if isinstance(ids, ImagePrompt)]
        return fingerprint.of_rows([list(self.columns), *map(list, rows), *digests])

    def record(self, row: int) -> dict[str, Any]:
        """Return the prompt of a log record, with thumbnails of its images if it has any."""
        ids = self.token_ids[row]
        thumbnails = ids.images.thumbnails() if isinstance(ids, ImagePrompt) else []
        images = {"images": thumbnails} if thumbnails else {}
        return {"prompt": self.prompts[row], **images}

    def select(self, rows: Sequence[int]) -> Prompts:
        return Prompts(
            [self.prompts[i] for i in rows],
            [self.token_ids[i] for i in rows],
            {name: [column[i] for i in rows] for name, column in self.columns.items()},
        )

    @classmethod
    def joined(cls, parts: Sequence[Prompts]) -> Prompts:
        """Concatenate prompts with the same columns."""
        return cls(
            [prompt for part in parts for prompt in part.prompts],
            [ids for part in parts for ids in part.token_ids],
            {
                name: [value for part in parts for value in part.columns[name]]
                for name in parts[0].columns
            },
        )


def encode_prompts(
    rows: Rows,
    tokenizer: Any,
    *,
    column: str = "prompt",
    max_prompt_tokens: int,
    source: str = "prompts",
    processor: Any = None,
) -> Prompts:
    """Tokenize the prompt column.

    Args:
        processor: processor of a vision-language model, for rows with images.
        max_prompt_tokens: the model's context minus the longest response, in tokens.

    Raises:
        DataError: a prompt is missing, empty, of another type or too long; a column has a reserved
            name.
    """
    if column not in rows[0]:
        there = ", ".join(rows[0]) or "none"
        raise DataError(f"{source}: no column {column!r}; there are {there}")
    names = column_names(rows, column)
    for reserved in RESERVED_COLUMNS:
        if reserved in names:
            raise DataError(
                f"{source}: rename the column {reserved!r}; it is an argument of every reward"
            )
    prompts = [row.get(column) for row in rows]
    token_ids = []
    for number, row in enumerate(rows, 1):
        where = f"{source}, row {number}"
        if processor is None:
            ids = encode_prompt(row.get(column), tokenizer, where)
        else:
            prompts[number - 1], ids = encode_image_prompt(row, processor, column, where)
        if len(ids) > max_prompt_tokens:
            raise DataError(
                f"{source}, row {number}: the prompt has {len(ids)} tokens; with max_new_tokens "
                f"the context has room for {max_prompt_tokens}"
            )
        token_ids.append(ids)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return Prompts(prompts, token_ids, columns)
