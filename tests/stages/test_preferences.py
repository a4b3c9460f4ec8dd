"""Preferences: formats of pairs and ranked lists."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tiny
import torch
from stage_runs import PAIRS

from fastppo.data.datasets import DataError
from fastppo.stages.preferences import (
    Comparison,
    collate,
    encode_comparisons,
)

CHAT = [{"role": "user", "content": "w1"}]


def _answer(content: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": content}]


def _encoded(row: dict[str, Any], **options: Any) -> Any:
    (one,) = encode_comparisons([row], tiny.tokenizer(chat=True), **options).examples
    return one


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": CHAT, "chosen": "w2", "rejected": "w3"},
        {"prompt": CHAT, "chosen": _answer("w2"), "rejected": _answer("w3")},
        {"prompt": "w1", "chosen": _answer("w2"), "rejected": _answer("w3")},
        {"chosen": CHAT + _answer("w2"), "rejected": CHAT + _answer("w3")},
        {"prompt": "w1", "chosen": CHAT + _answer("w2"), "rejected": CHAT + _answer("w3")},
        {"prompt": CHAT, "completions": ["w2", "w3"]},
        {"prompt": CHAT, "completions": ["w3", "w2"], "ranks": [2, 1]},
    ],
    ids=["strings", "messages", "string-prompt", "whole", "whole-and-prompt", "list", "ranks"],
)
def test_all_formats_of_a_chat_pair_give_the_same_pair(row: dict[str, Any]) -> None:
    one = _encoded(row)
    decode = tiny.tokenizer().decode
    texts = [(decode(one.texts[i]), decode(one.texts[j])) for i, j in one.pairs]
    assert texts == [("w1 w1 w2 w2", "w1 w1 w2 w3")]


def test_the_prompt_of_whole_conversations_is_their_shared_beginning() -> None:
    shared = CHAT + _answer("w5") + [{"role": "user", "content": "w6"}]
    row = {"chosen": shared + _answer("w2"), "rejected": shared + _answer("w3")}
    comparisons = encode_comparisons([row], tiny.tokenizer(chat=True))
    assert comparisons.prompts == [shared]


def test_rows_without_a_preference_are_dropped() -> None:
    rows = [
        {"prompt": "w1", "completions": [" w2", " w3"], "ranks": [1, 1]},
        {"prompt": "w1", "chosen": " w2", "rejected": " w2"},
        PAIRS[0],
    ]
    comparisons = encode_comparisons(rows, tiny.tokenizer())
    assert (len(comparisons.examples), comparisons.dropped) == (1, 2)
    with pytest.raises(DataError, match=r"data: .* 2 rows"):
        encode_comparisons(rows[:2], tiny.tokenizer())


def test_long_texts_are_cut_at_the_beginning() -> None:
    comparisons = encode_comparisons(
        [{"prompt": "w1 w2 w3", "chosen": " w4", "rejected": " w5 w6"}], tiny.tokenizer(), 4
    )
    assert comparisons.truncated == 1
    ids = [[tiny.VOCABULARY[w] for w in text.split()] for text in ("w1 w2 w3 w4", "w2 w3 w5 w6")]
    assert comparisons.examples[0].texts == ids


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "w1", "chosen": "w2"}, "rejected"),
        ({"chosen": " w2", "rejected": " w3"}, "prompt"),
        ({"prompt": "w1", "chosen": 2, "rejected": " w3"}, "completion"),
        ({"prompt": 1, "chosen": "w2", "rejected": " w3"}, "prompt"),
        ({"prompt": "w1", "completions": [" w2"]}, "completions"),
        ({"prompt": "w1", "completions": ["w2", "w3"], "ranks": [1]}, "ranks"),
        ({"prompt": "w1", "chosen": "w2", "rejected": "w3", "margin": math.inf}, "margin"),
        ({"prompt": "w1", "completions": ["w2", "w3", "w4"], "margin": 1.0}, "margin"),
        (
            {
                "chosen": [{"role": "user", "content": "w4"}, *_answer("w2")],
                "rejected": CHAT + _answer("w3"),
            },
            "conversations",
        ),
        ({"prompt": "w1", "chosen": "w2", "rejected": _answer("w3")}, "completions"),
        (
            {"prompt": "w1", "chosen": CHAT + _answer("w2"), "rejected": _answer("w3")},
            "conversations",
        ),
    ],
)
def test_an_unusable_row_is_named(row: dict[str, Any], column: str) -> None:
    with pytest.raises(DataError, match=f"data, row 2: .*{column}"):
        encode_comparisons([PAIRS[0], row], tiny.tokenizer(chat=True))


def test_a_batch_contains_each_text_once_with_the_pairs_of_its_prompt() -> None:
    examples = [
        Comparison([[4], [5, 6], [7]], [(0, 1), (0, 2), (1, 2)], 0.0),
        Comparison([[8, 9], [10]], [(1, 0)], 0.5),
    ]
    batch = collate(examples, pad_token_id=0)
    assert batch["input_ids"].tolist() == [[4, 0], [5, 6], [7, 0], [8, 9], [10, 0]]
    assert batch["attention_mask"].sum(1).tolist() == [1, 2, 1, 2, 1]
    assert batch["better"].tolist() == [0, 0, 1, 4]
    assert batch["worse"].tolist() == [1, 2, 2, 3]
    assert batch["margin"].tolist() == [0, 0, 0, 0.5]
    torch.testing.assert_close(batch["weight"], torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0]))
    assert batch["prompts"].item() == 2
