"""`fastppo demo`: supervised fine-tuning, a reward model and PPO on the built-in task.

The demo uses the same functions as your own run: it writes its data as JSONL, trains the three
stages and saves a policy for transformers.
"""

from __future__ import annotations

import shutil
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from fastppo.data.datasets import write_rows
from fastppo.data.prompts import encode_prompts
from fastppo.demo.task import gold_reward, make_data, make_tokenizer
from fastppo.models.device import choose_device
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.setup.build import world_of
from fastppo.ppo.trainer import PPOTrainer
from fastppo.run.progress import say
from fastppo.stages.reward_model import RewardModelConfig, train_reward_model
from fastppo.stages.sft import SFTConfig, train_sft
from fastppo.stopped import Stopped


def model_config(vocabulary: int) -> LlamaConfig:
    """Return the config of a two-layer Llama; a CPU trains it in seconds."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )


def run_demo(
    output_dir: str | Path = "runs/demo",
    *,
    seed: int = 0,
    device: str = "auto",
    iterations: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run the three stages and print the results.

    Args:
        output_dir: the folder for data/, sft/, reward_model/ and ppo/.
        iterations: number of PPO iterations; by default that of demo.yaml.

    Returns:
        dict: `before` and `after`, the results of `PPOTrainer.evaluate` on held-out prompts;
        `reward_model`, metrics of the reward model; `report` and `policy`, paths; `seconds`.
    """
    start = time.perf_counter()
    output_dir = Path(output_dir)
    console = console or Console()
    options: dict[str, Any] = {"seed": seed, "device": device}
    if iterations is not None:
        options["iterations"] = iterations
    # Comes first, so that a wrong option fails before the first two stages are trained.
    config = ppo_config(output_dir, output_dir / "ppo", **options)
    world = world_of(config)
    if world.size > 1:
        raise ValueError(f"the demo runs in one process, got {world.size}")
    earlier = output_dir / "ppo"
    if earlier.exists():
        say(console, f"{earlier} of an earlier demo is replaced after the first two stages")
    try:
        data, rewards = supervised_stages(output_dir, seed=seed, device=device, console=console)
        shutil.rmtree(earlier, ignore_errors=True)
        trainer = PPOTrainer(config, console=console, world=world)
        held_out = encode_prompts(data["held_out"], trainer.tokenizer, max_prompt_tokens=24)
        before = trainer.evaluate(held_out)
        trainer.train()
        after = trainer.evaluate(held_out)
    except Stopped as stopped:  # a stage's message names `--resume`; the demo has none
        raise Stopped(stopped.signum, "; `fastppo demo` starts over") from None
    result = {
        "before": before,
        "after": after,
        "reward_model": rewards,
        "report": output_dir / "ppo" / "report.html",
        "policy": output_dir / "ppo" / "policy",
        "seconds": time.perf_counter() - start,
    }
    _print(console, held_out.prompts, result)
    return result


def ppo_config(stages_dir: Path, output_dir: Path, **options: Any) -> PPOConfig:
    """Return the options of demo.yaml for the models in `stages_dir`; `options` override them."""
    defaults = yaml.safe_load(files("fastppo.demo").joinpath("demo.yaml").read_text())
    defaults |= {
        "model": str(stages_dir / "sft"),
        "prompts": str(stages_dir / "data" / "prompts.jsonl"),
        "rewards": [str(stages_dir / "reward_model")],
        "monitor_rewards": ["fastppo.demo.task:gold_reward"],
        "output_dir": str(output_dir),
    }
    return PPOConfig(**defaults | options)


def supervised_stages(
    output_dir: str | Path, *, seed: int, device: str, console: Console | None = None
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, float]]:
    """Train stages 1 and 2: write data/, sft/ and reward_model/.

    Returns:
        (the task's data by name, the metrics of `train_reward_model`).
    """
    output_dir = Path(output_dir)
    console = console or Console()
    for stage in ("sft", "reward_model"):
        shutil.rmtree(output_dir / stage, ignore_errors=True)  # of an earlier demo
    if choose_device(device).type == "cpu":
        torch.set_num_threads(1)  # faster for models this small
    data = make_data(seed)
    (output_dir / "data").mkdir(parents=True, exist_ok=True)
    for name, rows in data.items():
        write_rows(output_dir / "data" / f"{name}.jsonl", rows)
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = model_config(len(tokenizer))

    options: dict[str, Any] = {
        "batch_size": 64,
        "gradient_accumulation": 1,
        "seed": seed,
        "device": device,
        "checkpoint_interval": 0,
    }
    sft = train_sft(
        SFTConfig(
            output_dir=str(output_dir / "sft"),
            epochs=3,
            learning_rate=5e-3,
            eval_share=0,
            **options,
        ),
        model=LlamaForCausalLM(config),
        tokenizer=tokenizer,
        rows=data["demonstrations"],
        console=console,
    )
    # As in InstructGPT, the reward model starts from the SFT model with its head replaced.
    rewards = train_reward_model(
        RewardModelConfig(
            model=str(output_dir / "sft"),
            output_dir=str(output_dir / "reward_model"),
            epochs=2,
            learning_rate=1e-3,
            **options,
        ),
        rows=data["pairs"],
        console=console,
    )
    console.print(
        f"SFT loss {sft['loss']:.3f} nats per token; "
        f"reward model accuracy {rewards['accuracy']:.0%} on held-out pairs"
    )

    return data, rewards


ROWS = (
    ("reward (proxy, trained on)", "reward", "{:.2f}"),
    ("gold reward (held out, 0 to 1)", "monitor/gold_reward", "{:.3f}"),
    ("KL to the SFT model (nats per response)", "kl", "{:.2f}"),
    ("entropy (nats per token)", "entropy", "{:.2f}"),
    ("response length (tokens)", "response_length", "{:.1f}"),
)


def _print(console: Console, prompts: list[str], result: dict[str, Any]) -> None:
    before = result["before"]
    after = result["after"]
    table = Table(title=f"{len(prompts)} held-out prompts", title_justify="left")
    table.add_column("")
    table.add_column("before PPO", justify="right")
    table.add_column("after PPO", justify="right")
    for title, key, form in ROWS:
        table.add_row(title, form.format(before[key]), form.format(after[key]))
    console.print(table)
    for i in range(3):
        console.print(f"\n[bold]{prompts[i]}")
        for name, evaluation in (("before", before), ("after ", after)):
            text = evaluation["completions"][i].strip()
            gold = gold_reward([prompts[i]], [text])[0]
            console.print(f"  [dim]{name}[/dim]  {text}  [dim](gold {gold:.2f})")
    say(console, f"\nreport  {result['report']}\npolicy  {result['policy']}")
    console.print(f"[dim]{result['seconds']:.0f} seconds")
