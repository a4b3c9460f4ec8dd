"""Measures what a process holds as there are more of them, on CPUs, and writes the second memory
table of docs/many-gpus.md.

    python docs/ranks_memory.py

A Llama of 34 million weights, in fp32, and its reference. Counted are the bytes of weights,
gradients, moments and reference between two steps; measured is by how much the process grew from
before it made the trainer, the kernel's own count: at the end of that, at most in it, and at most
in an update and in a rollout. A process of Linux can set back what the kernel remembers
(/proc/self/clear_refs).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from fastppo.data.world import join, leave
from fastppo.models.sharding import reshard
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer

PAGE = Path(__file__).parent / "many-gpus.md"
ROOT = PAGE.parents[1]
COUNTS = (1, 2, 4)
MB = 10**6
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
}
COLUMNS = {
    "counted": "weights, gradients, moments, reference: counted",
    "loading": "at most while loading",
    "update": "at most in an update",
    "rollout": "at most in a rollout",
}


def memory(name: str) -> int:
    """Bytes of this process: VmRSS, now, or VmHWM, the most since `forget`."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(found)


def forget() -> None:
    """VmHWM is set back to VmRSS."""
    Path("/proc/self/clear_refs").write_text("5")


def held_bytes(trainer: PPOTrainer) -> int:
    """Of weights, gradients, moments and reference."""
    reshard(trainer.model)
    held: list[Any] = [*trainer.model.parameters(), *(p.grad for p in trainer.model.parameters())]
    held += [x for entry in trainer.optimizer.state.values() for x in entry.values()]
    assert trainer.reference is not None
    assert trainer.reference.frozen is not None
    held += trainer.reference.frozen.parameters()
    local = [x.to_local() if isinstance(x, DTensor) else x for x in held if x is not None]
    return sum(x.numel() * x.element_size() for x in local)


def work(folder: Path) -> dict[str, int]:
    """What one process finds of itself, bytes."""
    torch.set_num_threads(1)
    join(torch.device("cpu"))
    before = memory("VmRSS")
    forget()
    options: dict[str, Any] = {"iterations": 1, "ppo_epochs": 1, "minibatches": 1}
    options |= {"microbatch_size": 4, "max_new_tokens": 8, "output_dir": str(folder / "run")}
    config = PPOConfig(model=str(folder / "model"), device="cpu", precision="fp32", **options)
    trainer = PPOTrainer(config)
    found = {"loading": memory("VmHWM") - before}
    given = [[i, i + 1] for i in range(4)], [[i + 2, i + 3] for i in range(4)], [0.0, 1.0, 0.0, 1.0]
    trainer.step(*given)
    forget()
    keep: dict[str, int] = {}
    zero_grad = trainer.optimizer.zero_grad

    def count_first(*args: Any, **more: Any) -> None:  # after the step, before gradients go
        keep["counted"] = max(keep.get("counted", 0), held_bytes(trainer))
        zero_grad(*args, **more)

    trainer.optimizer.zero_grad = count_first
    trainer.step(*given)
    found |= keep | {"update": memory("VmHWM") - before}
    forget()
    trainer.engine.generate(given[0], trainer.sampling)
    return found | {"rollout": memory("VmHWM") - before}


def save_model(folder: Path) -> None:
    """The model that the processes load."""
    tokens = {"<eos>": 0} | {f"w{i}": i for i in range(1, 64)}
    words = Tokenizer(models.WordLevel(tokens, unk_token="<eos>"))
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    model.save_pretrained(folder / "model")
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(
        folder / "model"
    )


def measure(count: int, folder: Path) -> dict[str, int]:
    """The most of any of `count` processes, bytes, by column."""
    script = [str(Path(__file__).resolve()), "--work", str(folder)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    # Freed memory goes back at once, so that the kernel's count is of what is held.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(count)]
    subprocess.run(
        [*launch, "--standalone", *script],
        env=os.environ | allocator | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        check=True,
    )
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(count)]
    return {name: max(rank[name] for rank in ranks) for name in COLUMNS}


def table() -> str:
    """The rows, as Markdown."""
    lines = [f"| processes | {' | '.join(COLUMNS.values())} |", "|---|" + "---|" * len(COLUMNS)]
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory))
        for count in COUNTS:
            found = measure(count, Path(directory))
            numbers = " | ".join(f"{found[name] / MB:.0f}" for name in COLUMNS)
            lines.append(f"| {count} | {numbers} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        found = work(Path(sys.argv[2]))
        rank = os.environ.get("RANK", "0")
        (Path(sys.argv[2]) / f"rank-{rank}.json").write_text(json.dumps(found))
        leave()
    else:
        page = PAGE.read_text("utf-8")
        rows = re.compile(r"^\| processes \| .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
        PAGE.write_text(rows.sub(lambda _: table(), page, count=1), "utf-8")
