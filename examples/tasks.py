"""Train on a verifiable task of two turns: environment, rewards per turn, curriculum, evaluation.

    python examples/tasks.py

A small Llama with random weights is asked for a sum. A turn is one word. In the first turn it can
call a tool, which returns the sum; in the second it must repeat the result. There are no
demonstrations. It takes half a minute on a CPU. To train your own model, pass `model` to the config
and prompts with the columns of your environment, and remove `stop_token_ids`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fastppo import PPOConfig, PPOTrainer

LARGEST = 9
WORDS = ["<pad>", "plus", "call", "says", *map(str, range(2 * LARGEST + 1))]
HELD_OUT = 20  # of the 100 sums


class Adding:
    """Environment that plays one episode at a time. `reset` gets the dataset columns it names."""

    def reset(self, prompt: str, total: str) -> None:
        self.total = total
        self.has_called = False

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Return the observation, the reward, and whether the episode is over."""
        word = text.strip()
        if not self.has_called and word == "call":
            self.has_called = True
            return f" says {self.total}", 0.2, False  # rewards the last token of this turn
        if not self.has_called:
            return None, float(word == self.total), True  # a sum from memory
        return None, 0.8 * (word == self.total), True

    def close(self) -> None:
        """Clean up at the end of the run, also after an error; for example, stop a server."""


def rows() -> list[dict[str, Any]]:
    """Return all sums, shuffled. The environment gets all columns except `prompt`."""
    numbers = itertools.product(range(LARGEST + 1), repeat=2)
    sums = [{"prompt": f"{a} plus {b}", "total": str(a + b)} for a, b in numbers]
    random.Random(0).shuffle(sums)
    return sums


def small_model() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=True,  # makes repeating a word nearly the identity
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--output_dir", default="runs/adding")
    arguments = parser.parse_args()
    folder = Path(arguments.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    held_out = rows()[:HELD_OUT]
    training = rows()[HELD_OUT:]
    (folder / "held-out.jsonl").write_text("\n".join(map(json.dumps, held_out)))
    config = PPOConfig(
        output_dir=str(folder),
        iterations=arguments.iterations,
        rollout_batch_size=128,
        # Two turns of one word each.
        max_new_tokens=1,
        stop_token_ids=list(range(len(WORDS))),
        max_turns=2,
        advantage="turn_gae",
        # Prompts with eight correct answers in a row are dropped.
        solved_reward=1.0,
        # Held-out sums.
        eval_prompts=str(folder / "held-out.jsonl"),
        eval_interval=10,
        # Random weights are no useful reference and need exploration: a policy that is certain of
        # its call too early never tries a number.
        kl_coef=0.0,
        entropy_coef=0.05,
        schedules=["entropy_coef=linear:0"],
        learning_rate=1e-3,
        checkpoint_interval=0,
    )
    model, tokenizer = small_model()
    trainer = PPOTrainer(
        config, model=model, tokenizer=tokenizer, prompts=training, environment=Adding
    )
    trainer.train()
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        if "eval/reward" in metrics:
            print(
                f"iteration {metrics['iteration']:3d}  reward {metrics['reward']:.3f}  "
                f"left out {metrics['left_out']:.2f}  held-out {metrics['eval/reward']:.3f}"
            )
    print(f"{folder / 'report.html'} has the held-out answers")


if __name__ == "__main__":
    main()
