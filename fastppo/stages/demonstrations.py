"""Demonstrations as token ids and labels.

A row has one of three forms, chosen by its columns (the first match):

    {messages}              a chat; the loss is on the assistant's turns
    {prompt, completion}    strings, or chat messages as the prompt and a string or messages as the
                            completion; the loss is on the completion
    {text}                  plain text; the loss is on all tokens

Every row ends with EOS, which has a loss, so the model learns to stop. The assistant's turns are
marked with `{% generation %}` in the chat template. Without marks, turn i is the difference between
the rendering of i + 1 messages and that of i messages with the generation prompt, up to its EOS.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor
from transformers.utils.chat_template_utils import render_jinja_template

from fastppo.data.chat import encode_prompt, is_chat, render_chat, shown_messages
from fastppo.data.datasets import DataError, Rows
from fastppo.data.padding import pad, padded_batch
from fastppo.functional.scalars import describe
from fastppo.stages.data import Encoded

IGNORED = -100
"""Label of positions without a loss, as in transformers."""

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_demonstrations(
    rows: Rows, tokenizer: Any, max_length: int | None = None, source: str = "data"
) -> Encoded:
    """Tokenize rows to examples {input_ids, labels}, two lists of equal length.

    Args:
        max_length: tokens; longer rows are cut at the end. A row without a loss within this length
            is dropped.

    Raises:
        DataError: a row has an unknown form or an empty part, the chat template rejects its
            messages or hides the assistant's turns, or all rows are dropped.
        ValueError: the tokenizer has no EOS token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS token to end rows with")
    encoded = Encoded()
    for number, row in enumerate(rows, 1):
        prompt, ids, labels = _encode_row(row, tokenizer, f"{source}, row {number}")
        labels[0] = IGNORED  # no token predicts the first one
        if max_length is not None and len(ids) > max_length:
            encoded.truncated += 1
            ids = ids[:max_length]
            labels = labels[:max_length]
        if all(label == IGNORED for label in labels):
            encoded.dropped += 1
            continue
        encoded.examples.append({"input_ids": ids, "labels": labels})
        encoded.prompts.append(prompt)
    if not encoded.examples:
        raise DataError(
            f"{source}: none of {len(rows)} rows has a token with a loss within "
            f"max_length={max_length}"
        )
    return encoded


def _encode_row(row: dict[str, Any], tokenizer: Any, where: str) -> tuple[Any, list[int], list]:
    """Return (prompt, ids, labels)."""
    if row.get("messages") is not None:
        messages = row["messages"]
        if not is_chat(messages):
            raise DataError(f"{where}: messages must be a list of {{role, content}}")
        roles = [message["role"] for message in messages]
        if "assistant" not in roles:
            raise DataError(f"{where}: expected a turn of the assistant, got {', '.join(roles)}")
        before = messages[: roles.index("assistant")]
        return before, *encode_chat(list(messages), tokenizer, where)
    if row.get("prompt") is not None and row.get("completion") is not None:
        prompt = row["prompt"]
        completion = row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt, *_encode_strings(prompt, completion, tokenizer, where)
        if not is_chat(prompt):
            raise DataError(
                f"{where}: expected a string prompt with a string completion, or a prompt of "
                f"{{role, content}} messages, got {type(prompt).__name__} and "
                f"{type(completion).__name__}"
            )
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if not is_chat(completion) or completion[0]["role"] != "assistant":
            raise DataError(
                f"{where}: a completion must be a string or messages starting with the assistant's"
            )
        ids, labels = encode_chat([*prompt, *completion], tokenizer, where, len(prompt))
        return prompt, ids, labels
    if row.get("text") is not None:
        if not isinstance(row["text"], str) or not row["text"].strip():
            raise DataError(
                f"{where}: text must be a non-empty string, got {describe(row['text'])}"
            )
        ids = list(tokenizer(row["text"])["input_ids"])
        if ids[-1:] != [tokenizer.eos_token_id]:
            ids.append(tokenizer.eos_token_id)
        return row["text"], ids, list(ids)
    raise DataError(
        f"{where}: expected messages, prompt and completion, or text, "
        f"got {', '.join(row) or 'nothing'}"
    )


