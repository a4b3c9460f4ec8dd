"""Race several trainers on the demo's task: CPU seconds to a gold reward of 0.8, on one thread.

    python -m benchmarks.studies.race runs/race fastppo
    python -m benchmarks.studies.race runs/race fastppo-auto
    python -m benchmarks.studies.race runs/race fastppo-grpo
    pip install "trl==1.12.*" && python -m benchmarks.studies.race runs/race trl-ppo
    pip install "trl==1.16.*" && python -m benchmarks.studies.race runs/race trl-grpo

The packages conflict, so each needs its own environment with FastPPO on the path. FastPPO runs
first and trains the demo's two supervised stages, from which all trainers start. The table shows
all finished runs.

The same for all: the weights of policy and reward model, the tokenizer, the prompts, the reward
model's score of a response, 128 responses of at most 40 tokens per batch at temperature 1, three
epochs of four minibatches, ε, β, γ, λ, the gradient norm, fp32 and one thread. Differences:

- TRL's PPO trains a separate value model, initialized from the reward model as in its example.
- TRL's GRPO has no critic: eight responses to each of 16 prompts, and β weighs a KL in the loss.

Gold is the mean of a training batch. It reaches 0.8 when the mean of three consecutive batches
does. The clock starts with the first batch, after loading.
"""

from __future__ import annotations

import contextlib
import copy
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
    set_seed,
)

from benchmarks.studies.common import demo_stages, kept, parser_of, print_table
from fastppo.demo.task import gold_reward

GOLD = 0.8
BATCHES = 3
"""Number of consecutive batches in the mean of gold."""

BATCH = 128
MINIBATCHES = 4
EPOCHS = 3
RESPONSE = 40
GROUP = 8
KL_COEF = 0.08
LAM = 0.95
LEARNING_RATE = 3e-4
ITERATIONS = 40
"""Number of iterations of the linear learning rate decay."""


class Clock:
    """Recorder of the gold reward and the time of each batch of responses.

    Args:
        limit: CPU time in seconds after which the run stops.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.points: list[dict[str, float]] = []
        self._start = (0.0, 0.0)

    def start(self) -> None:
        self._start = (_processor_seconds(), time.perf_counter())

    def note(self, prompts: Sequence[str], completions: Sequence[str]) -> None:
        self.points.append(
            {
                "processor_seconds": _processor_seconds() - self._start[0],
                "wall_seconds": time.perf_counter() - self._start[1],
                "gold": float(np.mean(gold_reward(list(prompts), list(completions)))),
            }
        )
        point = self.points[-1]
        print(f"{len(self.points)}: {point}", file=sys.stderr)

    @property
    def is_over(self) -> bool:
        """Whether the target or the time limit is reached."""
        spent = self.points[-1]["processor_seconds"] if self.points else 0.0
        return reached(self.points) is not None or spent > self.limit


def _processor_seconds() -> float:
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def reached(points: Sequence[dict[str, float]]) -> dict[str, float] | None:
    """Return the first point at which the mean gold reaches the target."""
    for end in range(BATCHES, len(points) + 1):
        if np.mean([point["gold"] for point in points[end - BATCHES : end]]) >= GOLD:
            return points[end - 1]
    return None


class StopRunError(Exception):
    """Raised when the target or the time limit is reached."""


class StopCallback(TrainerCallback):
    """Callback that raises to end a TRL run; TRL's PPOTrainer ignores `should_training_stop`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, *arguments: Any, **more: Any) -> None:
        if self.clock.is_over:
            raise StopRunError


