"""Prompts as a decoder reads them: padded on the left, so responses begin in one column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastppo.rollout import Sampling
from fastppo.rollout.stopping import StopStrings


@dataclass(frozen=True, slots=True, eq=False)
class PromptBatch:
    """Prompts that are decoded together, and how."""

    prompt_ids: list[list[int]]
    sampling: Sampling
    strings: StopStrings
    uniforms: Tensor | None
    """[B, max_new_tokens] fp64 in [0, 1) on the policy's device; None for greedy decoding."""

    def __len__(self) -> int:
        return len(self.prompt_ids)


def check_prompts(prompt_ids: Sequence[Sequence[int]]) -> None:
    """Raises ValueError if a prompt is empty."""
    if any(len(prompt) == 0 for prompt in prompt_ids):
        raise ValueError("a prompt is empty: generation needs at least one token")


def padded_left(prompt_ids: Sequence[Sequence[int]], fill: int) -> tuple[Tensor, Tensor]:
    """(ids [B, W] int64 with `fill` on the left, mask [B, W] int64, 1 on tokens)."""
    width = max(map(len, prompt_ids))
    ids = torch.tensor([[fill] * (width - len(prompt)) + list(prompt) for prompt in prompt_ids])
    lengths = torch.tensor([len(prompt) for prompt in prompt_ids])
    return ids, (torch.arange(width) >= width - lengths.unsqueeze(1)).long()


def distinct(prompt_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(the first row of each different prompt [U] int64, which of those each row has [B] int64)."""
    index: dict[tuple[int, ...], int] = {}
    which = [index.setdefault(tuple(prompt), len(index)) for prompt in prompt_ids]
    return torch.tensor([which.index(i) for i in range(len(index))]), torch.tensor(which)
