"""Texts and chats to token ids and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import AutoTokenizer

from fastppo.data.chat import (
    decode_completions,
    encode_prompt,
    is_chat,
    render_chat,
    token_ids,
    with_template_variables,
)
from fastppo.data.datasets import DataError

CHAT = [{"role": "user", "content": "w9"}]


def test_a_chat_is_a_list_of_messages_with_role_and_content() -> None:
    assert is_chat(CHAT)
    assert is_chat(tuple(CHAT))
    for value in ("w1", [], None, [{"role": "user"}], [*CHAT, "w1"]):
        assert not is_chat(value), value


def test_a_chat_needs_a_template_that_accepts_it() -> None:
    with pytest.raises(DataError, match=r"^here: .*chat template"):
        render_chat(tiny.tokenizer(), CHAT, "here")
    strict = tiny.tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"^here: .*roles must alternate"):
        render_chat(strict, CHAT, "here")


@pytest.mark.parametrize(
    ("prompt", "named"),
    [(" \n", "empty"), (None, "None"), ([*CHAT, {"role": "user"}], "{'role': 'user'}")],
)
def test_a_prompt_of_another_type_is_rejected(prompt, named: str) -> None:
    with pytest.raises(DataError, match=f"^row 7: .*{named}"):
        encode_prompt(prompt, tiny.tokenizer(chat=True), "row 7")


class _Ending:
    """A tokenizer that appends EOS to every text."""

    eos_token_id = 1

    def __call__(self, text, add_special_tokens=True):
        ids = tiny.tokenizer()(text)["input_ids"]
        return {"input_ids": [*ids, 1] if add_special_tokens else ids}


def test_an_appended_eos_is_removed_and_the_prompts_own_is_kept() -> None:
    assert encode_prompt("w1 w2", _Ending(), "row 1") == [4, 5]
    assert encode_prompt("w1 <eos>", tiny.tokenizer(), "row 1") == [4, 1]
    assert encode_prompt("w1 <eos>", _Ending(), "row 1") == [4, 1]


def test_token_ids_adds_no_special_tokens() -> None:
    assert token_ids(_Ending(), "w1 w2") == [4, 5]
    given = (4, 1, 1)
    assert token_ids(_Ending(), given) == [4, 1, 1]


def test_a_completion_keeps_the_space_after_its_prompt() -> None:
    prompts = [[3, 4], [4, 11]]
    actual = decode_completions(tiny.tokenizer(), prompts, [[5, 6, 1], [1]])
    assert actual == [" w2 w3", ""]
    assert "w0 w1" + actual[0] == tiny.tokenizer().decode([3, 4, 5, 6])


def test_a_response_that_changes_the_text_of_its_prompt_is_decoded_alone() -> None:
    """The bytes of one character are split between the two."""
    tokenizer = tiny.byte_tokenizer()
    first, second = tokenizer("é")["input_ids"]
    rest = tokenizer("!")["input_ids"]
    assert decode_completions(tokenizer, [[first]], [[second, *rest]]) == ["\ufffd!"]
    assert decode_completions(tokenizer, [[first, second]], [rest]) == ["!"]
    assert decode_completions(tokenizer, [], []) == []


THINKING = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}{{ style }}"
)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"enable_thinking": True}, "w1<think>"),
        ({"enable_thinking": False, "style": "short"}, "w1short"),
        ({"style": 'it\'s "so"\n'}, 'w1it\'s "so"\n'),
        ({"style": None}, "w1None"),
    ],
)
def test_variables_of_the_chat_template_become_defaults(
    variables: dict[str, Any], text: str, tmp_path: Path
) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = THINKING
    chosen = with_template_variables(tokenizer, variables)
    messages = [{"role": "user", "content": "w1"}]
    assert render_chat(chosen, messages, "here") == text
    assert tokenizer.chat_template == THINKING, "a copy has them"
    assert "<think>" in render_chat(chosen, messages, "here", enable_thinking=True)
    chosen.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert render_chat(loaded, messages, "here") == text


def test_variables_need_a_template_that_reads_them() -> None:
    with pytest.raises(ValueError, match="chat_template_kwargs"):
        with_template_variables(tiny.tokenizer(), {"enable_thinking": True})
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = THINKING
    with pytest.raises(ValueError, match="'thinking'"):
        with_template_variables(tokenizer, {"thinking": True})