class Score(torch.nn.Module):
    """Scorer of texts by the reward model, with the results of `fastppo.rewards.model`."""

    base_model_prefix = "model"
    """Name of the trunk. TRL's PPO trainer reads a reward model through this, `model` and
    `score`."""

    def __init__(self, directory: Path, tokenizer: Any, clock: Clock) -> None:
        super().__init__()
        self.classifier = AutoModelForSequenceClassification.from_pretrained(str(directory)).eval()
        self.mean = float(getattr(self.classifier.config, "score_mean", 0.0))
        self.tokenizer = tokenizer
        self.clock = clock

    @torch.no_grad()
    def of_texts(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Score texts and record the batch."""
        self.clock.note(prompts, completions)
        texts = [
            " ".join((prompt, text.strip()))
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        self.tokenizer.padding_side = "right"
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True)
        self.tokenizer.padding_side = "left"
        hidden = self.classifier.model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).last_hidden_state
        last = inputs["attention_mask"].sum(1) - 1
        scores = self.classifier.score(hidden[torch.arange(len(texts)), last])
        return (scores.squeeze(-1) - self.mean).tolist()

    def model(self, input_ids: torch.Tensor, **more: Any) -> Any:
        """Return the scores as hidden states at each token, for TRL."""
        texts = self.tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        # A prompt ends at its only punctuation mark.
        ends = [min(text.find(mark) for mark in ".?" if mark in text) + 1 for text in texts]
        prompts = [text[:end] for text, end in zip(texts, ends, strict=True)]
        completions = [text[end:] for text, end in zip(texts, ends, strict=True)]
        scores = torch.tensor(self.of_texts(prompts, completions))
        return SimpleNamespace(hidden_states=[scores[:, None, None].expand(*input_ids.shape, 1)])

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Stages:
    """The demo's supervised stages, loaded for TRL's trainers."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self.directory = directory
        self.tokenizer = AutoTokenizer.from_pretrained(str(directory / "sft"), padding_side="left")
        lines = (directory / "data" / "prompts.jsonl").read_text("utf-8").splitlines()
        self.prompts = [json.loads(line)["prompt"] for line in lines]
        self.score = Score(directory / "reward_model", self.tokenizer, clock)

    def policy(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(str(self.directory / "sft"))


def fastppo(
    directory: Path, clock: Clock, learning_rate: float | str, seed: int, **options: Any
) -> None:
    from benchmarks.training import iterate
    from fastppo.demo.run import ppo_config
    from fastppo.ppo.trainer import PPOTrainer

    def gold(prompts: list[str], completions: list[str]) -> list[float]:
        clock.note(prompts, completions)
        return gold_reward(prompts, completions)

    defaults: dict[str, Any] = {
        "learning_rate": learning_rate,
        "monitor_rewards": [],
        # Linear decay without warm-up, the default of TRL's trainers.
        "warmup_steps": 0,
        "seed": seed,
        "device": "cpu",
    }
    config = ppo_config(directory, directory / "FastPPO", **defaults | options)
    trainer = PPOTrainer(config, monitor_rewards=[gold])
    clock.start()
    while not clock.is_over:
        iterate(trainer)


def fastppo_auto(directory: Path, clock: Clock, learning_rate: float, seed: int) -> None:
    """Train with `learning_rate: auto`, whatever the rate."""
    fastppo(directory, clock, "auto", seed, lr_schedule="constant")


def fastppo_grpo(directory: Path, clock: Clock, learning_rate: float, seed: int) -> None:
    """Run the algorithm of TRL's GRPO in FastPPO."""
    fastppo(
        directory,
        clock,
        learning_rate,
        seed,
        advantage="group",
        samples_per_prompt=GROUP,
        whiten_advantages=False,
        vf_coef=0.0,
        value_learning_rate=None,
        kl_coef=0.0,
        kl_loss_coef=KL_COEF,
    )


def trl_ppo(directory: Path, clock: Clock, learning_rate: float, seed: int) -> None:
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    stages = Stages(directory, clock)
    rows = [{"input_ids": stages.tokenizer(prompt)["input_ids"]} for prompt in stages.prompts]
    config = PPOConfig(
        output_dir=str(directory / "TRL-PPO"),
        # With gradient accumulation, TRL's optimizer would step only once per epoch.
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        num_mini_batches=MINIBATCHES,
        num_ppo_epochs=EPOCHS,
        total_episodes=BATCH * ITERATIONS,
        response_length=RESPONSE,
        stop_token="eos",
        local_rollout_forward_batch_size=BATCH,
        temperature=1.0,
        kl_coef=KL_COEF,
        lam=LAM,
        learning_rate=learning_rate,
        num_sample_generations=0,
        seed=seed,
        **_TRAINER,
    )
    policy = stages.policy()
    trainer = PPOTrainer(
        config,
        processing_class=stages.tokenizer,
        model=policy,
        ref_model=copy.deepcopy(policy),
        reward_model=stages.score,
        value_model=AutoModelForSequenceClassification.from_pretrained(
            str(directory / "reward_model")
        ),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:BATCH]),
        callbacks=[StopCallback(clock)],
    )
    clock.start()
    trainer.train()


