"""Weights in fp32 and in bfloat16 with fp32 masters, on the demo's task, five seeds.

    python docs/study_weight_dtypes.py runs/weight-dtypes

Trains the demo's first two stages per seed, then PPO with the recipe's options and each dtype of
the weights, and prints what `PPOTrainer.evaluate` gives on held-out prompts. What is there already
is not run again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from fastppo.data.prompts import encode_prompts
from fastppo.data.rows import load_rows
from fastppo.demo.run import ppo_config, supervised_stages
from fastppo.ppo.trainer import PPOTrainer

DTYPES = ("float32", "bfloat16")
METRICS = ("reward", "monitor/gold_reward", "kl")


def run(directory: Path, seed: int, dtype: str, console: Console) -> dict[str, dict[str, float]]:
    """{before, after}: the metrics of the SFT model and of the policy."""
    stages, output = directory / f"seed-{seed}", directory / f"seed-{seed}" / dtype
    found = output / "evaluations.json"
    if found.exists():
        return json.loads(found.read_text())
    if not (stages / "reward_model" / "config.json").exists():
        supervised_stages(stages, seed=seed, device="cpu", console=console)
    config = ppo_config(stages, output, seed=seed, device="cpu", param_dtype=dtype)
    trainer = PPOTrainer(config, console=console)
    rows = load_rows(str(stages / "data" / "held_out.jsonl"))
    held_out = encode_prompts(rows, trainer.tokenizer, max_prompt_tokens=24)
    evaluations = {}
    for when in ("before", "after"):
        if when == "after":
            trainer.train()
        result = trainer.evaluate(held_out)
        evaluations[when] = {name: float(result[name]) for name in METRICS}
    found.write_text(json.dumps(evaluations))
    return evaluations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    console = Console(width=100)
    table = Table("seed", "weights", "gold before", "gold after", "proxy after", "KL after")
    after: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    for seed in range(arguments.seeds):
        for dtype in DTYPES:
            found = run(arguments.directory, seed, dtype, console)
            numbers = [
                found["before"]["monitor/gold_reward"],
                found["after"]["monitor/gold_reward"],
            ]
            numbers += [found["after"]["reward"], found["after"]["kl"]]
            table.add_row(str(seed), dtype, *(f"{number:.3f}" for number in numbers))
            after[dtype].append(numbers[1])
    console.print(table)
    for dtype, gold in after.items():
        console.print(f"{dtype}: gold {np.mean(gold):.3f} ± {np.std(gold, ddof=1):.3f}")


if __name__ == "__main__":
    main()
