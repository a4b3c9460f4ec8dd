"""Text and chat messages to token ids and back, as the tokenizer and its chat template write them.

A prompt is a string, or a list of messages with a role and a content; a completion is what comes
after it, decoded without special tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jinja2

from fastppo.data.rows import DataError
from fastppo.functional.scalars import describe


def is_chat(value: Any) -> bool:
    """A non-empty list of messages with a role and a content."""
    return (
        isinstance(value, Iterable)
        and not isinstance(value, (str, dict))
        and len(list(value)) > 0
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value
        )
    )


def render_chat(tokenizer: Any, messages: list[dict[str, Any]], where: str, **options: Any) -> str:
    """The conversation as the tokenizer's chat template writes it.

    Raises:
        DataError: there is no template, or it refuses the messages; `where` opens the sentence.
    """
    check_chat_template(tokenizer.chat_template is not None, where)
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
        # The first is the template's own; the others come of contents that it does not expect.
        raise DataError(f"{where}: the chat template refuses it: {error}") from error


def check_chat_template(is_there: bool, where: str) -> None:
    """Raises DataError for chat messages whose tokenizer has no chat template."""
    if not is_there:
        raise DataError(f"{where}: chat messages, but the tokenizer has no chat template")


def check_prompt(prompt: Any, where: str) -> None:
    """Raises DataError for a prompt that is empty, or neither a text nor messages."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{where}: the prompt is empty")
        check_text(prompt, where)
    elif not is_chat(prompt):
        raise DataError(
            f"{where}: expected a prompt that is a string or a list of {{role, content}} messages, "
            f"got {_description(prompt)}"
        )


def encode_prompt(prompt: Any, tokenizer: Any, where: str, **options: Any) -> list[int]:
    """Ids of one prompt, to be continued: a string, or messages with the generation prompt.

    Args:
        where: opens the sentence of an error.
        options: of the chat template.

    Raises:
        DataError: it is empty or of another type, the tokenizer makes no tokens of it, or the chat
            template has no place for it.
    """
    check_prompt(prompt, where)
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt)["input_ids"])
        plain = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if _ends(ids, tokenizer.eos_token_id) > _ends(plain, tokenizer.eos_token_id):
            ids.pop()  # some tokenizers end every text; a prompt is to be continued
    else:
        text = render_chat(tokenizer, prompt, where, add_generation_prompt=True, **options)
        check_text(text, where)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        raise DataError(f"{where}: the tokenizer {name} makes no tokens of {describe(prompt)}")
    return list(ids)


def _ends(ids: Sequence[int], token: int | None) -> int:
    """How often a token is repeated at the end."""
    count = 0
    for last in reversed(ids):
        if last != token:
            break
        count += 1
    return count


def check_text(text: str, where: str) -> None:
    """Raises DataError for a text that no tokenizer takes: one with half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start + 1} is half of a surrogate pair, not a character"
        ) from None


def token_ids(tokenizer: Any, text: str | Sequence[int]) -> list[int]:
    """Ids of a text in the middle of a sequence, without special tokens; ids are returned as they
    are."""
    if isinstance(text, str):
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(text)


def decode_completions(
    tokenizer: Any, prompt_ids: Sequence[list[int]], response_ids: Sequence[list[int]]
) -> list[str]:
    """The responses as texts without special tokens: what comes after the prompt's text.

    Decoded together with their prompts, because a response decoded alone loses the space before
    its first word, and then prompt + completion is not the text that was written.
    """
    if not response_ids:
        return []  # transformers decodes nothing to one empty text
    joined_ids = [[*p, *r] for p, r in zip(prompt_ids, response_ids, strict=True)]
    prompts = tokenizer.batch_decode(prompt_ids, skip_special_tokens=True)
    texts = tokenizer.batch_decode(joined_ids, skip_special_tokens=True)
    responses = tokenizer.batch_decode(response_ids, skip_special_tokens=True)
    return [
        text[len(prompt) :] if text.startswith(prompt) else response
        for prompt, text, response in zip(prompts, texts, responses, strict=True)
    ]


def _description(value: Any) -> str:
    """A value that is neither a string nor a chat, described for an error message."""
    if not isinstance(value, (list, tuple)):
        return type(value).__name__
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            return f"a list whose item {i} is {type(message).__name__}"
        lacking = [key for key in ("role", "content") if key not in message]
        if lacking:
            return f"a message {i} without {' and '.join(lacking)}"
        if not isinstance(message["role"], str):
            return f"a message {i} whose role is {type(message['role']).__name__}"
    return "an empty list"
