"""A small language model over digits and signs, made from scratch by a few demonstrations.

One token per character, so that nothing about numbers hides in a vocabulary; a Llama that a CPU
trains in seconds. What it learned from demonstrations is where PPO starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fastppo.data.rows import Rows
from fastppo.stages.sft import SFTConfig, train_sft

CHARACTERS = "0123456789+-*=?[]; "


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of `CHARACTERS`."""
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model_config(hidden: int = 128, layers: int = 2) -> LlamaConfig:
    """A Llama over the characters."""
    return LlamaConfig(
        vocab_size=len(CHARACTERS) + 3,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )


def train_from_scratch(
    directory: Path, rows: Rows, seed: int, console: Console, **options: Any
) -> None:
    """A model with random weights, fine-tuned on `rows` and saved in `directory`.

    Args:
        options: of SFTConfig; they override those below.
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
    torch.manual_seed(seed)
    train_sft(
        SFTConfig(output_dir=str(directory), seed=seed, **defaults | options),
        model=LlamaForCausalLM(model_config()),
        tokenizer=make_tokenizer(),
        rows=rows,
        console=console,
    )
