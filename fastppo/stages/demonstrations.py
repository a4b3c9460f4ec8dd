"""Demonstrations: rows of prompts with completions, chats or text, as token ids and labels.

A row has one of three forms, recognised by its columns (the first that fits):

    {messages}              a chat; the loss is on the assistant's turns alone
    {prompt, completion}    strings, or chat messages as the prompt and a string or messages as the
                            completion; the loss is on the completion
    {text}                  plain text; the loss is on every token

EOS ends each row with a loss of its own, so the model learns to stop. The assistant's turns are
those that the chat template marks with `{% generation %}`; under a template without marks, turn i
is what the rendering of i + 1 messages adds to that of i messages and the generation prompt, up to
its EOS.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.utils.chat_template_utils import render_jinja_template

from fastppo.data.chat import encode_prompt, is_chat, render_chat
from fastppo.data.padding import pad, padded_batch
from fastppo.data.rows import DataError, Rows
from fastppo.functional.scalars import describe

IGNORED = -100
"""Label of the positions without a loss, as transformers' losses read it."""

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(slots=True)
class Demonstrations:
    """Encoded rows."""

    examples: list[dict[str, list[int]]] = field(default_factory=list)
    """{input_ids, labels} each, of one length; labels are IGNORED where there is no loss."""
    prompts: list[Any] = field(default_factory=list)
    """What each row answers: rows of one prompt are held out together."""
    truncated: int = 0
    """Rows cut at max_length, the dropped ones among them."""
    dropped: int = 0
    """Rows of which the cut left nothing with a loss."""


