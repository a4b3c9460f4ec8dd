"""What a decoder has drawn, and the rollout that it becomes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastppo.rollout import FINISHED, TRUNCATED, Rollout
from fastppo.rollout.draw import Draws


class ResponseRecord:
    """Tokens, logprobs and values of responses, [rows, tokens] each, in memory that stays in place.

    Args:
        has_values: whether a value is recorded for each token.
    """

    def __init__(self, rows: int, tokens: int, device: torch.device, *, has_values: bool) -> None:
        self.tokens = torch.zeros(rows, tokens, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, tokens, device=device)
        self.sampler_logprobs = torch.zeros(rows, tokens, device=device)
        self.values = torch.zeros(rows, tokens, device=device) if has_values else None

    def write(
        self, rows: Tensor, column: Tensor | int, *, draws: Draws, values: Tensor | None
    ) -> None:
        """Records one token of each of the rows [L]; `values` [L] are of the states before them."""
        self.tokens[rows, column] = draws.tokens
        self.logprobs[rows, column] = draws.logprobs
        self.sampler_logprobs[rows, column] = draws.sampler_logprobs
        if self.values is not None:
            assert values is not None
            self.values[rows, column] = values.to(self.values.dtype)

    def rollout(
        self, lengths: Sequence[int], finished: Sequence[bool], final_values: Tensor | None
    ) -> Rollout:
        """The first rows as a rollout.

        Args:
            lengths: of their responses, tokens.
            finished: whether each ended by itself.
        """
        longest = max(lengths)

        def cut(recorded: Tensor) -> list[Tensor]:
            rows = recorded[: len(lengths), :longest].cpu()
            return [row[:length].clone() for row, length in zip(rows, lengths, strict=True)]

        return Rollout(
            tokens=[tokens.tolist() for tokens in cut(self.tokens)],
            finish_reasons=[FINISHED if ended else TRUNCATED for ended in finished],
            sampler_logprobs=cut(self.sampler_logprobs),
            logprobs=cut(self.logprobs),
            values=None if self.values is None else cut(self.values),
            final_values=final_values,
        )
