"""Prompts and the responses to them, laid end to end; masks and positions follow from lengths.

Lengths live on the host, so nothing here waits for a GPU, and they alone say what is a prompt, a
response or padding: the pad token may be any token, EOS included. What there is one of per token
(logprobs, values, advantages, …) is packed: the response tokens of sequence 0, then those of
sequence 1, and so on, `[N]`. Nothing is computed for a prompt or for padding.

A transformer reads a `Layout`: the same tokens as rows, and where in them the hidden states are
that predict the response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """A batch as a transformer's input, one padded row per sequence."""

    input_ids: Tensor
    """[B, S] int64; a row is prompt, response, padding."""
    attention_mask: Tensor
    """[B, S] int64, 1 on prompt and response."""
    predicting: Tensor
    """[N] int64: of the B·S positions those whose hidden states predict the response tokens."""
    final: Tensor
    """[B] int64: the position of each sequence's last token, after which there is no other."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B sequences, each a prompt and its response."""

    tokens: Tensor
    """[Σ length] int64: prompt and response of sequence 0, then of sequence 1, …"""
    prompt_lengths: Tensor
    """[B] int64 on the CPU, tokens; at least 1: the last prompt token predicts the first of the
    response."""
    response_lengths: Tensor
    """[B] int64 on the CPU, tokens; the EOS that ended a response is one of them."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> Batch:
        """The batch of token lists, one response per prompt.

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
        both = zip(prompts, responses, strict=True)
        tokens = [token for prompt, response in both for token in (*prompt, *response)]
        return cls(
            torch.tensor(tokens, dtype=torch.int64).to(device),
            torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64),
            torch.tensor([len(response) for response in responses], dtype=torch.int64),
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
        """N, the response tokens of all sequences."""
        return int(self.response_lengths.sum())

    @property
    def response_tokens(self) -> Tensor:
        """[N] int64, packed."""
        begin = starts(self.lengths) + self.prompt_lengths
        return self.tokens[spans(begin, self.response_lengths).to(self.device)]

    @property
    def cu_seqlens(self) -> Tensor:
        """[B + 1] int64: where each response begins in the packed tokens, and N."""
        ends = torch.nn.functional.pad(self.response_lengths.cumsum(0), (1, 0))
        return ends.to(self.device)

    def select(self, rows: Tensor) -> Batch:
        """The sequences of the given rows [k], int64 on the CPU, in their order."""
        index = spans(starts(self.lengths)[rows], self.lengths[rows]).to(self.device)
        return Batch(self.tokens[index], self.prompt_lengths[rows], self.response_lengths[rows])

    def layout(self) -> Layout:
        """Right-padded to the longest sequence."""
        lengths = self.lengths
        width = int(lengths.max()) if len(self) else 0
        first = torch.arange(len(self)) * width
        input_ids = torch.zeros(len(self) * width, dtype=torch.int64, device=self.device)
        input_ids[spans(first, lengths).to(self.device)] = self.tokens
        mask = (torch.arange(width) < lengths.unsqueeze(1)).long()
        predicting = spans(first + self.prompt_lengths - 1, self.response_lengths)
        return Layout(
            input_ids.view(len(self), width),
            mask.to(self.device),
            predicting.to(self.device),
            (first + lengths - 1).to(self.device),
        )


def starts(lengths: Tensor) -> Tensor:
    """[B]: where each of B spans begins when they are laid end to end."""
    return lengths.cumsum(0) - lengths


def spans(begin: Tensor, lengths: Tensor) -> Tensor:
    """[Σ length] int64 on the CPU: begin[0], begin[0] + 1, … for each span in turn."""
    offset = (begin - starts(lengths)).repeat_interleave(lengths)
    return offset + torch.arange(len(offset))
