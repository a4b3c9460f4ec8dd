"""Convert text and chat messages to token ids and back.

A prompt is a string, or a list of messages with a role and a content. A completion is the text
after it, decoded without special tokens.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from fastppo.data.contents import Messages, refuse_images, shown_contents
from fastppo.data.datasets import DataError
from fastppo.functional.scalars import describe


def is_chat(value: Any) -> bool:
    """Return whether a value is a non-empty list of messages with a role and a content."""
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value
        )
    )


def text_of(content: Any) -> str:
    """Return the text of a message's content: a string, parts, or None."""
    if isinstance(content, (list, tuple)):
        return "".join(map(_text_of_part, content))
    return "" if content is None else str(content)


def _text_of_part(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    text = part.get("text")  # None in rows of Parquet whose part has another type
    return f"[{part.get('type')}]" if text is None else str(text)


def encodable(content: Any) -> Any:
    """Replace lone surrogates in a text, which a policy may write in JSON and tokenizers refuse."""
    return content.encode(errors="replace").decode() if isinstance(content, str) else content


def with_text(content: Any, text: str) -> Any:
    """Return a message's content with a text appended, as a part if it has parts."""
    if isinstance(content, (list, tuple)):
        return [*content, {"type": "text", "text": text}]
    return f"{text_of(content)}{text}"


def render_chat(tokenizer: Any, messages: Messages, where: str, **options: Any) -> str:
    """Apply the tokenizer's chat template.

    Args:
        where: the start of an error message.
        options: further keywords of `apply_chat_template`.

    Raises:
        DataError: there is no template, or it rejects the messages or ignores their contents.
    """
    shown = shown_messages(tokenizer, messages, where, **options)
    return _apply_template(tokenizer, shown, where, **options)


def shown_messages(
    tokenizer: Any, messages: Messages, where: str, **options: Any
) -> list[dict[str, Any]]:
    """Return messages with their contents in a form that the chat template shows, a string or
    parts; for arguments and errors see `render_chat`."""
    check_chat_template(tokenizer.chat_template is not None, where)
    return shown_contents(
        messages,
        tokenizer.get_chat_template(tools=options.get("tools")),
        lambda marked: _apply_template(tokenizer, marked, where, **options),
        where,
    )


def _apply_template(
    tokenizer: Any, messages: list[dict[str, Any]], where: str, **options: Any
) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
        # Templates raise TemplateError; contents of an unexpected type raise the other errors.
        raise DataError(f"{where}: the chat template rejects the messages: {error}") from error


def check_chat_template(has_template: bool, where: str) -> None:
    """Raise DataError for chat messages without a chat template."""
    if not has_template:
        raise DataError(
            f"{where}: chat messages, but the tokenizer has no chat template; use a chat model, or "
            "set tokenizer.chat_template and save the tokenizer with the model"
        )


def with_template_variables(tokenizer: Any, variables: Mapping[str, Any]) -> Any:
    """Return a copy of a tokenizer whose chat template has defaults for these variables.

    Callers of `apply_chat_template` can still override them. The saved tokenizer keeps the
    defaults, so that the policy is used as it was trained.

    Raises:
        ValueError: the template does not read a variable, or there is no single template.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise ValueError("chat_template_kwargs needs a tokenizer with one chat template")
    defaults = ""
    for name, value in variables.items():
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ValueError(f"chat_template_kwargs: the chat template does not read {name!r}")
        literal = "none" if value is None else json.dumps(value)
        defaults += (
            f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif %}}"
        )
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = defaults + template
    return tokenizer


def encode_prompt(prompt: Any, tokenizer: Any, where: str, **options: Any) -> list[int]:
    """Tokenize one prompt: a string, or messages followed by the generation prompt.

    Args:
        where: the start of an error message.
        options: further keywords of `apply_chat_template`.

    Raises:
        DataError: the prompt is empty or of another type, has images or no tokens, or is rejected
            by the chat template.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{where}: the prompt is empty")
        ids = list(tokenizer(prompt)["input_ids"])
        plain = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        eos = tokenizer.eos_token_id
        if _trailing(ids, eos) > _trailing(plain, eos):
            ids.pop()  # some tokenizers append EOS to every text
    elif is_chat(prompt):
        refuse_images(prompt, where)
        text = render_chat(tokenizer, prompt, where, add_generation_prompt=True, **options)
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    else:
        raise DataError(
            f"{where}: expected a prompt that is a string or a list of {{role, content}} messages, "
            f"got {describe(prompt)}"
        )
    if not ids:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        raise DataError(f"{where}: the tokenizer {name} returns no tokens for {describe(prompt)}")
    return ids


def _trailing(ids: Sequence[int], token: int | None) -> int:
    """Count the repetitions of a token at the end."""
    count = 0
    for last in reversed(ids):
        if last != token:
            break
        count += 1
    return count


def token_ids(tokenizer: Any, text: str | Sequence[int]) -> list[int]:
    """Tokenize a text in the middle of a sequence, without special tokens; ids are returned as
    they are."""
    if not isinstance(text, str):
        return list(text)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decode_completions(
    tokenizer: Any, prompt_ids: Sequence[list[int]], response_ids: Sequence[list[int]]
) -> list[str]:
    """Decode responses without special tokens.

    Each is decoded together with its prompt. Decoded alone, a response may lose the space before
    its first word, and prompt + completion would not be the generated text.
    """
    if not response_ids:
        return []  # batch_decode([]) returns [""]
    joined_ids = [[*p, *r] for p, r in zip(prompt_ids, response_ids, strict=True)]
    prompts = tokenizer.batch_decode(prompt_ids, skip_special_tokens=True)
    texts = tokenizer.batch_decode(joined_ids, skip_special_tokens=True)
    responses = tokenizer.batch_decode(response_ids, skip_special_tokens=True)
    return [
        text[len(prompt) :] if text.startswith(prompt) else response
        for prompt, text, response in zip(prompts, texts, responses, strict=True)
    ]
