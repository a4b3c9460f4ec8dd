"""Preferences: pairs and ranked lists as token ids, and which text of a prompt beat which.

A text is prompt and completion joined as they are, as `fastppo.rewards.model.RewardModel` reads
them: a space between the two belongs to the completion.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.data.chat import is_chat
from fastppo.data.padding import padded_batch
from fastppo.data.rows import DataError, Rows
from fastppo.functional.scalars import describe
from fastppo.rewards.model import cut_beginning, text_ids


class Comparison(NamedTuple):
    """The completions of one prompt, and which of them is better than which."""

    texts: list[list[int]]
    """Token ids of prompt and completion, one per completion."""
    pairs: list[tuple[int, int]]
    """(better, worse), indices of `texts`; the first pair begins with the best."""
    margin: float
    """How much better the better text of each pair is said to be, reward units."""


@dataclass(slots=True)
class Comparisons:
    """Encoded rows."""

    examples: list[Comparison] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    """Rows of one prompt are held out together."""
    truncated: int = 0
    """Texts cut at max_length."""
    dropped: int = 0
    """Rows that prefer nothing: all ranks tie, or the texts are the same."""


def encode_comparisons(
    rows: Rows, tokenizer: Any, max_length: int | None = None, source: str = "data"
) -> Comparisons:
    """Token ids and pairs of all rows: {prompt, chosen, rejected} with an optional `margin`, or
    {prompt, completions} from best to worst with optional `ranks`, lower better, equal for a tie.

    Args:
        max_length: tokens; longer texts lose their beginning, as `RewardModel` cuts them.

    Raises:
        DataError: a row of no known form, with the row's number; or no row is left.
    """
    comparisons = Comparisons()
    for number, row in enumerate(rows, 1):
        where = f"{source}, row {number}"
        prompt, completions, ranks, margin = _comparison(row, where)
        texts = [text_ids(tokenizer, prompt, completion, where) for completion in completions]
        comparisons.truncated += sum(
            max_length is not None and len(ids) > max_length for ids in texts
        )
        texts = [cut_beginning(ids, tokenizer, max_length) for ids in texts]
        by_rank = sorted(range(len(texts)), key=ranks.__getitem__)
        pairs = [
            (i, j)
            for i, j in itertools.combinations(by_rank, 2)
            if ranks[i] < ranks[j] and texts[i] != texts[j]
        ]
        if not pairs:
            comparisons.dropped += 1
            continue
        comparisons.examples.append(Comparison(texts, pairs, margin))
        comparisons.prompts.append(prompt)
    if not comparisons.examples:
        raise DataError(f"{source}: none of {len(rows)} rows prefers one text to another")
    return comparisons


def _comparison(row: dict[str, Any], where: str) -> tuple[Any, list[Any], list[float], float]:
    """(prompt, completions, ranks, margin) of a row of either form."""
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
        raise DataError(f"{where}: a margin is that of one pair; a ranked list has several")
    return *_prompt_and_completions(row.get("prompt"), completions, where), ranks, float(margin)


def _is_number(value: Any) -> bool:
    """Whether it is a number that fp32 can hold."""
    return isinstance(value, (int, float)) and abs(value) <= torch.finfo(torch.float32).max


def _prompt_and_completions(
    prompt: Any, completions: list[Any], where: str
) -> tuple[Any, list[Any]]:
    """A string prompt with string completions, or a chat with strings or messages, whichever way
    the row has them."""
    chats = [is_chat(completion) for completion in completions]
    if not all(isinstance(c, str) or is_chat(c) for c in completions):
        raise DataError(
            f"{where}: a completion is a string or a list of {{role, content}} messages"
        )
    if any(chats) and not all(chats):
        raise DataError(
            f"{where}: the completions are strings and chat messages; expected one form"
        )
    # A whole conversation begins with the turn of the user or the system.
    is_conversation = [c[0]["role"] != "assistant" for c in completions if not isinstance(c, str)]
    if is_conversation and all(is_conversation):
        return _shared_prefix(completions, where)
    if any(is_conversation):
        raise DataError(
            f"{where}: some completions begin with the assistant's turn and some are whole "
            "conversations; expected one form"
        )
    if prompt is None:
        raise DataError(
            f"{where}: no prompt; only whole conversations, lists of messages that begin with the "
            "user's or the system's, hold their own"
        )
    if isinstance(prompt, str):
        if not any(chats):
            return prompt, completions
        prompt = [{"role": "user", "content": prompt}]
    elif not is_chat(prompt):
        raise DataError(
            f"{where}: a prompt is a string or a list of {{role, content}} messages, "
            f"got {type(prompt).__name__}"
        )
    return list(prompt), completions


def _shared_prefix(conversations: list[Any], where: str) -> tuple[Any, list[Any]]:
    """The messages that all conversations begin with, and the rest of each."""
    conversations = [list(messages) for messages in conversations]
    longest = min(len(messages) for messages in conversations) - 1  # each keeps a completion
    shared = 0
    while shared < longest and all(m[shared] == conversations[0][shared] for m in conversations):
        shared += 1
    if shared == 0:
        raise DataError(f"{where}: the conversations do not begin with the same messages")
    return conversations[0][:shared], [messages[shared:] for messages in conversations]


def collate(examples: Sequence[Comparison], pad_token_id: int) -> dict[str, Tensor]:
    """All texts of several prompts in one right-padded batch, each once, with their pairs.

    Returns:
        dict: input_ids, attention_mask [ΣK, S] int64; better, worse [P] int64, rows of the batch;
        margin, weight [P] fp32: one over the number of the prompt's pairs; prompts [] int64.
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
