"""Small language models, fine-tuned from random weights on a recipe's demonstrations.

A CPU trains these Llamas in seconds. They have one token per character, so that all digits of a
number are visible; recipes with texts use one token per word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fastppo.data.datasets import Rows
from fastppo.stages.sft import SFTConfig, train_sft

CHARACTERS = "0123456789+-*=?[]; "
PIECES = re.compile(r"\w+|[^\w\s]")
"""Pattern of the words, numbers and punctuation marks of a text."""


def make_tokenizer(
    pieces: Sequence[str] = CHARACTERS, pattern: str = r"[\s\S]"
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per piece; `pattern` finds the pieces in a text."""
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<eos>", "<unk>", *pieces])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model_config(
    hidden: int = 128, layers: int = 2, vocabulary: int = len(CHARACTERS) + 3, context: int = 64
) -> LlamaConfig:
    """Return the config of a small Llama, by default over the characters."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=context,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )


def train_from_scratch(
    directory: Path,
    rows: Rows,
    seed: int,
    console: Console,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    hidden: int = 128,
    context: int = 64,
    **options: Any,
) -> None:
    """Fine-tune a model from random weights on `rows` and save it in `directory`.

    Args:
        tokenizer: the tokenizer; by default one token per character.
        hidden: the width of the model.
        context: the context length in tokens.
        options: options of SFTConfig; they override the defaults below.
    """
    defaults: dict[str, Any] = {
        "epochs": 10,
        "batch_size": 64,
        "gradient_accumulation": 1,
        "learning_rate": 2e-3,
        "eval_share": 0,
        "checkpoint_interval": 0,
        "device": "cpu",
    }
    tokenizer = tokenizer or make_tokenizer()
    torch.manual_seed(seed)
    train_sft(
        SFTConfig(output_dir=str(directory), seed=seed, **defaults | options),
        model=LlamaForCausalLM(model_config(hidden, 2, len(tokenizer), context)),
        tokenizer=tokenizer,
        rows=rows,
        console=console,
    )