def _encode_strings(
    prompt: str, completion: str, tokenizer: Any, where: str
) -> tuple[list[int], list[int]]:
    """Tokenize the two separately: in PPO response ids are appended to prompt ids."""
    head = encode_prompt(prompt, tokenizer, where)
    tail = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    if tail[-1:] != [tokenizer.eos_token_id]:
        tail.append(tokenizer.eos_token_id)
    return head + tail, [IGNORED] * len(head) + tail


def encode_chat(
    messages: list[dict[str, Any]], tokenizer: Any, where: str, first: int = 0
) -> tuple[list[int], list[int]]:
    """Return (ids, labels) of a conversation, with labels on the assistant's turns from message
    `first` on.

    The conversation is tokenized as one text, like a chat prompt in PPO. A token belongs to a turn
    if its last character does.

    Raises:
        DataError: there is no chat template, it rejects the messages, or its rendering hides where
            a turn starts.
    """
    messages = shown_messages(tokenizer, messages, where)
    text = render_chat(tokenizer, messages, where)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = list(encoded["input_ids"])
    ends = [end if end > start else -1 for start, end in encoded["offset_mapping"]]
    if GENERATION_MARK.search(tokenizer.get_chat_template()):
        spans = _marked_spans(text, messages, tokenizer, where=where, first=first)
    else:
        spans = _unmarked_spans(text, messages, tokenizer, where=where, first=first)
    has_loss = [any(start < end <= stop for start, stop in spans) for end in ends]
    if not any(has_loss):
        raise DataError(f"{where}: the chat template renders no token of the assistant")
    labels = [token if loss else IGNORED for token, loss in zip(ids, has_loss, strict=True)]
    last = max(i for i, loss in enumerate(has_loss) if loss)
    eos = tokenizer.eos_token_id
    if messages[-1]["role"] == "assistant" and ids[last] != eos:
        if eos in ids[last:]:  # after the template's mark
            labels[ids.index(eos, last)] = eos
        else:
            ids.append(eos)
            labels.append(eos)
    return ids, labels


def _marked_spans(
    text: str, messages: list[dict[str, Any]], tokenizer: Any, *, where: str, first: int
) -> list[tuple[int, int]]:
    """Return (start, stop), in characters, of the template's generation marks.

    The assistant mask of `apply_chat_template` ends early at a turn starting with white space, so
    the character spans are used instead.
    """
    head = render_chat(tokenizer, messages[:first], where) if first else ""
    if not text.startswith(head):
        raise _inconsistent(where, first)
    rendered: Any = render_jinja_template(
        conversations=[[{k: v for k, v in m.items() if v is not None} for m in messages]],
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    _, (spans,) = rendered
    return [(start, stop) for start, stop in spans if start >= len(head)]


def _unmarked_spans(
    text: str, messages: list[dict[str, Any]], tokenizer: Any, *, where: str, first: int
) -> list[tuple[int, int]]:
    """Return (start, stop), in characters, of each turn of the assistant, including its EOS."""
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < first:
            continue
        if i == 0:
            raise DataError(
                f"{where}: a chat starting with the assistant needs a chat template with "
                "{% generation %} marks"
            )
        before = render_chat(tokenizer, messages[:i], where, add_generation_prompt=True)
        after = render_chat(tokenizer, messages[: i + 1], where)
        if not (after.startswith(before) and text.startswith(after)):
            raise _inconsistent(where, i)
        eos = text.rfind(tokenizer.eos_token, len(before), len(after))
        stop = len(after) if eos < 0 else eos + len(tokenizer.eos_token)
        spans.append((len(before), stop))
    return spans


def _inconsistent(where: str, message: int) -> DataError:
    return DataError(
        f"{where}: the chat template renders the first {message} messages differently within the "
        "longer conversation, so the start of the assistant's turn is unknown; mark it in the "
        "template with {% generation %}, or give each turn as a row of prompt and completion"
    )


def collate(examples: list[dict[str, list[int]]], pad_token_id: int) -> dict[str, Tensor]:
    """Return right-padded `input_ids`, `attention_mask` and `labels`, [B, S] int64."""
    batch = padded_batch([example["input_ids"] for example in examples], pad_token_id)
    return {**batch, "labels": pad([example["labels"] for example in examples], IGNORED)}
