"""Batches of prompts and responses, stored end to end; masks and positions follow from lengths.

Lengths are kept on the CPU, so this module never synchronizes with the GPU. They alone tell
prompts, responses and padding apart: the pad token may be any token, EOS included. Per-token
quantities (logprobs, values, advantages, …) are packed, `[N]`: the response tokens of sequence 0,
then those of sequence 1, and so on. Nothing is computed for prompts or padding.

A response may contain tokens not written by the policy, such as a tool's answer between two turns.
The policy reads them, but they are not among the N: they have no loss, KL, entropy or value. A turn
is a run of consecutive tokens written by the policy.

A transformer reads a `Layout`: the same tokens as rows, with the positions of the hidden states
that predict the response tokens. Rows are padded on the right, so causal attention never sees
padding and no mask is needed. In a packed layout all sequences share one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Packing(NamedTuple):
    """Sequence boundaries within a packed row."""

    position_ids: Tensor
    """Position of each token in its sequence, [1, Σ length] int64."""
    cu_seqlens: Tensor
    """Start of each sequence, then Σ length: [B + 1] int32."""
    longest: int
    """Length of the longest sequence, tokens."""


class Layout(NamedTuple):
    """The input of a transformer: one padded row per sequence, or all sequences in one row."""

    input_ids: Tensor
    """Prompt, response and padding, [B, S] int64; [1, Σ length] if packed."""
    predicting: Tensor
    """Flat positions whose hidden states predict the response tokens, [N] int64."""
    final: Tensor
    """Flat position of each sequence's last token, [B] int64."""
    packing: Packing | None = None
    """Boundaries of packed sequences; None if each row is one sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B sequences, each a prompt followed by its response."""

    tokens: Tensor
    """Prompt and response of sequence 0, then of sequence 1, …: [Σ length] int64."""
    prompt_lengths: Tensor
    """Tokens of each prompt, [B] int64 on the CPU; at least 1, since the last prompt token predicts
    the first response token."""
    response_lengths: Tensor
    """[B] int64 on the CPU, tokens; includes the EOS of a finished response."""
    written: Tensor | None = None
    """[Σ response length] bool on the CPU: response tokens written by the policy; None means
    all."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        written: Sequence[Sequence[bool]] | None = None,
    ) -> Batch:
        """Build a batch from lists of token ids, one response per prompt.

        Args:
            written: per response token, whether the policy wrote it; None means all.

        Raises:
            ValueError: the numbers of prompts and responses differ, or a prompt is empty.
        """
        if len(prompts) != len(responses):
            raise ValueError(
                f"expected one response per prompt, got {len(prompts)} prompts and "
                f"{len(responses)} responses"
            )
        for row, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise ValueError(f"prompt {row} is empty; a response needs a token to follow")
        tokens: list[int] = []
        for prompt, response in zip(prompts, responses, strict=True):
            tokens += prompt
            tokens += response
        flags = None
        if written is not None:
            flags = torch.tensor([flag for row in written for flag in row])
        return cls(
            tokens=torch.tensor(tokens, dtype=torch.int64).to(device),
            prompt_lengths=torch.tensor([len(row) for row in prompts], dtype=torch.int64),
            response_lengths=torch.tensor([len(row) for row in responses], dtype=torch.int64),
            written=flags,
        )

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def lengths(self) -> Tensor:
        """Tokens of prompt and response together, [B] int64 on the CPU."""
        return self.prompt_lengths + self.response_lengths

    @property
    def response_count(self) -> int:
        """N: the number of tokens written by the policy, over all sequences."""
        return sum(self.written_lengths.tolist())

    @property
    def written_lengths(self) -> Tensor:
        """[B] int64 on the CPU: tokens written by the policy."""
        if self.written is None:
            return self.response_lengths
        ends = torch.nn.functional.pad(self.written.long().cumsum(0), (1, 0))
        begin = starts(self.response_lengths)
        return ends[begin + self.response_lengths] - ends[begin]

    def turns(self) -> tuple[Tensor, Tensor]:
        """Return the number of turns per response [B] and the length of each turn [Σ turns].

        Both are int64 on the CPU.
        """
        if self.written is None:
            has_any = self.response_lengths > 0
            return has_any.long(), self.response_lengths[has_any]
        begins = self.written.clone()
        begins[1:] &= ~self.written[:-1]
        firsts = starts(self.response_lengths)[self.response_lengths > 0]
        begins[firsts] = self.written[firsts]
        row = torch.arange(len(self)).repeat_interleave(self.response_lengths)
        counts = torch.bincount(row[begins], minlength=len(self))
        turn = begins.long().cumsum(0)[self.written] - 1
        return counts, torch.bincount(turn, minlength=int(counts.sum()))

    @property
    def response_tokens(self) -> Tensor:
        """The policy's tokens, packed, [N] int64."""
        begin = starts(self.lengths) + self.prompt_lengths
        return self.tokens[on_device(self._written(begin), self.device)]

    @property
    def cu_seqlens(self) -> Tensor:
        """[B + 1] int64: the start of each response in the packed tokens, then N."""
        ends = torch.nn.functional.pad(self.written_lengths.cumsum(0), (1, 0))
        return on_device(ends, self.device)

    def select(self, rows: Tensor) -> Batch:
        """Return the sequences of the given rows, [k] int64 on the CPU, in that order."""
        index = spans(starts(self.lengths)[rows], self.lengths[rows])
        lengths = self.response_lengths[rows]
        written = None
        if self.written is not None:
            written = self.written[spans(starts(self.response_lengths)[rows], lengths)]
        return Batch(
            tokens=self.tokens[on_device(index, self.device)],
            prompt_lengths=self.prompt_lengths[rows],
            response_lengths=lengths,
            written=written,
        )

    def split(self, sizes: list[int]) -> list[Batch]:
        """Split into consecutive batches of the given sizes, as views of the same memory."""
        tokens = split_packed(self.tokens, self.lengths, sizes)
        prompt_lengths = self.prompt_lengths.split(sizes)
        response_lengths = self.response_lengths.split(sizes)
        written: Sequence[Tensor | None] = [None] * len(sizes)
        if self.written is not None:
            written = split_packed(self.written, self.response_lengths, sizes)
        return [
            Batch(
                tokens=tokens[i],
                prompt_lengths=prompt_lengths[i],
                response_lengths=response_lengths[i],
                written=written[i],
            )
            for i in range(len(sizes))
        ]

    def layout(self) -> Layout:
        """Return one row per sequence, right-padded to the longest."""
        lengths = self.lengths
        width = max(lengths.tolist(), default=0)
        first = torch.arange(len(self)) * width
        input_ids = torch.zeros(len(self) * width, dtype=torch.int64, device=self.device)
        input_ids[on_device(spans(first, lengths), self.device)] = self.tokens
        return self._layout(input_ids.view(len(self), width), first)

    def packed_layout(self) -> Layout:
        """Return all sequences in one row."""
        lengths = self.lengths
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        positions = spans(torch.zeros_like(lengths), lengths)
        packing = Packing(
            position_ids=on_device(positions, self.device).unsqueeze(0),
            cu_seqlens=on_device(ends.int(), self.device),
            longest=max(lengths.tolist(), default=0),
        )
        return self._layout(self.tokens.unsqueeze(0), starts(lengths), packing)

    def _layout(self, input_ids: Tensor, first: Tensor, packing: Packing | None = None) -> Layout:
        """Return the layout of sequences starting at the positions `first` [B]."""
        predicting = self._written(first + self.prompt_lengths - 1)
        final = first + self.lengths - 1
        return Layout(
            input_ids=input_ids,
            predicting=on_device(predicting, self.device),
            final=on_device(final, self.device),
            packing=packing,
        )

    def _written(self, begin: Tensor) -> Tensor:
        """[N]: positions of the tokens written by the policy, for responses starting at `begin`
        [B]."""
        positions = spans(begin, self.response_lengths)
        return positions if self.written is None else positions[self.written]


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device without waiting.

    A copy from pageable memory would block, so the tensor is pinned first.
    """
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def starts(lengths: Tensor) -> Tensor:
    """Return the start of each of B spans stored end to end, [B]."""
    return lengths.cumsum(0) - lengths


def split_packed(x: Tensor, lengths: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Split packed values [Σ length] into parts of the given numbers of sequences.

    Args:
        lengths: [B], values per sequence.
    """
    return x.split([sum(part.tolist()) for part in lengths.split(sizes)])


def spans(begin: Tensor, lengths: Tensor) -> Tensor:
    """Return begin[0], begin[0] + 1, … of each span in turn, [Σ length] int64 on the CPU."""
    # This makes many calls on few numbers, and NumPy has less overhead per call than torch.
    counts = lengths.numpy()
    offset = (begin.numpy() - np.cumsum(counts) + counts).repeat(counts)
    return torch.from_numpy(offset + np.arange(len(offset)))