def encode_demonstrations(
    rows: Rows, tokenizer: Any, max_length: int | None = None, source: str = "data"
) -> Demonstrations:
    """Token ids and labels of all rows.

    Args:
        max_length: tokens; longer rows lose their end.

    Raises:
        DataError: a row of no known form or with an empty part, chat messages that the template
            cannot render or has no place for, each with the row's number; or no row is left.
        ValueError: the tokenizer has no EOS token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS token, and without one no row can end")
    demonstrations = Demonstrations()
    for number, row in enumerate(rows, 1):
        prompt, ids, labels = _encode_row(row, tokenizer, f"{source}, row {number}")
        labels[0] = IGNORED  # there is nothing before it to predict it from
        if max_length is not None and len(ids) > max_length:
            demonstrations.truncated += 1
            ids = ids[:max_length]
            labels = labels[:max_length]
        if all(label == IGNORED for label in labels):
            demonstrations.dropped += 1
            continue
        demonstrations.examples.append({"input_ids": ids, "labels": labels})
        demonstrations.prompts.append(prompt)
    if not demonstrations.examples:
        raise DataError(
            f"{source}: of {len(rows)} rows none has a token with a loss within "
            f"max_length={max_length}"
        )
    return demonstrations


def _encode_row(row: dict[str, Any], tokenizer: Any, where: str) -> tuple[Any, list[int], list]:
    """(prompt, ids, labels)."""
    if row.get("messages") is not None:
        messages = row["messages"]
        if not is_chat(messages):
            raise DataError(f"{where}: messages must be a list of {{role, content}}")
        roles = [message["role"] for message in messages]
        if "assistant" not in roles:
            raise DataError(f"{where}: no turn of the assistant, got {', '.join(roles)}")
        before = messages[: roles.index("assistant")]
        return before, *encode_chat(list(messages), tokenizer, where)
    if row.get("prompt") is not None and row.get("completion") is not None:
        prompt = row["prompt"]
        completion = row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt, *_encode_strings(prompt, completion, tokenizer, where)
        if not is_chat(prompt):
            raise DataError(
                f"{where}: a prompt is a string with a string as its completion, or a list of "
                f"{{role, content}} messages, got {type(prompt).__name__} and "
                f"{type(completion).__name__}"
            )
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if not is_chat(completion) or completion[0]["role"] != "assistant":
            raise DataError(
                f"{where}: a completion is a string or messages that begin with the assistant's"
            )
        ids, labels = encode_chat([*prompt, *completion], tokenizer, where, len(prompt))
        return prompt, ids, labels
    if row.get("text") is not None:
        if not isinstance(row["text"], str) or not row["text"].strip():
            raise DataError(
                f"{where}: text must be a non-empty string, got {describe(row['text'])}"
            )
        ids = list(tokenizer(row["text"])["input_ids"])
        if not ids:
            raise DataError(f"{where}: the tokenizer has no token for {describe(row['text'])}")
        if ids[-1] != tokenizer.eos_token_id:
            ids.append(tokenizer.eos_token_id)
        return row["text"], ids, list(ids)
    raise DataError(
        f"{where}: expected messages, prompt and completion, or text, "
        f"got {', '.join(row) or 'nothing'}"
    )


def _encode_strings(
    prompt: str, completion: str, tokenizer: Any, where: str
) -> tuple[list[int], list[int]]:
    """Tokenised separately, as in PPO, where response ids follow prompt ids."""
    head = encode_prompt(prompt, tokenizer, where)
    tail = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    if tail[-1:] != [tokenizer.eos_token_id]:
        tail.append(tokenizer.eos_token_id)
    return head + tail, [IGNORED] * len(head) + tail


def encode_chat(
    messages: list[dict[str, Any]], tokenizer: Any, where: str, first: int = 0
) -> tuple[list[int], list[int]]:
    """(ids, labels) of a conversation, with labels on the assistant's turns from message `first`.

    The conversation is tokenised as one text, as PPO tokenises a prompt of messages. A token
    belongs to a turn if its last character does.

    Raises:
        DataError: there is no template, it refuses the messages, or it renders them in a way that
            hides where a turn begins.
    """
    text = render_chat(tokenizer, messages, where)
    if not tokenizer.is_fast:
        raise DataError(f"{where}: chat messages need a fast tokenizer, for its character offsets")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = list(encoded["input_ids"])
    ends = [end if end > start else -1 for start, end in encoded["offset_mapping"]]
    if GENERATION_MARK.search(tokenizer.get_chat_template()):
        spans = _marked_spans(text, messages, tokenizer, where=where, first=first)
    else:
        spans = _unmarked_spans(text, messages, tokenizer, where=where, first=first)
    has_loss = [any(start < end <= stop for start, stop in spans) for end in ends]
    if not any(has_loss):
        raise DataError(f"{where}: the chat template renders no token as the assistant's")
    labels = [token if loss else IGNORED for token, loss in zip(ids, has_loss, strict=True)]
    last = max(i for i, loss in enumerate(has_loss) if loss)
    eos = tokenizer.eos_token_id
    if messages[-1]["role"] == "assistant" and ids[last] != eos:
        if eos in ids[last:]:  # outside of the template's marks
            labels[ids.index(eos, last)] = eos
        else:
            ids.append(eos)
            labels.append(eos)
    return ids, labels


def _marked_spans(
    text: str, messages: list[dict[str, Any]], tokenizer: Any, *, where: str, first: int
) -> list[tuple[int, int]]:
    """(start, stop) in characters of what the template has between its generation marks.

    transformers' own token mask stops at the first turn that begins with white space, where it
    finds no token.
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
    """(start, stop) in characters of each turn of the assistant, its EOS included."""
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < first:
            continue
        if i == 0:
            raise DataError(
                f"{where}: the assistant speaks first; where its turn begins is seen only under a "
                "chat template with {% generation %} marks"
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
        f"{where}: the chat template renders the first {message} messages in another way inside "
        f"the longer conversation, so where the assistant's turn begins cannot be seen; mark it "
        "in the template with {% generation %}, or give each turn as a row of prompt and completion"
    )


def collate(examples: list[dict[str, list[int]]], pad_token_id: int) -> dict[str, Tensor]:
    """Right-padded input_ids, attention_mask and labels, [B, S] int64."""
    batch = padded_batch([example["input_ids"] for example in examples], pad_token_id)
    return {**batch, "labels": pad([example["labels"] for example in examples], IGNORED)}
