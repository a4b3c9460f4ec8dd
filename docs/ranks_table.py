"""Writes the memory table of docs/many-gpus.md: what a rank needs, by the parts of `fastppo plan`.

    python docs/ranks_table.py

The parts of a plan for one GPU are divided as ranks divide them, and what is gathered comes on
top: the whole policy in the rollout; in the update the root's group and two layers, the one that
runs and the next, with their gradients. Configs alone; nothing is downloaded.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fastppo.models.trunk import layers_of
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.memory import GB, Phase, make_plan

PAGE = Path(__file__).parent / "many-gpus.md"
PROMPT_TOKENS = 512
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "param_dtype": "bfloat16",
    "gradient_checkpointing": True,
    "microbatch_size": 4,
    "generate_batch_size": 16,
}
"""Of every run; the rest are defaults, 64 sequences an iteration and 128 tokens among them: those
are of one rank here."""

SIZES: dict[str, tuple[int, dict[str, int]]] = {
    "7B on 8": (
        8,
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 32000,
        },
    ),
    "32B on 8": (
        8,
        {
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "vocab_size": 152064,
        },
    ),
    "70B on 64": (
        64,
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
}
SHARDED = ("fp32 masters", "gradients", "optimiser states", "reference")
LOCAL = ("KV cache", "logits of the loss", "dW of the loss", "activations", "value function")
MEMORIES = (80, 141)


def gathered(config: LlamaConfig) -> tuple[int, int]:
    """Bytes in bf16: (the whole policy; the root's group and two layers)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layer = sum(p.numel() for p in layers_of(model.base_model)[0].parameters())
    head = model.get_output_embeddings().weight.numel()
    return 2 * sum(p.numel() for p in model.parameters()), 2 * (head + 2 * layer)


def rank_parts(phase: Phase, ranks: int, whole: int, some: int) -> list[float]:
    """GB of a rank: shards, what is gathered (with its gradients in an update), the rest."""
    shards = sum(phase.parts[name] for name in SHARDED) / ranks
    taken = whole if phase.name == "rollout" else some * (2 if phase.name == "update" else 1)
    return [part / GB for part in (shards, taken, sum(phase.parts[name] for name in LOCAL))]


def table() -> str:
    """The rows, as Markdown."""
    lines = [
        "| model | phase | shards | gathered | KV cache, logits, activations | in all | 80 GB "
        "| 141 GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as directory:
        for size, (ranks, shape) in SIZES.items():
            config = LlamaConfig(**shape, max_position_embeddings=4096)
            config.save_pretrained(f"{directory}/{size}")
            options = PPOConfig(model=f"{directory}/{size}", **OPTIONS)
            whole, some = gathered(config)
            for phase in make_plan(options, PROMPT_TOKENS, max(MEMORIES)).phases:
                if phase.name == "scores":
                    continue
                parts = rank_parts(phase, ranks, whole, some)
                fits = ["yes" if sum(parts) <= memory else "no" for memory in MEMORIES]
                numbers = [f"{part:.1f}" for part in (*parts, sum(parts))]
                lines.append(f"| {' | '.join([size, phase.name, *numbers, *fits])} |")
                print(lines[-1], flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    page = PAGE.read_text("utf-8")
    rows = re.compile(r"^\| model \| phase .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
    PAGE.write_text(rows.sub(lambda _: table() + "\n", page, count=1), "utf-8")
