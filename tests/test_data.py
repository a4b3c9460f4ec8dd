"""Prompts from every source, in an order that follows from the seed; bad rows by their number."""

from __future__ import annotations

import json

import pytest
import tiny
from datasets import Dataset, DatasetDict

from fastppo.data import DataError, Prompts, encode_prompts, load_rows, shuffled

ROWS = [{"prompt": "w1 w2", "answer": "w3"}, {"prompt": "w4", "answer": "w5"}]


def _write_jsonl(path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_every_source_gives_the_same_rows(tmp_path) -> None:
    jsonl = _write_jsonl(tmp_path / "rows.jsonl", *map(json.dumps, ROWS), "")
    Dataset.from_list(ROWS).to_parquet(str(tmp_path / "rows.parquet"))
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    for source in (jsonl, "rows.parquet", "saved", "splits"):
        assert load_rows(str(tmp_path / source)) == ROWS, source


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"prompt": "w1"}', '{"prompt": '], r"rows\.jsonl, line 2: not valid JSON"),
        (['{"prompt": "w1"}', "", '["w1"]'], r"rows\.jsonl, line 3: want an object .* got list"),
        ([""], "the dataset is empty"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path, lines, says) -> None:
    with pytest.raises(DataError, match=says):
        load_rows(_write_jsonl(tmp_path / "rows.jsonl", *lines))


def test_a_source_that_is_not_there_is_refused(tmp_path) -> None:
    for name in ("absent.jsonl", "absent.parquet"):
        with pytest.raises(DataError, match="no such file"):
            load_rows(str(tmp_path / name))
    with pytest.raises(DataError, match="there is no such file or directory"):
        load_rows(str(tmp_path / "absent"))
    (tmp_path / "rows.txt").write_text("w1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"want \.jsonl or \.parquet, got \.txt"):
        load_rows(str(tmp_path / "rows.txt"))
    with pytest.raises(DataError, match=r"neither a \.jsonl or \.parquet file"):
        load_rows(str(tmp_path / "empty"))
    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match="no split 'test'; it has train"):
        load_rows(str(tmp_path / "splits"), split="test")


def test_the_other_columns_stay_beside_their_prompts() -> None:
    prompts = encode_prompts(ROWS, tiny.tokenizer(), max_prompt_tokens=8)
    assert prompts.token_ids == [[4, 5], [7]]
    assert prompts.columns == {"answer": ["w3", "w5"]}
    assert prompts.select([1]).columns == {"answer": ["w5"]}


def test_chat_messages_are_rendered_with_the_chat_template() -> None:
    rows = [{"prompt": [{"role": "user", "content": "w9"}]}]
    prompts = encode_prompts(rows, tiny.tokenizer(chat=True), max_prompt_tokens=8)
    assert prompts.token_ids == [[4, 12, 3]]  # w1 w9 w0: the template's generation prompt last
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        encode_prompts(rows, tiny.tokenizer(), max_prompt_tokens=8)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": ""}, "row 2: the prompt is empty"),
        ({"prompt": 3}, "row 2: a prompt is a string or a list .* got int"),
        ({"text": "w1"}, "row 2: a prompt is a string or a list .* got NoneType"),
        ({"prompt": []}, "row 2: .* got an empty list"),
        ({"prompt": ["w1"]}, "row 2: .* got a list whose item 0 is str"),
        ({"prompt": [{"role": "user"}]}, "row 2: .* got a message 0 without content"),
        ({"prompt": "w1 " * 9}, "row 2: the prompt has 9 tokens; at most 8"),
    ],
)
def test_a_bad_row_is_refused_with_its_number(row, says) -> None:
    with pytest.raises(DataError, match=says):
        encode_prompts([{"prompt": "w1"}, row], tiny.tokenizer(), max_prompt_tokens=8)


def test_a_missing_column_names_those_that_are_there() -> None:
    with pytest.raises(DataError, match="no column 'question'; there are prompt, answer"):
        encode_prompts(ROWS, tiny.tokenizer(), column="question", max_prompt_tokens=8)


def test_columns_of_any_row_are_kept_and_reserved_names_refused() -> None:
    rows = [{"prompt": "w1"}, {"prompt": "w2", "answer": "w3"}]
    prompts = encode_prompts(rows, tiny.tokenizer(), max_prompt_tokens=8)
    assert prompts.columns == {"answer": [None, "w3"]}
    for name in ("prompts", "completions", "completion_ids"):
        with pytest.raises(DataError, match=f"may not be called '{name}'"):
            encode_prompts([{"prompt": "w1", name: 1}], tiny.tokenizer(), max_prompt_tokens=8)


def test_an_eos_that_the_tokenizer_appends_is_taken_off_the_prompt() -> None:
    class Ending:
        eos_token_id = 1

        def __call__(self, text, add_special_tokens=True):
            ids = tiny.tokenizer()(text)["input_ids"]
            return {"input_ids": [*ids, 1] if add_special_tokens else ids}

    prompts = encode_prompts([{"prompt": "w1 w2"}], Ending(), max_prompt_tokens=8)
    assert prompts.token_ids == [[4, 5]]


def test_a_position_in_the_epochs_is_a_number() -> None:
    """Any way of cutting the endless sequence into batches visits the same prompts."""
    prompts = Prompts([str(i) for i in range(7)], [[i] for i in range(7)])
    whole = prompts.at(0, 20, seed=3).prompts
    parts = [p for start in range(0, 20, 4) for p in prompts.at(start, 4, seed=3).prompts]
    assert whole == parts
    assert sorted(whole[:7]) == sorted(whole[7:14]) == [str(i) for i in range(7)]
    assert whole[:7] != whole[7:14]
    assert shuffled(50, 0, 0) != shuffled(50, 1, 0)
