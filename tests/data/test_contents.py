"""Contents of messages as strings and as parts, for chat templates that show one form alone."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import tiny_vision

from fastppo.data.chat import encode_prompt, render_chat
from fastppo.data.datasets import DataError
from fastppo.data.prompts import encode_prompts
from fastppo.rewards.model import text_ids
from fastppo.stages.demonstrations import encode_chat

PARTS = {
    "first part": (
        "{% for m in messages %}{{ m['role'] }}"
        "{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
        "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %} <eos> {% endfor %}"
    ),
    "filter": (
        "{% for m in messages %}{{ m['role'] + ': ' }}"
        "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ part['text'] + ' ' }}{% endfor %}<eos> {% endfor %}"
    ),
    "rejects strings": (
        "{% for m in messages %}{{ m['role'] + ': ' }}"
        "{% for part in m['content'] %}{{ part['text'] + ' ' }}{% endfor %}<eos> {% endfor %}"
    ),
    "strings of the system": (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ 'system: ' + m['content'] }}"
        "{% else %}{{ m['role'] }}: {% for part in m['content'] %}{{ part['text'] }} {% endfor %}"
        "{% endif %} <eos> {% endfor %}"
    ),
    "generation marks": (
        "{% for m in messages %}{{ m['role'] }}: {% generation %}{% for part in m['content'] %}"
        "{{ part['text'] }} {% endfor %}<eos> {% endgeneration %}{% endfor %}"
    ),
}
"""Templates that iterate over parts, as those of SmolVLM and LLaVA."""

STRINGS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }} {% endfor %}"

QWEN = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' or 'image' in part %}<image> "
    "{% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endif %}{% endfor %}"
)

CHAT = [{"role": "system", "content": "w1 w2"}, {"role": "user", "content": "w9"}]
ANSWER = {"role": "assistant", "content": "w7"}


def _tokenizer(template: str) -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def _parts(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, **more}]


@pytest.mark.parametrize("template", PARTS.values(), ids=PARTS.keys())
def test_templates_of_parts_show_strings(template: str) -> None:
    tokenizer = _tokenizer(template)
    rendered = render_chat(tokenizer, CHAT, "here")
    assert rendered.split() == ["system:", "w1", "w2", "<eos>", "user:", "w9", "<eos>"]
    assert CHAT[1]["content"] == "w9", "records keep the messages as given"
    ids = encode_prompt(CHAT, tokenizer, "here")
    assert {4, 5, 12} <= set(ids), "w1, w2 and w9"


@pytest.mark.parametrize("template", PARTS.values(), ids=PARTS.keys())
def test_demonstrations_and_reward_models_show_strings(template: str) -> None:
    tokenizer = _tokenizer(template)
    _, labels = encode_chat([*CHAT, ANSWER], tokenizer, "here", 2)
    assert 10 in labels, "w7"
    assert {12, 10} <= set(text_ids(tokenizer, CHAT, "w7", "here"))


def test_templates_of_strings_show_parts() -> None:
    chat = [{"role": "user", "content": [*_parts("w1 "), *_parts("w2")]}]
    assert render_chat(_tokenizer(STRINGS), chat, "here") == "user: w1 w2 "
    image = [{"role": "user", "content": [{"type": "image"}, *_parts("w2")]}]
    with pytest.raises(DataError, match=r"^here: .*user"):
        render_chat(_tokenizer(STRINGS), image, "here")


def test_a_form_that_the_template_shows_is_kept() -> None:
    tokenizer = _tokenizer(QWEN)
    assert render_chat(tokenizer, CHAT, "here") == "w1 w2w9"
    parts = [{**message, "content": _parts(message["content"])} for message in CHAT]
    assert render_chat(tokenizer, parts, "here") == "w1 w2 w9 "


def test_a_template_that_ignores_a_role_is_refused() -> None:
    without = "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['content'] }}{% endif %}"
    tokenizer = _tokenizer(without + "{% endfor %}")
    assert render_chat(tokenizer, CHAT[1:], "here") == "w9"
    with pytest.raises(DataError, match=r"^here: .*system"):
        render_chat(tokenizer, CHAT, "here")


def test_a_turn_with_calls_may_lose_its_text() -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls %}CALL {% else %}{{ m['content'] }} {% endif %}"
        "{% endfor %}"
    )
    call = {"role": "assistant", "content": "w7", "tool_calls": [{"name": "add"}]}
    silent = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    rendered = render_chat(_tokenizer(template), [*CHAT, call, silent], "here")
    assert rendered == "w1 w2 w9 CALL CALL "


def test_parts_of_parquet_have_null_fields() -> None:
    """Qwen's templates take any part with a key `image` for an image."""
    text = _parts("w1", image=None)
    image = tiny_vision.image(9, 7)
    tokenizer = _tokenizer(QWEN)
    assert render_chat(tokenizer, [{"role": "user", "content": text}], "here") == "w1 "
    processor = tiny_vision.processor("idefics3")
    processor.tokenizer.chat_template = QWEN
    chat = [{"role": "user", "content": [{"type": "image", "image": image, "text": None}, *text]}]
    prompts = encode_prompts(
        [{"prompt": chat}], processor.tokenizer, max_prompt_tokens=60, processor=processor
    )
    clean = [{"type": "image"}, {"type": "text", "text": "w1"}]
    assert prompts.prompts == [[{"role": "user", "content": clean}]]
    assert render_chat(processor.tokenizer, prompts.prompts[0], "here") == "<image> w1 "


@pytest.mark.parametrize("kind", ["image", "image_url"])
def test_images_are_refused_where_text_alone_is_read(kind: str) -> None:
    chat = [{"role": "user", "content": [{"type": kind}, *_parts("w1")]}]
    with pytest.raises(DataError, match=r"^here: .*image"):
        encode_prompt(chat, _tokenizer(QWEN), "here")