def trl_grpo(directory: Path, clock: Clock, learning_rate: float, seed: int) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    stages = Stages(directory, clock)

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return stages.score.of_texts(prompts, completions)

    config = GRPOConfig(
        output_dir=str(directory / "TRL-GRPO"),
        per_device_train_batch_size=BATCH // MINIBATCHES,
        gradient_accumulation_steps=1,
        steps_per_generation=MINIBATCHES,
        num_iterations=EPOCHS,
        num_generations=GROUP,
        max_steps=ITERATIONS * EPOCHS * MINIBATCHES,
        max_completion_length=RESPONSE,
        temperature=1.0,
        beta=KL_COEF,
        learning_rate=learning_rate,
        seed=seed,
        **_TRAINER,
    )
    trainer = GRPOTrainer(
        model=stages.policy(),
        processing_class=stages.tokenizer,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in stages.prompts]),
        callbacks=[StopCallback(clock)],
    )
    clock.start()
    trainer.train()


_TRAINER: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 10**6,
}
"""Options of both TRL trainers. By default they turn on bf16 and gradient checkpointing, which slow
a tiny model on a CPU."""


CONTESTANTS: dict[str, Callable[[Path, Clock, float, int], None]] = {
    "fastppo": fastppo,
    "fastppo-auto": fastppo_auto,
    "fastppo-grpo": fastppo_grpo,
    "trl-ppo": trl_ppo,
    "trl-grpo": trl_grpo,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, seed=0, limit=600.0, learning_rate=LEARNING_RATE)
    parser.add_argument("contestant", choices=CONTESTANTS, help="the trainer to run")
    options = parser.parse_args(arguments)
    folder = options.directory / f"seed-{options.seed}"
    if options.contestant.startswith("fastppo"):
        demo_stages(options.directory, options.seed)
    limit = 5.0 if options.quick else options.limit

    def run() -> list[dict[str, float]]:
        torch.set_num_threads(1)
        set_seed(options.seed)
        clock = Clock(limit)
        with contextlib.suppress(StopRunError):
            CONTESTANTS[options.contestant](folder, clock, options.learning_rate, options.seed)
        return clock.points

    kept(folder / f"{options.contestant}-{options.learning_rate:g}.json", run)
    rows = {}
    for path in sorted(folder.glob("*-*.json")):
        points = json.loads(path.read_text("utf-8"))
        rows[path.stem] = _cells(points)
    heads = ["CPU s to gold 0.8", "wall-clock s", "batches", "s per batch", "final gold"]
    print_table(["trainer and rate", *heads], rows)


def _cells(points: list[dict[str, float]]) -> list[str]:
    at = reached(points)
    last = points[-1]
    end = float(np.mean([point["gold"] for point in points[-BATCHES:]]))
    return [
        f"{at['processor_seconds']:.1f}" if at else f"not in {last['processor_seconds']:.0f}",
        f"{at['wall_seconds']:.1f}" if at else "",
        f"{len(points)}",
        f"{last['processor_seconds'] / max(1, len(points) - 1):.2f}" if len(points) > 1 else "",
        f"{end:.3f}",
    ]


if __name__ == "__main__":
    main()
