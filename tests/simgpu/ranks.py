"""Run on one of several ranks, each with a simulated device of its own.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python -m tests.simgpu.ranks NAME FOLDER
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python -m tests.simgpu.ranks example

Each process sees one device, as under a scheduler that assigns a GPU to each. Gloo serves the
collectives. NAME is one of `VARIANTS`: the first rank saves weights and metrics, and every rank
prints its counts. `example` runs examples/fsdp2.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.simgpu import device, examples, phases
from tests.simgpu.counts import counts

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "learning_rate": 1e-4,
    "iterations": 1,
    "rollout_batch_size": 8,
    "microbatch_size": 2,
    "max_new_tokens": 4,
    "ppo_epochs": 1,
    "minibatches": 2,
}
"""An iteration of two steps."""

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32", "iterations": 2},
    "lora": {"lora_rank": 4},
    "critic": {"value_model": "critic", "param_dtype": "bfloat16", "model_dtype": "bfloat16"},
}
"""Further options: fp32, fp32 weights under bf16 autocast, and weights in bf16."""


def train(name: str, folder: Path) -> None:
    """Train by the options of a variant."""
    import many_ranks
    import torch

    from fastppo.data.world import is_first

    phases.follow()
    result = many_ranks.train(str(folder), OPTIONS | VARIANTS[name])
    if is_first():
        result["weights"] = {name: weight.cpu() for name, weight in result["weights"].items()}
        torch.save(result, folder / "result.pt")
    print("\n" + json.dumps(counts.summary()), flush=True)


def main() -> None:
    os.environ["LOCAL_RANK"] = "0"
    device.install()
    import torch

    from fastppo.data.world import leave

    torch.set_num_threads(1)
    if sys.argv[1] == "example":
        examples.module("fsdp2", EPISODES=8, MINIBATCHES=2).train(1)
    else:
        train(sys.argv[1], Path(sys.argv[2]))
    leave()


if __name__ == "__main__":
    main()
