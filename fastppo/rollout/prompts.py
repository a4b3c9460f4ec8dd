"""Pad prompts on the left for decoding, so that all responses begin in one column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastppo.data.images import ImagePrompt


def check_prompts(prompt_ids: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if a prompt is empty."""
    if any(len(prompt) == 0 for prompt in prompt_ids):
        raise ValueError("a prompt is empty: generation needs at least one token")


def padded_left(prompt_ids: Sequence[Sequence[int]], fill: int) -> tuple[Tensor, Tensor]:
    """Return (ids [B, W] int64 padded with `fill` on the left, mask [B, W] int64, 1 on tokens)."""
    width = max(map(len, prompt_ids))
    ids = torch.tensor([[fill] * (width - len(prompt)) + list(prompt) for prompt in prompt_ids])
    lengths = torch.tensor([len(prompt) for prompt in prompt_ids])
    return ids, (torch.arange(width) >= width - lengths.unsqueeze(1)).long()


def distinct(prompt_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the first row of each distinct prompt [U] and the distinct prompt of each row [B].

    Prompts with other images are distinct.
    """
    index: dict[tuple[Any, ...], int] = {}
    which = [index.setdefault(_key(prompt), len(index)) for prompt in prompt_ids]
    return torch.tensor([which.index(i) for i in range(len(index))]), torch.tensor(which)


def _key(prompt: Sequence[int]) -> tuple[Any, ...]:
    digest = (prompt.images.digest,) if isinstance(prompt, ImagePrompt) else ()
    return (*prompt, *digest)


def batches_of(
    prompt_ids: Sequence[Sequence[int]], size: int | None, *, equal_lengths: bool
) -> list[list[int]]:
    """Return the rows of each batch of at most `size` prompts; None sets no limit.

    Args:
        equal_lengths: whether the prompts of a batch must have one length.
    """
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompt_ids):
        groups.setdefault(len(prompt) if equal_lengths else 0, []).append(row)
    step = size or max(1, len(prompt_ids))
    return [
        rows[start : start + step]
        for rows in groups.values()
        for start in range(0, len(rows), step)
    ]
