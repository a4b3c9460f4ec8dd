"""What a chat template writes between two turns of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastppo.data.chat import render_chat
from fastppo.data.datasets import DataError

PLACEHOLDER = "assistantturn"
"""Assistant message that marks its place in a rendered chat."""


def text_between(
    tokenizer: Any,
    chat: Sequence[dict[str, Any]],
    messages: Sequence[dict[str, Any]],
    where: str,
    *,
    stop: str = "",
    renders_calls: bool = False,
    **options: Any,
) -> str:
    """Return the text between a turn and the next one.

    Args:
        chat: messages up to the turn, which is the last one.
        messages: that follow the turn.
        where: the start of an error message.
        stop: the stop token at the end of the turn; it is not repeated.
        renders_calls: whether a turn with calls is rendered as it is. Otherwise a text takes its
            place, which most templates accept.
        options: further keywords of `apply_chat_template`.

    Raises:
        DataError: the template rejects the chat, or writes the turn in another way once messages
            follow it.
    """
    *before, turn = chat
    if renders_calls and turn.get("tool_calls"):
        ended = render_chat(tokenizer, chat, where, **options)
        whole = render_chat(
            tokenizer, [*chat, *messages], where, add_generation_prompt=True, **options
        )
        if not whole.startswith(ended):
            raise DataError(f"{where}: the chat template rewrites a turn with calls after answers")
        return _after(stop, ended) + whole.removeprefix(ended)
    mark = PLACEHOLDER
    while mark in str(messages):
        mark += PLACEHOLDER[-1]
    marked = [*before, {"role": "assistant", "content": mark}, *messages]
    rendered = render_chat(tokenizer, marked, where, add_generation_prompt=True, **options)
    _, found, text = rendered.rpartition(mark)
    if not found:
        raise DataError(f"{where}: the chat template ignores an assistant's message")
    if stop and text.lstrip().startswith(stop):
        text = text.lstrip().removeprefix(stop)
    return text


def _after(stop: str, ended: str) -> str:
    """Return the white space after the stop token at the end of a rendered turn."""
    if not stop or not ended.rstrip().endswith(stop):
        return ""
    return ended[ended.rindex(stop) + len(stop) :]
