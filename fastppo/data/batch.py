"""Prompts and the responses to them, laid end to end; masks and positions follow from lengths.

Lengths live on the host, so nothing here waits for a GPU, and they alone say what is a prompt, a
response or padding: the pad token may be any token, EOS included. Quantities per token (logprobs,
values, advantages, …) are packed: the response tokens of sequence 0, then those of sequence 1, and
so on, `[N]`. Nothing is computed for a prompt or for padding.

A response may hold tokens that the policy did not write: a tool's answer between two turns, say.
The policy reads them, but they are not among the N, so they have no loss, KL, entropy or value. A
turn is a run of tokens that the policy did write.

A transformer reads a `Layout`: the same tokens as rows, and where in them the hidden states are
that predict the response tokens. Rows are padded on the right, so with causal attention no token
sees any padding and no mask is needed; packed, all sequences are one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Packing(NamedTuple):
    """Where sequences begin in a row that holds them end to end."""

    position_ids: Tensor
    """[1, Σ length] int64: from 0 for each sequence."""
    cu_seqlens: Tensor
    """[B + 1] int32: where each sequence begins, and Σ length."""
    longest: int
    """Tokens."""


class Layout(NamedTuple):
    """A batch as a transformer's input: a padded row per sequence, or all of them in one row."""

    input_ids: Tensor
    """[B, S] int64; a row is prompt, response, padding. Packed: [1, Σ length]."""
    predicting: Tensor
    """[N] int64: of all positions those whose hidden states predict the response tokens."""
    final: Tensor
    """[B] int64: the position of each sequence's last token, after which there is no other."""
    packing: Packing | None = None
    """None where each row is a sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B sequences, each a prompt and its response."""

    tokens: Tensor
    """[Σ length] int64: prompt and response of sequence 0, then of sequence 1, …"""
    prompt_lengths: Tensor
    """[B] int64 on the CPU, tokens; at least 1: the last prompt token predicts the first of the
    response."""
    response_lengths: Tensor
    """[B] int64 on the CPU, tokens after the prompt; the EOS that ended a response is one of
    them."""
    written: Tensor | None = None
    """[Σ response length] bool on the CPU: the tokens of the responses that the policy wrote; None
    means all."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        written: Sequence[Sequence[bool]] | None = None,
    ) -> Batch:
        """The batch of token lists, one response per prompt.

        Args:
            written: of each response, the tokens that the policy wrote; None means all.

        Raises:
            ValueError: another number of responses than of prompts, or an empty prompt.
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
        """[B] int64 on the CPU: prompt and response, tokens."""
        return self.prompt_lengths + self.response_lengths

    @property
    def response_count(self) -> int:
        """N, the tokens that the policy wrote, of all sequences."""
        return sum(self.written_lengths.tolist())

    @property
    def written_lengths(self) -> Tensor:
        """[B] int64 on the CPU: tokens that the policy wrote."""
        if self.written is None:
            return self.response_lengths
        ends = torch.nn.functional.pad(self.written.long().cumsum(0), (1, 0))
        begin = starts(self.response_lengths)
        return ends[begin + self.response_lengths] - ends[begin]

    def turns(self) -> tuple[Tensor, Tensor]:
        """([B] how many turns each response has, [Σ of those] their lengths), int64 on the CPU."""
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
        """[N] int64, packed."""
        begin = starts(self.lengths) + self.prompt_lengths
        return self.tokens[on_device(self._written(begin), self.device)]

    @property
    def cu_seqlens(self) -> Tensor:
        """[B + 1] int64: where each response begins in the packed tokens, and N."""
        ends = torch.nn.functional.pad(self.written_lengths.cumsum(0), (1, 0))
        return on_device(ends, self.device)

    def select(self, rows: Tensor) -> Batch:
        """The sequences of the given rows [k], int64 on the CPU, in their order."""
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
        """Consecutive batches of so many sequences each, on the same memory."""
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
        """One row per sequence, right-padded to the longest."""
        lengths = self.lengths
        width = max(lengths.tolist(), default=0)
        first = torch.arange(len(self)) * width
        input_ids = torch.zeros(len(self) * width, dtype=torch.int64, device=self.device)
        input_ids[on_device(spans(first, lengths), self.device)] = self.tokens
        return self._layout(input_ids.view(len(self), width), first)

    def packed_layout(self) -> Layout:
        """All sequences in one row."""
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
        """A layout whose sequences begin at the positions `first` [B]."""
        predicting = self._written(first + self.prompt_lengths - 1)
        final = first + self.lengths - 1
        return Layout(
            input_ids=input_ids,
            predicting=on_device(predicting, self.device),
            final=on_device(final, self.device),
            packing=packing,
        )

    def _written(self, begin: Tensor) -> Tensor:
        """[N] the positions of the tokens that the policy wrote, of responses that begin at `begin`
        [B]."""
        positions = spans(begin, self.response_lengths)
        return positions if self.written is None else positions[self.written]


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on the device. To a GPU it is queued from pinned memory; from pageable
    memory the host would wait for it."""
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def starts(lengths: Tensor) -> Tensor:
    """[B]: where each of B spans begins when they are laid end to end."""
    return lengths.cumsum(0) - lengths


def split_packed(x: Tensor, lengths: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Packed values [Σ length] of sequences of these lengths [B], in parts of so many sequences
    each."""
    return x.split([sum(part.tolist()) for part in lengths.split(sizes)])


def spans(begin: Tensor, lengths: Tensor) -> Tensor:
    """[Σ length] int64 on the CPU: begin[0], begin[0] + 1, … for each span in turn."""
    # NumPy, whose calls cost less than torch's: these are many on few numbers.
    counts = lengths.numpy()
    offset = (begin.numpy() - np.cumsum(counts) + counts).repeat(counts)
    return torch.from_numpy(offset + np.arange(len(offset)))
