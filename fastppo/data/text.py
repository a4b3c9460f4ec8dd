"""Pretraining text for PPO-ptx: blocks of tokens whose language-model loss joins the update.

    loss = loss_PPO + γ · E_text[−log π(text)]          (Ouyang et al. 2022, eq. 2)

As in pretraining, texts are concatenated, each followed by EOS, and split into blocks of equal
length; the remainder is dropped. Blocks are visited in shuffled epochs, like prompts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastppo.data.datasets import DataError, Rows, visiting_order
from fastppo.functional.scalars import describe

BLOCK_TOKENS = 256
"""Length of a block, tokens, unless the model's context is shorter."""


def block_tokens(context: int | None) -> int:
    """Return the length of a block for a model of this context, tokens."""
    return BLOCK_TOKENS if context is None else min(BLOCK_TOKENS, context)


class PretrainingText:
    """Blocks of tokens [M, block_size].

    Raises:
        DataError: a row has no column `text`, or there is less text than one block.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: Any,
        block_size: int,
        *,
        source: str = "ptx_data",
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise DataError(f"{source}: the tokenizer has no EOS token to separate texts")
        stream: list[int] = []
        for number, row in enumerate(rows, 1):
            text = row.get("text")
            if not isinstance(text, str):
                raise DataError(
                    f"{source}, row {number}: column 'text' must be a string, got {describe(text)}"
                )
            stream += tokenizer(text)["input_ids"]
            if stream[-1:] != [tokenizer.eos_token_id]:  # some tokenizers end every text with it
                stream.append(tokenizer.eos_token_id)
        count = len(stream) // block_size
        if count == 0:
            raise DataError(
                f"{source}: expected at least one block of {block_size} tokens, "
                f"got {len(stream)} tokens in total"
            )
        self.blocks = torch.tensor(stream[: count * block_size]).view(count, block_size)

    def __len__(self) -> int:
        return len(self.blocks)

    def at(self, start: int, count: int, seed: int) -> Tensor:
        """Return [count, block_size] blocks from position `start` of the shuffled epochs."""
        return self.blocks[visiting_order(len(self), start, count, seed)]
