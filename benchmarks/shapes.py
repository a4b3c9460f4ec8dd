"""Define the sizes of the suite: models by name, and the sets of work for a CPU and a GPU.

Sizes come from the models' published configurations, including the padding of the embedding, which
the lm-head also computes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Model(NamedTuple):
    """Sizes of a language model. Losses use the first two; a trainer uses all of them."""

    name: str
    vocab: int
    hidden: int
    family: str = "llama"
    """Architecture, a `model_type` of transformers."""
    intermediate: int = 0
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0


MODELS = {
    model.name: model
    for model in (
        Model("gpt2", 50257, 768, "gpt2", 3072, 12, 12, 12),
        Model("stories15m", 32000, 288, "llama", 768, 6, 6, 6),
        Model("llama-68m", 32000, 768, "llama", 3072, 2, 12, 12),
        Model("tinyllama-1.1b", 32000, 2048, "llama", 5632, 22, 32, 4),
        Model("llama-2-7b", 32000, 4096, "llama", 11008, 32, 32, 32),
        Model("llama-3.2-1b", 128256, 2048, "llama", 8192, 16, 32, 8),
        Model("llama-3.1-8b", 128256, 4096, "llama", 14336, 32, 32, 8),
        Model("ministral-8b", 131072, 4096, "llama", 12288, 36, 32, 8),
        Model("qwen2.5-0.5b", 151936, 896, "qwen2", 4864, 24, 14, 2),
        Model("qwen2.5-1.5b", 151936, 1536, "qwen2", 8960, 28, 12, 2),
        Model("qwen2.5-7b", 152064, 3584, "qwen2", 18944, 28, 28, 4),
        Model("qwen3-8b", 151936, 4096, "qwen3", 12288, 36, 32, 8),
        Model("gemma-2-9b", 256000, 3584, "gemma2", 14336, 42, 16, 8),
    )
}
"""Models by name. Losses ignore Gemma's soft-cap, since not every peer supports one."""


class Tokens(NamedTuple):
    """N tokens of a model's output."""

    model: Model
    n: int

    def __str__(self) -> str:
        return f"{self.model.name}, N={self.n}"


class Sequences(NamedTuple):
    """A batch of B responses of up to T tokens; `sequences.response_lengths` has the lengths."""

    batch: int
    length: int

    def __str__(self) -> str:
        return f"B={self.batch}, T={self.length}"


class Training(NamedTuple):
    """A trainer's batch: B prompts of P tokens, responses of R tokens, a model cut to `layers`."""

    model: Model
    layers: int
    batch: int
    prompt: int
    response: int
    microbatch: int

    def __str__(self) -> str:
        cut = f"{self.layers}/{self.model.layers} layers"
        return f"{self.model.name}, {cut}, B={self.batch}, T={self.prompt}+{self.response}"


class Sweep(NamedTuple):
    """A case at several sizes, to fit the growth of its cost."""

    case: str
    """Name of the case."""
    variable: str
    """Size that grows: N (tokens), V (vocabulary) or T (time)."""
    shapes: tuple[Tokens, ...] | tuple[Sequences, ...]


class Work(NamedTuple):
    """Set of work: dtype and shapes."""

    dtype: torch.dtype
    logits: tuple[Tokens, ...]
    linear: tuple[Tokens, ...]
    sequences: tuple[Sequences, ...]
    update: tuple[Training, ...]
    sweeps: tuple[Sweep, ...]


def over_tokens(case: str, model: str, sizes: tuple[int, ...]) -> Sweep:
    return Sweep(case, "N", tuple(Tokens(MODELS[model], n) for n in sizes))


def over_vocabularies(case: str, models: tuple[str, ...], n: int) -> Sweep:
    return Sweep(case, "V", tuple(Tokens(MODELS[name], n) for name in models))


def over_time(case: str, batch: int, lengths: tuple[int, ...]) -> Sweep:
    return Sweep(case, "T", tuple(Sequences(batch, length) for length in lengths))


