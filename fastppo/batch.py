"""What flows through an iteration: sequences by length, and per-token tensors laid end to end.

Masks come from lengths alone, so the pad token may be any token, EOS included. Per-token quantities
(logprobs, values, advantages, ...) are packed: the response tokens of sequence 0, then those of
sequence 1, and so on, `[N]` with N the number of response tokens. Nothing is computed for a prompt
or for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class Sequences:
    """Prompts and responses, right-padded: a row is prompt, response, padding."""

    input_ids: Tensor
    """[B, S] int64."""
    prompt_lengths: Tensor
    """[B] int64, tokens; at least 1: the last prompt token predicts the first response token."""
    response_lengths: Tensor
    """[B] int64, tokens; the EOS that ended a response is one of them."""

    @classmethod
    def pack(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        pad_token_id: int,
        device: torch.device | str = "cpu",
    ) -> Sequences:
        """Sequences of token lists, one response per prompt."""
        if len(prompts) != len(responses):
            raise ValueError(f"got {len(prompts)} prompts and {len(responses)} responses")
        for row, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise ValueError(f"prompt {row} is empty; a response needs a token to follow")
        rows = [
            torch.tensor([*prompt, *response], dtype=torch.int64)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)
        return cls(
            padded.to(device),
            torch.tensor([len(prompt) for prompt in prompts], device=device),
            torch.tensor([len(response) for response in responses], device=device),
        )

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def attention_mask(self) -> Tensor:
        """[B, S] int64, 1 on prompt and response."""
        lengths = self.prompt_lengths + self.response_lengths
        column = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return (column < lengths.unsqueeze(1)).long()

    @property
    def response_mask(self) -> Tensor:
        """[B, S] bool, True on response tokens."""
        column = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        start = self.prompt_lengths.unsqueeze(1)
        return (column >= start) & (column < start + self.response_lengths.unsqueeze(1))

    @property
    def response_tokens(self) -> Tensor:
        """[N] int64, packed."""
        return self.input_ids[self.response_mask]

    @property
    def predicting_positions(self) -> tuple[Tensor, Tensor]:
        """(row, column) [N] of the hidden states that predict the response tokens: one before."""
        row, column = self.response_mask.nonzero(as_tuple=True)
        return row, column - 1

    @property
    def final_positions(self) -> tuple[Tensor, Tensor]:
        """(row, column) [B] of each sequence's last token, behind which there is no other."""
        rows = torch.arange(len(self), device=self.input_ids.device)
        return rows, self.prompt_lengths + self.response_lengths - 1

    @property
    def cu_seqlens(self) -> Tensor:
        """[B + 1] int64: where each response begins in the packed tokens, and N."""
        return torch.nn.functional.pad(self.response_lengths.cumsum(0), (1, 0))

    def split(self, size: int) -> list[Sequences]:
        """Consecutive microbatches of at most `size` sequences."""
        rows = torch.arange(len(self), device=self.input_ids.device)
        return [self.select(part) for part in rows.split(size)]

    def select(self, rows: Tensor) -> Sequences:
        """The given rows, with the padding that none of them needs cut off."""
        prompt_lengths, response_lengths = self.prompt_lengths[rows], self.response_lengths[rows]
        longest = int((prompt_lengths + response_lengths).max()) if rows.numel() else 0
        return Sequences(self.input_ids[rows, :longest], prompt_lengths, response_lengths)


@dataclass(slots=True)
class Experience:
    """One iteration's sequences with all that the update needs; per-token tensors are [N]."""

    sequences: Sequences
    logprobs: Tensor
    """[N] fp32, nats: the rollout policy's (`old_logprobs` of the loss)."""
    values: Tensor
    """[N] fp32: the rollout's value of the state before each token."""
    advantages: Tensor
    returns: Tensor
    ref_logprobs: Tensor | None = None
    weights: Tensor | None = None
    """[N] fp32: share of each token in its minibatch's loss."""

    def __len__(self) -> int:
        return len(self.sequences)

    def tensors(self) -> dict[str, Tensor | None]:
        """All tensors by name, those of the sequences among them."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        sequences = own.pop("sequences")
        return own | {each.name: getattr(sequences, each.name) for each in fields(sequences)}

    def select(self, rows: Tensor) -> Experience:
        """The experience of the given sequences."""
        start = self.sequences.cu_seqlens[rows]
        lengths = self.sequences.response_lengths[rows]
        total = int(lengths.sum())
        # Token j of the selection is token j − (tokens selected before its sequence) of its own.
        offset = start - torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1]
        index = offset.repeat_interleave(lengths, output_size=total)
        index = index + torch.arange(total, device=index.device)
        packed: dict[str, Any] = {
            field.name: value if value is None else value[index]
            for field in fields(self)
            if field.name != "sequences"
            for value in [getattr(self, field.name)]
        }
        return Experience(self.sequences.select(rows), **packed)

    def split(self, size: int) -> list[Experience]:
        """Consecutive microbatches of at most `size` sequences."""
        rows = torch.arange(len(self), device=self.sequences.input_ids.device)
        return [self.select(part) for part in rows.split(size)]
