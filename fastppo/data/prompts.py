"""Tokenised prompts, and the other columns of their rows, which the rewards see.

One column of a dataset holds the prompt, a string or a list of chat messages (rendered with the
tokenizer's chat template); the others go to the rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastppo.data import fingerprint
from fastppo.data.chat import check_prompt, encode_prompt
from fastppo.data.rows import DataError, Rows, check_prompt_column, column_names

RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")
"""Names under which rewards get something else than a column."""


@dataclass(slots=True)
class Prompts:
    """Tokenised prompts with what the rewards see of them."""

    prompts: list[Any]
    """As in the dataset: strings, or lists of chat messages."""
    token_ids: list[list[int]]
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)

    def fingerprint(self) -> str:
        """Fingerprint of the prompts, their tokens and every column."""
        rows = zip(self.prompts, self.token_ids, *self.columns.values(), strict=True)
        return fingerprint.of_rows([list(self.columns), *map(list, rows)])

    def select(self, rows: Sequence[int]) -> Prompts:
        return Prompts(
            [self.prompts[i] for i in rows],
            [self.token_ids[i] for i in rows],
            {name: [column[i] for i in rows] for name, column in self.columns.items()},
        )


def check_prompts(rows: Rows, column: str, source: str) -> None:
    """Checks rows as far as no tokenizer is needed.

    Raises:
        DataError: a row without the column, an empty prompt or one of another type, with the row's
            number; a column with a name that rewards have for something else.
    """
    check_columns(rows, column, source)
    for number, row in enumerate(rows, 1):
        check_prompt(row.get(column), f"{source}, row {number}")


def check_columns(rows: Rows, column: str, source: str) -> list[str]:
    """The columns besides the prompt's.

    Raises:
        DataError: the first row has no prompt; a column has a name that rewards have for something
            else.
    """
    check_prompt_column(rows[0], column, source)
    names = column_names(rows, column)
    for reserved in RESERVED_COLUMNS:
        if reserved in names:
            raise DataError(
                f"{source}: no column may be called {reserved!r}, an argument that every reward has"
            )
    return names


def check_length(count: int, room: int, where: str) -> None:
    """Raises DataError for a prompt of more tokens than there is room for."""
    if count > room:
        raise DataError(
            f"{where}: the prompt has {count} tokens; with max_new_tokens beside it the context "
            f"has room for {room}"
        )


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
    prompts = Prompts([], [])
    names = check_columns(rows, column, source)
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for number, row in enumerate(rows, 1):
        prompt = row.get(column)
        ids = encode_prompt(prompt, tokenizer, f"{source}, row {number}")
        check_length(len(ids), max_prompt_tokens, f"{source}, row {number}")
        prompts.prompts.append(prompt)
        prompts.token_ids.append(ids)
        for name in names:
            columns[name].append(row.get(name))
    prompts.columns = columns
    return prompts
