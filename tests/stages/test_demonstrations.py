"""Demonstrations: the tokens with a loss."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from stage_runs import ROWS

from fastppo.data.datasets import DataError
from fastppo.data.prompts import encode_prompts
from fastppo.stages.demonstrations import IGNORED, collate, encode_chat, encode_demonstrations

EOS = 1


UNMARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}w0 {{ m['content'] }} <eos> w39 "
    "{% else %}w1 {{ m['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w0 {% endif %}"
)


MARKED = UNMARKED.replace(
    "{{ m['content'] }} <eos>", "{% generation %}{{ m['content'] }} <eos>{% endgeneration %}", 1
)


def _tokenizer(template: str | None = None) -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def _turns(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def _encode(rows: list[dict], tokenizer: Any = None, max_length: int | None = None) -> list[dict]:
    return encode_demonstrations(rows, tokenizer or _tokenizer(), max_length).examples


def _texts(example: dict[str, list[int]]) -> tuple[str, str]:
    """(all tokens, those with a loss), decoded."""
    tokenizer = tiny.tokenizer()
    assert len(example["input_ids"]) == len(example["labels"])
    for token, label in zip(example["input_ids"], example["labels"], strict=True):
        assert label in (IGNORED, token)
    learned = [label for label in example["labels"] if label != IGNORED]
    return tokenizer.decode(example["input_ids"]), tokenizer.decode(learned)


def test_the_loss_is_on_the_completion_and_its_eos() -> None:
    (example,) = _encode([{"prompt": "w1 w2", "completion": " w7 w8"}])
    assert _texts(example) == ("w1 w2 w7 w8 <eos>", "w7 w8 <eos>")


def test_plain_text_has_the_loss_on_every_predicted_token() -> None:
    (example,) = _encode([{"text": "w1 w2 w3"}])
    assert _texts(example) == ("w1 w2 w3 <eos>", "w2 w3 <eos>")


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
def test_a_chat_has_the_loss_on_the_assistants_turns(template: str) -> None:
    """Not on the w39 of the template after each EOS."""
    row = {"messages": _turns("w10", "w11 w12", "w13", "w14")}
    (example,) = _encode([row], _tokenizer(template))
    assert _texts(example) == (
        "w1 w10 w0 w11 w12 <eos> w39 w1 w13 w0 w14 <eos> w39",
        "w11 w12 <eos> w14 <eos>",
    )


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize("completion", ["w14", [{"role": "assistant", "content": "w14"}]])
def test_after_a_prompt_of_messages_the_loss_is_on_the_completion(
    template: str, completion: Any
) -> None:
    """Not on the assistant's earlier turn. The prompt's ids equal those of PPO."""
    tokenizer = _tokenizer(template)
    row = {"prompt": _turns("w10", "w11", "w13"), "completion": completion}
    (example,) = _encode([row], tokenizer)
    assert _texts(example)[1] == "w14 <eos>"
    prompt = encode_prompts([row], tokenizer, max_prompt_tokens=64).token_ids[0]
    assert example["input_ids"][: len(prompt)] == prompt
    assert example["labels"][: len(prompt)] == [IGNORED] * len(prompt)


def test_a_template_that_rewrites_earlier_turns_needs_marks() -> None:
    """Some templates strip the reasoning of earlier turns."""
    rewriting = UNMARKED.replace("m['content'] }} <eos>", "m['content'] if loop.last }} <eos>")
    rows = [{"messages": _turns("w10", "w11")}, {"messages": _turns("w10", "w11", "w13", "w14")}]
    with pytest.raises(DataError, match=r"data, row 2: .*\{% generation %\}"):
        _encode(rows, _tokenizer(rewriting))
    marks = MARKED.replace("m['content'] }} <eos>", "m['content'] if loop.last }} <eos>")
    assert _texts(_encode(rows, _tokenizer(marks))[1])[1] == "<eos> w14 <eos>"


def test_an_eos_after_the_templates_mark_has_a_loss() -> None:
    """Without it the model would not learn to stop."""
    behind = MARKED.replace(" <eos>{% endgeneration %}", "{% endgeneration %} <eos>")
    assert behind != MARKED
    ids, labels = encode_chat(_turns("w10", "w11", "w13", "w14"), _tokenizer(behind), "here")
    assert _texts({"input_ids": ids, "labels": labels}) == (
        "w1 w10 w0 w11 <eos> w39 w1 w13 w0 w14 <eos> w39",
        "w11 w14 <eos>",
    )


def test_long_rows_are_cut_and_rows_without_a_loss_are_dropped() -> None:
    rows = [
        {"prompt": "w1", "completion": "w2"},
        {"prompt": "w1 w2", "completion": "w3 w4 w5"},
        {"prompt": "w1 w2 w3 w4 w5", "completion": "w6"},
    ]
    demonstrations = encode_demonstrations(rows, _tokenizer(), max_length=4)
    assert [_texts(example)[1] for example in demonstrations.examples] == ["w2 <eos>", "w3 w4"]
    assert (demonstrations.truncated, demonstrations.dropped) == (2, 1)
    assert demonstrations.prompts == ["w1", "w1 w2"]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"question": "w1"}, "question"),
        ({"prompt": "w1"}, "completion"),
        ({"prompt": "w1", "completion": 3}, "completion"),
        ({"prompt": " ", "completion": "w1"}, "prompt"),
        ({"text": ""}, "text"),
        ({"messages": "w1"}, "messages"),
        ({"messages": _turns("w1")}, "assistant"),
        ({"messages": _turns("w1", "w2")[1:]}, "assistant"),
        ({"prompt": _turns("w1"), "completion": _turns("w2")}, "completion"),
    ],
)
def test_an_unusable_row_is_named(row: dict[str, Any], column: str) -> None:
    with pytest.raises(DataError, match=f"data, row 2: .*{column}"):
        _encode([ROWS[0], row], _tokenizer(UNMARKED))


def test_a_tokenizer_without_eos_is_rejected() -> None:
    tokenizer = _tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="EOS"):
        _encode(ROWS, tokenizer)


def test_a_batch_is_padded_on_the_right_without_a_loss() -> None:
    examples = _encode([{"text": "w1 w2"}, {"prompt": "w1", "completion": ""}])
    batch = collate(examples, pad_token_id=EOS)
    assert batch["input_ids"].tolist() == [[4, 5, EOS], [4, EOS, EOS]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[IGNORED, 5, EOS], [IGNORED, EOS, IGNORED]]