VOCABULARIES = ("llama-2-7b", "gpt2", "llama-3.1-8b", "qwen2.5-7b", "gemma-2-9b")

SETS = {
    ("cpu", "quick"): Work(
        torch.float32,
        logits=(Tokens(MODELS["tinyllama-1.1b"], 64),),
        linear=(Tokens(MODELS["stories15m"], 64),),
        sequences=(Sequences(64, 1024),),
        update=(Training(MODELS["stories15m"], 1, 2, 8, 8, 2),),
        sweeps=(over_time("gae", 16, (256, 1024)),),
    ),
    ("cpu", "default"): Work(
        torch.float32,
        logits=(Tokens(MODELS["tinyllama-1.1b"], 512), Tokens(MODELS["gpt2"], 333)),
        linear=(Tokens(MODELS["llama-68m"], 1024),),
        sequences=(Sequences(64, 4096),),
        update=(Training(MODELS["llama-68m"], 2, 8, 32, 32, 4),),
        sweeps=(
            over_tokens("ppo_loss", "tinyllama-1.1b", (64, 128, 256, 512, 1024)),
            over_vocabularies("ppo_loss", VOCABULARIES, 64),
            over_tokens("linear_ppo_loss", "llama-68m", (64, 128, 256, 512)),
            over_time("gae", 64, (256, 512, 1024, 2048, 4096, 8192)),
        ),
    ),
    ("cuda", "quick"): Work(
        torch.bfloat16,
        logits=(Tokens(MODELS["llama-3.2-1b"], 4096),),
        linear=(Tokens(MODELS["llama-3.2-1b"], 4096),),
        sequences=(Sequences(512, 4096),),
        update=(Training(MODELS["llama-3.2-1b"], 1, 16, 128, 128, 8),),
        sweeps=(over_time("gae", 64, (1024, 8192)),),
    ),
    ("cuda", "default"): Work(
        torch.bfloat16,
        logits=(Tokens(MODELS["qwen3-8b"], 8192), Tokens(MODELS["gpt2"], 8191)),
        # H from 896 to 4096, V from 32000 to 151936; the sweeps vary N. For the last two shapes,
        # peers have published times: see `predictions`.
        linear=(
            Tokens(MODELS["qwen3-8b"], 8192),
            Tokens(MODELS["llama-3.2-1b"], 8192),
            Tokens(MODELS["qwen2.5-0.5b"], 8192),
            Tokens(MODELS["llama-2-7b"], 8192),
            Tokens(MODELS["llama-3.1-8b"], 8192),
            Tokens(MODELS["ministral-8b"], 8192),
        ),
        sequences=(Sequences(2048, 4096), Sequences(64, 131072)),  # 8.4 M tokens, both
        update=(Training(MODELS["llama-3.2-1b"], 4, 32, 512, 512, 8),),
        sweeps=(
            over_tokens("linear_ppo_loss", "qwen3-8b", (2048, 8192, 32768)),
            over_tokens("linear_ppo_loss", "llama-3.2-1b", (2048, 8192, 32768)),
            over_tokens("linear_ppo_loss", "qwen2.5-0.5b", (2048, 8192, 32768)),
            over_tokens("linear_ppo_loss", "llama-2-7b", (2048, 8192, 32768)),
            over_tokens("linear_token_logprobs", "qwen3-8b", (2048, 8192, 32768)),
            over_tokens("ppo_loss", "qwen3-8b", (1024, 2048, 4096, 8192, 16384)),
            over_vocabularies("ppo_loss", VOCABULARIES, 4096),
            # These come last, since the peers' loops over T are slow Python on any device.
            over_time("gae", 64, (2048, 8192, 32768)),
        ),
    ),
}
"""Sets by device type and name. The odd sizes (gpt2's vocabulary, 333 rows) are deliberate."""
