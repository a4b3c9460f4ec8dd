"""Define the task `key-and-door` of `benchmarks.studies.critic`: a delayed reward over eight turns.

On a 3 × 3 grid the policy makes one move per turn and reads its position and whether it has the
key. It must fetch the key and then reach the door. The only reward comes at the end. A small model
learns random walks first, one in ten of which succeeds.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.studies.common import CONSOLE
from fastppo.data.datasets import write_rows
from fastppo.ppo.options.config import PPOConfig
from fastppo.stages.sft import SFTConfig, train_sft

SIDE = 3
CELLS = range(SIDE * SIDE)
TURNS = 8
"""Maximum number of turns, the longest path: from corner to corner and back."""

MOVES = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}

WORDS = [
    "<pad>",
    "<eos>",
    "key",
    "door",
    *MOVES,
    *(f"{letter}{place}" for letter in "cab" for place in CELLS),
]
"""Words of the task: c4 is a cell, a4 the policy in this cell, b4 the policy there with the key."""

WALKS = 6
"""Number of random walks per prompt, the demonstrations."""


class KeyAndDoor:
    """Grid that pays 1 and ends the episode when the policy enters the door's cell with the key."""

    def reset(self, prompt: str, start: int, key: int, door: int) -> None:
        """Start an episode; the prompt stays unchanged."""
        self.cell = start
        self.key = key
        self.door = door
        self.has_key = False

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return the position, the reward, and whether the episode is over.

        Words other than a move, and moves against a wall, have no effect.
        """
        right, down = MOVES.get(text.strip(), (0, 0))
        x = min(max(self.cell % SIDE + right, 0), SIDE - 1)
        y = min(max(self.cell // SIDE + down, 0), SIDE - 1)
        self.cell = x + SIDE * y
        self.has_key = self.has_key or self.cell == self.key
        is_open = self.has_key and self.cell == self.door
        return f" {'b' if self.has_key else 'a'}{self.cell}", float(is_open), is_open


def rooms() -> list[dict[str, Any]]:
    """Return every room: three different cells."""
    return [
        {"prompt": f"key c{key} door c{door} a{start}", "start": start, "key": key, "door": door}
        for start, key, door in itertools.permutations(CELLS, 3)
    ]


def walk(room: dict[str, Any], draw: random.Random) -> str:
    """Return the text of a random episode."""
    environment = KeyAndDoor()
    environment.reset(**room)
    words = ""
    for _ in range(TURNS):
        move = draw.choice(list(MOVES))
        place, _, done = environment.step(move)
        words += f" {move}"
        if done:
            break
        words += place
    return words


def _tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def _prepare_rooms(folder: Path, seed: int) -> None:
    """Write prompts.jsonl and model/, a Llama trained on random walks."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "prompts.jsonl", rooms())
    draw = random.Random(seed)
    walks = [
        {"prompt": room["prompt"], "completion": walk(room, draw)}
        for room in rooms()
        for _ in range(WALKS)
    ]
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    train_sft(
        SFTConfig(
            output_dir=str(folder / "model"),
            epochs=3,
            batch_size=64,
            gradient_accumulation=1,
            learning_rate=2e-3,
            eval_share=0,
            checkpoint_interval=0,
            seed=seed,
            device="cpu",
        ),
        model=LlamaForCausalLM(config),
        tokenizer=_tokenizer(),
        rows=walks,
        console=CONSOLE,
    )


def key_and_door(directory: Path, seed: int, output_dir: Path, **options: Any) -> PPOConfig:
    """Return the config of a run; prepare its data and model if necessary."""
    folder = directory / f"seed-{seed}"
    if not (folder / "model" / "config.json").exists():
        _prepare_rooms(folder, seed)
    defaults: dict[str, Any] = {
        "model": str(folder / "model"),
        "prompts": str(folder / "prompts.jsonl"),
        "environment": f"{__name__}:KeyAndDoor",
        "max_turns": TURNS,
        # Each turn is one word.
        "max_new_tokens": 1,
        "stop_token_ids": list(range(len(WORDS))),
        "rollout_batch_size": 256,
        "ppo_epochs": 2,
        "minibatches": 4,
        "microbatch_size": 256,
        "learning_rate": 1e-3,
        # Random walks are no useful reference.
        "kl_coef": 0.0,
        "warn_if": [],
        "output_dir": str(output_dir),
        "device": "cpu",
        "seed": seed,
    }
    return PPOConfig(**defaults | options)
