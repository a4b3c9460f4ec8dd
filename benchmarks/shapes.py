"""What is measured: today's models by name, and the sets of work for a CPU and for a GPU.

Vocabulary and hidden size are those of the models' published configurations, padding of the
embedding included, because the lm-head computes the padding too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Model(NamedTuple):
    """The two sizes of a language model that a loss can see."""

    name: str
    vocab: int
    hidden: int


MODELS = {
    model.name: model
    for model in (
        Model("gpt2", 50257, 768),
        Model("llama-68m", 32000, 768),
        Model("tinyllama-1.1b", 32000, 2048),
        Model("llama-3.2-1b", 128256, 2048),
        Model("llama-3.1-8b", 128256, 4096),
        Model("qwen2.5-7b", 152064, 3584),
        Model("qwen3-8b", 151936, 4096),
        Model("gemma-2-9b", 256000, 3584),
    )
}


class Tokens(NamedTuple):
    """N tokens of a model's output."""

    model: Model
    n: int

    def __str__(self) -> str:
        return f"{self.model.name}, N={self.n}"


class Sequences(NamedTuple):
    """A batch of B responses of up to T tokens; see `cases.response_mask` for their lengths."""

    batch: int
    length: int

    def __str__(self) -> str:
        return f"B={self.batch}, T={self.length}"


class Work(NamedTuple):
    """One set: which shapes run, in which dtype, and how long each provider is timed."""

    name: str
    dtype: torch.dtype
    logits: tuple[Tokens, ...]
    linear: tuple[Tokens, ...]
    sequences: tuple[Sequences, ...]
    seconds_per_provider: float
    min_calls: int


SETS = {
    ("cpu", "quick"): Work(
        "quick",
        torch.float32,
        logits=(Tokens(MODELS["tinyllama-1.1b"], 128),),
        linear=(Tokens(MODELS["llama-68m"], 128),),
        sequences=(Sequences(64, 1024),),
        seconds_per_provider=0.5,
        min_calls=3,
    ),
    ("cpu", "default"): Work(
        "default",
        torch.float32,
        logits=(Tokens(MODELS["tinyllama-1.1b"], 512), Tokens(MODELS["gpt2"], 333)),
        linear=(Tokens(MODELS["llama-68m"], 1024),),
        sequences=(Sequences(64, 4096),),
        seconds_per_provider=2.0,
        min_calls=5,
    ),
    ("cuda", "quick"): Work(
        "quick",
        torch.bfloat16,
        logits=(Tokens(MODELS["llama-3.2-1b"], 4096),),
        linear=(Tokens(MODELS["llama-3.2-1b"], 4096),),
        sequences=(Sequences(512, 4096),),
        seconds_per_provider=0.3,
        min_calls=3,
    ),
    ("cuda", "default"): Work(
        "default",
        torch.bfloat16,
        logits=(Tokens(MODELS["qwen3-8b"], 8192), Tokens(MODELS["gpt2"], 8191)),
        linear=(Tokens(MODELS["qwen3-8b"], 8192),),
        sequences=(Sequences(2048, 4096), Sequences(64, 131072)),  # 8.4 M tokens, both
        seconds_per_provider=1.0,
        min_calls=3,
    ),
}
"""By device type and set. Odd sizes (gpt2's vocabulary, 333 rows) are there on purpose."""
