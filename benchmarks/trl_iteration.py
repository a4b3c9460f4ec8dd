"""Compare one PPO iteration of a tiny model in FastPPO and TRL 1.12.

    python -m benchmarks.trl_iteration             one shape, set by flags
    pytest benchmarks -m slow                      nine shapes, each in its own process

Both train the same Llama from the same weights on the same prompts, with the same tokens, epochs,
minibatches and random reward model, in one process with the same threads, in fp32. They alternate
iterations, so a slow minute affects both.

An iteration generates a response to each prompt, scores it, computes old and reference logprobs,
values and advantages, and runs the epochs of minibatch updates. TRL is timed between the ends of
two steps by an `on_step_end` callback, FastPPO around its iteration.

The trainers differ in three points:

- TRL requires a separate value model, as large as the policy. FastPPO has a head on the policy's
  trunk.
- TRL's reward model reads token ids of the policy's tokenizer. FastPPO decodes the text and encodes
  it with the reward model's own tokenizer.
- TRL computes an extra entropy over all logits for its metrics. FastPPO's loss returns it.

TRL's defaults of gradient checkpointing and bf16 are off, since they slow a tiny model on a CPU.

The floor is the FLOP of an iteration at the rate of a large matrix product in the same process. The
ratio of both trainers' FLOP is the speed-up at equal efficiency.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.flop import counted
from benchmarks.measure import measure_ceilings

NEEDED = "trl==1.12.0"
"""Requirement of the last release with a PPOTrainer."""

LEARNING_RATE = 1e-5
KL_COEF = 0.05
WARM_UP = 1
"""Number of untimed iterations."""
COUNTED = 1
"""Number of iterations after the timed ones that count FLOP."""


@dataclass(kw_only=True)
class Options:
    """Options that both trainers share."""

    vocab: int = 32000
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    batch: int = 16
    prompt: int = 128
    response: int = 32
    epochs: int = 4
    minibatches: int = 4
    iterations: int = 5
    threads: int = 1

    def __str__(self) -> str:
        sizes = f"{self.layers} × {self.hidden}, V = {self.vocab}"
        return f"{self.prompt} + {self.response} tokens, {sizes}"

    def flags(self) -> list[str]:
        """Return the command line of these options."""
        return [f"--{name}={value}" for name, value in asdict(self).items()]


GRID = [
    Options(),
    Options(prompt=32),
    Options(prompt=16, vocab=128, hidden=128),
    Options(prompt=64, response=64, hidden=256, layers=4, vocab=8000),
    Options(prompt=16),
    Options(prompt=128, vocab=128),
    Options(prompt=128, vocab=8000, hidden=128),
    Options(prompt=64, vocab=1000, hidden=256),
    Options(prompt=64, hidden=128),
]
"""Nine shapes: vocabularies of 128 to 32000 tokens, widths of 64 to 256, prompts of 16 to 128
tokens."""

HELP = {
    "vocab": "vocabulary, tokens",
    "hidden": "hidden size",
    "layers": "layers",
    "heads": "attention heads",
    "batch": "episodes per iteration",
    "prompt": "tokens per prompt",
    "response": "tokens per response; none ends early",
    "epochs": "passes over a batch",
    "minibatches": "optimizer steps per pass",
    "iterations": "timed iterations of each trainer",
    "threads": "CPU threads of torch for both trainers",
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trl_iteration",
        description="Time a whole PPO iteration: FastPPO against TRL 1.12.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default in asdict(Options()).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=HELP[name])
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    return parser


HEADER = ["shape", "FastPPO", "floor", "of the floor", "TRL", "speed-up", "FLOP ratio"]


def cells(row: dict[str, Any]) -> list[str]:
    """Format a result of `compare` for the columns of `HEADER`."""
    return [
        str(Options(**row["options"])),
        f"{row['fastppo_seconds']:.2f} s",
        f"{row['floor_seconds']:.2f} s",
        f"{row['percent_of_floor']:.0f} %",
        f"{row['trl_seconds']:.2f} s",
        f"{row['speed_up']:.2f}",
        f"{row['flop_ratio']:.2f}",
    ]


def _llama(options: Options, model_class: Any, **more: Any) -> Any:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        max_position_embeddings=options.prompt + options.response,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        **more,
    )
    return model_class(config)


def _our_trainer(options: Options, policy: Any, reward: Any, tokenizer: Any, folder: Path) -> Any:
    from rich.console import Console

    from benchmarks.training import prompt_texts
    from fastppo.ppo.options.config import PPOConfig
    from fastppo.ppo.trainer import PPOTrainer
    from fastppo.rewards.model import RewardModel

    reward.save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "reward")
    config = PPOConfig(
        device="cpu",
        rollout_batch_size=options.batch,
        max_new_tokens=options.response,
        ppo_epochs=options.epochs,
        minibatches=options.minibatches,
        microbatch_size=options.batch // options.minibatches,
        kl_coef=KL_COEF,
        learning_rate=LEARNING_RATE,
        lam=0.95,
        vf_coef=0.1,
        value_head="gradient",
        value_clip=0.2,
        stop_token_ids=[],
        output_dir=str(folder / "run"),
    )
    texts = prompt_texts(options.batch, options.prompt, options.vocab)
    return PPOTrainer(
        config,
        model=policy,
        tokenizer=tokenizer,
        prompts=[{"prompt": text} for text in texts],
        rewards=[RewardModel(str(folder / "reward"), batch_size=options.batch)],
        console=Console(quiet=True),
    )


def _their_trainer(
    options: Options, policy: Any, reward: Any, value: Any, tokenizer: Any, folder: Path
) -> Any:
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    from benchmarks.training import prompt_texts

    texts = prompt_texts(options.batch, options.prompt, options.vocab)
    rows = Dataset.from_list([{"input_ids": tokenizer(text)["input_ids"]} for text in texts])
    config = PPOConfig(
        output_dir=str(folder / "trl"),
        # With gradient accumulation, TRL's optimizer would step only once per epoch.
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=1,
        num_mini_batches=options.minibatches,
        num_ppo_epochs=options.epochs,
        total_episodes=options.batch * (WARM_UP + options.iterations + COUNTED),
        response_length=options.response,
        local_rollout_forward_batch_size=options.batch,
        temperature=1.0,
        kl_coef=KL_COEF,
        lam=0.95,
        vf_coef=0.1,
        cliprange_value=0.2,
        learning_rate=LEARNING_RATE,
        num_sample_generations=0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=10**6,
    )
    return PPOTrainer(
        config,
        processing_class=tokenizer,
        model=policy,
        ref_model=copy.deepcopy(policy),
        reward_model=reward,
        value_model=value,
        train_dataset=rows,
        eval_dataset=rows,
    )


def compare(options: Options, progress: Any = lambda line: None) -> dict[str, Any]:
    """Run both trainers, alternating iterations.

    Returns:
        Seconds of neighboring iterations (FastPPO's, TRL's) and their medians, the median ratio,
        FLOP, and median seconds of FastPPO's phases.

    Raises:
        ImportError: TRL 1.12 is not installed.
    """
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        import trl.experimental.ppo  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"this comparison needs TRL's PPOTrainer: pip install {NEEDED}"
        ) from error

    if options.batch % options.minibatches:
        raise ValueError(
            f"batch must be a multiple of minibatches, got {options.batch} and "
            f"{options.minibatches}"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        return _compare(options, progress)
    finally:
        torch.set_num_threads(threads)


def _compare(options: Options, progress: Any) -> dict[str, Any]:
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification, TrainerCallback

    from benchmarks.training import iterate, make_tokenizer

    torch.manual_seed(0)
    tokenizer = make_tokenizer(options.vocab)
    policy = _llama(options, LlamaForCausalLM)
    reward = _llama(options, LlamaForSequenceClassification, num_labels=1)
    value = _llama(options, LlamaForSequenceClassification, num_labels=1)
    ours_seconds: list[float] = []
    theirs_seconds: list[float] = []
    laps: dict[str, list[float]] = {}
    flop: list[int] = []

    with (
        tempfile.TemporaryDirectory() as name,
        warnings.catch_warnings(),
        contextlib.ExitStack() as counting,
    ):
        warnings.simplefilter("ignore")
        folder = Path(name)
        ours = _our_trainer(options, copy.deepcopy(policy), reward, tokenizer, folder)
        theirs = _their_trainer(options, policy, reward, value, tokenizer, folder)
        clock = [time.perf_counter()]
        their_counter: list[FlopCounterMode] = []

        class Turns(TrainerCallback):
            """Callback that runs a FastPPO iteration after each TRL step."""

            def on_step_end(self, *arguments: Any, **more: Any) -> None:
                now = time.perf_counter()
                if their_counter:
                    counting.close()
                    with counted() as our_counter:
                        iterate(ours)
                    flop.extend([our_counter.get_total_flops(), their_counter[0].get_total_flops()])
                    return
                theirs_seconds.append(now - clock[0])
                metrics = iterate(ours)
                ours_seconds.append(time.perf_counter() - now)
                for key, seconds in metrics.items():
                    if key.startswith("seconds/"):
                        laps.setdefault(key.removeprefix("seconds/"), []).append(seconds)
                progress(
                    f"iteration {len(ours_seconds)}: FastPPO {ours_seconds[-1]:.3g} s, "
                    f"TRL {theirs_seconds[-1]:.3g} s"
                )
                if len(ours_seconds) == WARM_UP + options.iterations:
                    their_counter.append(counting.enter_context(counted()))
                clock[0] = time.perf_counter()

        theirs.add_callback(Turns())
        clock[0] = time.perf_counter()
        theirs.train()
    pairs = [*zip(ours_seconds, theirs_seconds, strict=True)][WARM_UP:]
    seconds = statistics.median(ours for ours, _ in pairs)
    rate = measure_ceilings(torch.device("cpu"), [torch.float32]).matmul["float32"]
    floor = flop[0] / rate
    return {
        "options": asdict(options),
        "pairs": pairs,
        "fastppo_seconds": seconds,
        "trl_seconds": statistics.median(theirs for _, theirs in pairs),
        "speed_up": statistics.median(theirs / ours for ours, theirs in pairs),
        "flop_ratio": flop[1] / flop[0],
        "fastppo_flop": flop[0],
        "floor_seconds": floor,
        "percent_of_floor": 100 * floor / seconds,
        "phases": {name: statistics.median(times[WARM_UP:]) for name, times in laps.items()},
    }


def compare_in_a_process(options: Options) -> dict[str, Any]:
    """Measure in a new process, with a fresh allocator, and return the result.

    Raises:
        ImportError: TRL 1.12 is not installed.
        RuntimeError: the process failed; the message is its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "iteration.json"
        command = [sys.executable, "-m", "benchmarks.trl_iteration", f"--json={path}"]
        done = subprocess.run(
            [*command, *options.flags()], capture_output=True, text=True, check=False
        )
        if done.returncode:
            line = (done.stderr.strip().splitlines() or ["it failed"])[-1]
            raise ImportError(line) if NEEDED in line else RuntimeError(line)
        return json.loads(path.read_text(encoding="utf-8"))


def print_row(row: dict[str, Any]) -> None:
    print("  ".join(cells(row)))
    phases = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in row["phases"].items())
    print(f"    FastPPO's phases: {phases}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    keywords = vars(build_parser().parse_args(arguments))
    path = keywords.pop("json")
    print("  ".join(HEADER))
    try:
        row = compare(Options(**keywords), progress=lambda line: print(line, file=sys.stderr))
    except (ImportError, RuntimeError, ValueError) as error:
        print(f"benchmarks.trl_iteration: {error}", file=sys.stderr)
        return 1
    print_row(row)
    if path:
        path.write_text(json.dumps(row, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
