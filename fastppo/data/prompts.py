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

RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")
"""Arguments of every reward, which no column may be named after."""


@dataclass(slots=True)
class Prompts:
    """Tokenized prompts with their columns."""

    prompts: list[Any]
    """Strings or lists of chat messages, as in the dataset."""
    token_ids: list[list[int]]
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)

    def fingerprint(self) -> str:
        """Fingerprint of the prompts, their tokens and all columns."""
        rows = zip(self.prompts, self.token_ids, *self.columns.values(), strict=True)
        return fingerprint.of_rows([list(self.columns), *map(list, rows)])

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
) -> Prompts:
    """Tokenize the prompt column.

    Args:
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
    token_ids = []
    for number, row in enumerate(rows, 1):
        ids = encode_prompt(row.get(column), tokenizer, f"{source}, row {number}")
        if len(ids) > max_prompt_tokens:
            raise DataError(
                f"{source}, row {number}: the prompt has {len(ids)} tokens; with max_new_tokens "
                f"the context has room for {max_prompt_tokens}"
            )
        token_ids.append(ids)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return Prompts([row[column] for row in rows], token_ids, columns)
