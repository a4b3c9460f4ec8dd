"""Preference pairs and ranked lists as token ids.

A text is prompt and completion joined as they are, as in `fastppo.rewards.model.RewardModel`: a
space between the two belongs to the completion.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.data.chat import is_chat
from fastppo.data.datasets import DataError, Rows
from fastppo.data.padding import padded_batch
from fastppo.functional.scalars import describe
from fastppo.rewards.model import cut_beginning, text_ids
from fastppo.stages.data import Encoded


class Comparison(NamedTuple):
    """The completions of one prompt and their preferences."""

    texts: list[list[int]]
    """Token ids of prompt and completion, one per completion."""
    pairs: list[tuple[int, int]]
    """(better, worse), indices into `texts`; the first pair starts with the best text."""
    margin: float
    """Margin of each pair in the loss, reward units."""


def encode_comparisons(
    rows: Rows, tokenizer: Any, max_length: int | None = None, source: str = "data"
) -> Encoded:
    """Tokenize rows to examples of type `Comparison`.

    A row is {prompt, chosen, rejected}, optionally with `margin`, or {prompt, completions} from
    best to worst, optionally with `ranks`: lower is better, equal ranks are a tie. A row is dropped
    if all its ranks or texts are equal.

    Args:
        max_length: tokens; longer texts are cut at the beginning, as in `RewardModel`.

    Raises:
        DataError: a row has an unknown form, or all rows are dropped.
    """
    encoded = Encoded()
    for number, row in enumerate(rows, 1):
        where = f"{source}, row {number}"
        prompt, completions, ranks, margin = _comparison(row, where)
        texts = [text_ids(tokenizer, prompt, completion, where) for completion in completions]
        encoded.truncated += sum(max_length is not None and len(ids) > max_length for ids in texts)
        texts = [cut_beginning(ids, tokenizer, max_length) for ids in texts]
        by_rank = sorted(range(len(texts)), key=ranks.__getitem__)
        pairs = [
            (i, j)
            for i, j in itertools.combinations(by_rank, 2)
            if ranks[i] < ranks[j] and texts[i] != texts[j]
        ]
        if not pairs:
            encoded.dropped += 1
            continue
        encoded.examples.append(Comparison(texts, pairs, margin))
        encoded.prompts.append(prompt)
    if not encoded.examples:
        raise DataError(f"{source}: none of {len(rows)} rows prefers one text to another")
    return encoded


def _comparison(row: dict[str, Any], where: str) -> tuple[Any, list[Any], list[float], float]:
    """Return (prompt, completions, ranks, margin) of a row."""
    if row.get("completions") is not None:
        completions = row["completions"]
        if not isinstance(completions, list) or len(completions) < 2:
            raise DataError(f"{where}: completions must be a list of 2 or more, best to worst")
        ranks = row.get("ranks")
        if ranks is None:
            ranks = list(range(len(completions)))
        numbers = isinstance(ranks, list) and all(map(_is_number, ranks))
        if not numbers or len(ranks) != len(completions):
            raise DataError(
                f"{where}: ranks must be {len(completions)} numbers, got {describe(ranks)}"
            )
    elif row.get("chosen") is not None and row.get("rejected") is not None:
        completions = [row["chosen"], row["rejected"]]
        ranks = [0, 1]
    else:
        raise DataError(
            f"{where}: expected prompt, chosen and rejected, or prompt and completions; "
            f"got {', '.join(row) or 'nothing'}"
        )
    margin = row.get("margin")
    if margin is None:
        margin = 0.0
    if not _is_number(margin):
        raise DataError(f"{where}: margin must be a finite number, got {describe(margin)}")
    if len(completions) > 2 and margin:
        raise DataError(f"{where}: a margin needs a pair, got {len(completions)} completions")
    return *_prompt_and_completions(row.get("prompt"), completions, where), ranks, float(margin)


def _is_number(value: Any) -> bool:
    """Return whether a value is a number within the range of fp32."""
    return isinstance(value, (int, float)) and abs(value) <= torch.finfo(torch.float32).max


def _prompt_and_completions(
    prompt: Any, completions: list[Any], where: str
) -> tuple[Any, list[Any]]:
    """Return a string prompt with string completions, or messages with strings or messages."""
    chats = [is_chat(completion) for completion in completions]
    if not all(isinstance(c, str) or is_chat(c) for c in completions):
        raise DataError(
            f"{where}: a completion must be a string or a list of {{role, content}} messages"
        )
    if any(chats) and not all(chats):
        raise DataError(f"{where}: completions must be all strings or all chat messages, got both")
    # A completion of messages starts with the assistant's turn, a whole conversation does not.
    is_conversation = [c[0]["role"] != "assistant" for c in completions if not isinstance(c, str)]
    if is_conversation and all(is_conversation):
        return _shared_prefix(completions, where)
    if any(is_conversation):
        raise DataError(
            f"{where}: completions must all start with the assistant's turn or all be whole "
            "conversations, got both"
        )
    if prompt is None:
        raise DataError(
            f"{where}: no prompt; only whole conversations, starting with a message of the user or "
            "the system, may omit it"
        )
    if isinstance(prompt, str):
        if not any(chats):
            return prompt, completions
        prompt = [{"role": "user", "content": prompt}]
    elif not is_chat(prompt):
        raise DataError(
            f"{where}: a prompt must be a string or a list of {{role, content}} messages, "
            f"got {type(prompt).__name__}"
        )
    return list(prompt), completions


def _shared_prefix(conversations: list[Any], where: str) -> tuple[Any, list[Any]]:
    """Return the messages shared by all conversations, and the rest of each."""
    conversations = [list(messages) for messages in conversations]
    longest = min(len(messages) for messages in conversations) - 1  # each keeps a completion
    shared = 0
    while shared < longest and all(m[shared] == conversations[0][shared] for m in conversations):
        shared += 1
    if shared == 0:
        raise DataError(f"{where}: the conversations do not start with the same messages")
    return conversations[0][:shared], [messages[shared:] for messages in conversations]


def collate(examples: Sequence[Comparison], pad_token_id: int) -> dict[str, Tensor]:
    """Collate the texts of several prompts into one right-padded batch.

    Returns:
        dict: `input_ids`, `attention_mask` [ΣK, S] int64; `better`, `worse` [P] int64, rows of the
        batch; `margin`, `weight` [P] fp32, the weight being 1 / pairs of the prompt; `prompts` []
        int64, the number of prompts.
    """
    better: list[int] = []
    worse: list[int] = []
    margins: list[float] = []
    weights: list[float] = []
    texts: list[list[int]] = []
    for example in examples:
        better += [len(texts) + i for i, _ in example.pairs]
        worse += [len(texts) + j for _, j in example.pairs]
        margins += [example.margin] * len(example.pairs)
        weights += [1 / len(example.pairs) for _ in example.pairs]
        texts += example.texts
    return {
        **padded_batch(texts, pad_token_id),
        "better": torch.tensor(better),
        "worse": torch.tensor(worse),
        "margin": torch.tensor(margins),
        "weight": torch.tensor(weights),
        "prompts": torch.tensor(len(examples)),
    }
