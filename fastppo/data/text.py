"""Pretraining text for PPO-ptx: blocks of tokens whose language-model loss joins the update.

    loss = loss_PPO + γ · E_text[−log π(text)]          (Ouyang et al. 2022, eq. 2)

Texts are laid end to end, each closed by EOS, and cut into blocks of one length, as in pretraining;
what does not fill the last block is left out. Blocks are visited in the shuffled order of epochs
that prompts are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastppo.data.chat import check_text
from fastppo.data.rows import DataError, Rows, visiting_order
from fastppo.functional.scalars import describe


class PretrainingText:
    """Blocks of tokens [M, block_size].

    Raises:
        DataError: a row without the column, or less text than one block.
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
            raise DataError(f"{source}: the tokenizer has no EOS token to put between texts")
        stream: list[int] = []
        for number, row in enumerate(rows, 1):
            text = row.get("text")
            if not isinstance(text, str):
                raise DataError(
                    f"{source}, row {number}: column 'text' must hold a text, got {describe(text)}"
                )
            check_text(text, f"{source}, row {number}")
            stream += tokenizer(text)["input_ids"]
            if stream[-1:] != [tokenizer.eos_token_id]:  # some tokenizers end every text with it
                stream.append(tokenizer.eos_token_id)
        count = len(stream) // block_size
        if count == 0:
            raise DataError(
                f"{source}: {len(stream)} tokens in all; expected at least one block of "
                f"{block_size}"
            )
        self.blocks = torch.tensor(stream[: count * block_size]).view(count, block_size)

    def __len__(self) -> int:
        return len(self.blocks)

    def at(self, start: int, count: int, seed: int) -> Tensor:
        """[count, block_size] blocks from position `start` of the endless shuffled epochs."""
        return self.blocks[visiting_order(len(self), start, count, seed)]
