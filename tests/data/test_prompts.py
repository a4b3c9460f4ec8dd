"""Tokenized prompts with their columns; errors name the row."""

from __future__ import annotations

import pytest
import tiny
from tokenizers import normalizers

from fastppo.data.datasets import DataError
from fastppo.data.prompts import encode_prompts

ROWS = [{"prompt": "w1 w2", "answer": "w3"}, {"prompt": "w4", "answer": "w5"}]


def test_columns_stay_with_their_prompts() -> None:
    prompts = encode_prompts(ROWS, tiny.tokenizer(), max_prompt_tokens=8)
    assert prompts.token_ids == [[4, 5], [7]]
    assert prompts.columns == {"answer": ["w3", "w5"]}
    some = prompts.select([1, 0, 1])
    assert (some.prompts, some.token_ids) == (["w4", "w1 w2", "w4"], [[7], [4, 5], [7]])
    assert some.columns == {"answer": ["w5", "w3", "w5"]}


@pytest.mark.parametrize(
    ("row", "named"),
    [({"text": "w1"}, "row 2: .*None"), ({"prompt": "w1 " * 9}, "row 2: .* 9 tokens.* 8")],
)
def test_an_unusable_row_is_named(row, named) -> None:
    with pytest.raises(DataError, match=named):
        encode_prompts([{"prompt": "w1"}, row], tiny.tokenizer(), max_prompt_tokens=8)


def test_a_prompt_without_tokens_is_named_with_its_tokenizer() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("☃", "")
    tokenizer.name_or_path = "my-model"
    rows = [{"prompt": "w1"}, {"prompt": "☃"}]
    with pytest.raises(DataError, match=r"p\.jsonl, row 2: .*my-model .*'☃'"):
        encode_prompts(rows, tokenizer, max_prompt_tokens=8, source="p.jsonl")


def test_a_missing_column_is_reported_with_the_existing_ones() -> None:
    with pytest.raises(DataError, match=r"'question'.* prompt, answer"):
        encode_prompts(ROWS, tiny.tokenizer(), column="question", max_prompt_tokens=8)


def test_columns_of_all_rows_are_kept_and_reserved_names_rejected() -> None:
    rows = [{"prompt": "w1"}, {"prompt": "w2", "answer": "w3"}]
    prompts = encode_prompts(rows, tiny.tokenizer(), max_prompt_tokens=8)
    assert prompts.columns == {"answer": [None, "w3"]}
    for name in ("prompts", "completions", "completion_ids"):
        with pytest.raises(DataError, match=f"'{name}'"):
            encode_prompts([{"prompt": "w1", name: 1}], tiny.tokenizer(), max_prompt_tokens=8)
