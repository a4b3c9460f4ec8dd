"""Writes the table of docs/memory.md: what runs of three sizes need, by `fastppo plan`.

    python docs/plan_table.py

The models are configs alone, of Llama's shape; nothing is downloaded. A few minutes.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from fastppo.ppo.config import PPOConfig
from fastppo.ppo.memory import GB, make_plan

PAGE = Path(__file__).parent / "memory.md"
PROMPT_TOKENS = 512
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "gradient_checkpointing": True,
    "microbatch_size": 8,
    "generate_batch_size": 16,
}
"""Of every run; the rest are defaults: 64 sequences an iteration, responses of 128 tokens."""

SIZES: dict[str, dict[str, int]] = {
    "0.5B": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
    "1.5B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 26},
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
}
"""Heads are 128 wide, as many for keys as for queries; the vocabulary has 32000 tokens."""

RUNS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, `reference_offload`": {"reference_offload": True},
    "full, `reference_offload`, `param_dtype: bfloat16`": {
        "reference_offload": True,
        "param_dtype": "bfloat16",
    },
    "full, the same, `optimizer: adamw8bit`": {
        "reference_offload": True,
        "param_dtype": "bfloat16",
        "optimizer": "adamw8bit",
    },
    "`lora_rank: 16`": {"lora_rank": 16},
    "`lora_rank: 16`, `param_dtype: bfloat16`": {"lora_rank": 16, "param_dtype": "bfloat16"},
}
MEMORIES = (80, 141)


def table() -> str:
    """The rows, as Markdown."""
    lines = [
        "| model | run | rollout | experience | update | without checkpointing | 80 GB | 141 GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as directory:
        for size, shape in SIZES.items():
            heads = shape["hidden_size"] // 128
            config = LlamaConfig(**shape, num_attention_heads=heads, max_position_embeddings=4096)
            config.save_pretrained(f"{directory}/{size}")
            for run, more in RUNS.items():
                options = PPOConfig(model=f"{directory}/{size}", **OPTIONS, **more)
                plan = make_plan(options, PROMPT_TOKENS, max(MEMORIES))
                needs = [phase.total / GB for phase in (*plan.phases, plan.other_update)]
                peak = plan.peak.total / GB
                fits = ["yes" if peak <= memory else "no" for memory in MEMORIES]
                cells = [size, run, *(f"{need:.1f}" for need in needs), *fits]
                lines.append(f"| {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    page = PAGE.read_text("utf-8")
    rows = re.compile(r"^\| model \| run .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
    PAGE.write_text(rows.sub(lambda _: table() + "\n", page, count=1), "utf-8")
