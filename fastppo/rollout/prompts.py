"""Prompts as a decoder reads them: padded on the left, so responses begin in one column."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_prompts(prompt_ids: Sequence[Sequence[int]]) -> None:
    """Raises ValueError if a prompt is empty."""
    if any(len(prompt) == 0 for prompt in prompt_ids):
        raise ValueError("a prompt is empty: generation needs at least one token")


def padded_left(prompt_ids: Sequence[Sequence[int]], fill: int) -> tuple[Tensor, Tensor]:
    """(ids [B, W] int64 with `fill` on the left, mask [B, W] int64, 1 on tokens)."""
    width = max(map(len, prompt_ids))
    ids = torch.tensor([[fill] * (width - len(each)) + list(each) for each in prompt_ids])
    lengths = torch.tensor([len(each) for each in prompt_ids])
    return ids, (torch.arange(width) >= width - lengths.unsqueeze(1)).long()


def distinct(prompt_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(the first row of each different prompt [U] int64, which of those each row has [B] int64)."""
    place: dict[tuple[int, ...], int] = {}
    which = [place.setdefault(tuple(each), len(place)) for each in prompt_ids]
    return torch.tensor([which.index(u) for u in range(len(place))]), torch.tensor(which)
