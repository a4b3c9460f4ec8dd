"""Rows: sources, errors, and the shuffled order."""

from __future__ import annotations

import json

import pytest

from fastppo.data.datasets import (
    DataError,
    NoSuchDataError,
    is_missing_path,
    load_rows,
    shuffled,
    visiting_order,
    write_rows,
)

ROWS = [{"prompt": "w1 w2", "answer": "w3"}, {"prompt": "w4", "answer": "w5"}]


def _write_jsonl(path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_all_sources_give_the_same_rows(tmp_path) -> None:
    jsonl = _write_jsonl(tmp_path / "rows.jsonl", *map(json.dumps, ROWS), "")
    from datasets import Dataset, DatasetDict

    Dataset.from_list(ROWS).to_parquet(str(tmp_path / "rows.parquet"))
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    for source in (jsonl, "rows.parquet", "saved", "splits"):
        assert load_rows(str(tmp_path / source)) == ROWS, source


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (['{"prompt": "w1"}', '{"prompt": '], r"rows\.jsonl, line 2: "),
        (['{"prompt": "w1"}', "", '["w1"]'], r"rows\.jsonl, line 3: .*list"),
        ([""], r"rows\.jsonl: .*empty"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, lines, named) -> None:
    with pytest.raises(DataError, match=named):
        load_rows(_write_jsonl(tmp_path / "rows.jsonl", *lines))


def test_a_missing_or_unknown_source_is_named(tmp_path) -> None:
    for name in ("absent.jsonl", "absent.parquet"):
        with pytest.raises(NoSuchDataError, match=name):
            load_rows(str(tmp_path / name))
    with pytest.raises(DataError, match="absent"):
        load_rows(str(tmp_path / "absent"))
    (tmp_path / "rows.txt").write_text("w1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"\.txt"):
        load_rows(str(tmp_path / "rows.txt"))
    with pytest.raises(DataError, match="/empty"):
        load_rows(str(tmp_path / "empty"))
    from datasets import Dataset, DatasetDict

    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match=r"'test'.* train"):
        load_rows(str(tmp_path / "splits"), split="test")


def test_paths_and_hub_names_are_told_apart(tmp_path) -> None:
    for path in ("runs/sft/policy", "./sft", "../sft", "/sft", "~/sft"):
        assert is_missing_path(path), path
    for other in ("org/model", "model", str(tmp_path)):
        assert not is_missing_path(other), other


def test_the_visiting_order_is_a_sequence_of_epochs() -> None:
    epochs = [row for epoch in range(4) for row in shuffled(7, 5, epoch)]
    for start, size in ((0, 7), (0, 20), (5, 3), (6, 9), (13, 1), (3, 0)):
        assert visiting_order(7, start, size, seed=5) == epochs[start : start + size]


def test_written_rows_are_read_back(tmp_path) -> None:
    rows = [{"prompt": "zwölf\nZeilen"}, {"prompt": [{"role": "user", "content": "“1”"}]}]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert load_rows(str(tmp_path / "rows.jsonl")) == rows
    assert "zwölf" in (tmp_path / "rows.jsonl").read_text("utf-8")
