"""The task `key-and-door` of `benchmarks.studies.critic`: which move decides is told at the end.

An environment of eight turns that pays once. On a grid of three by three cells the policy makes one
move a turn and reads where it is and whether it has the key; it has to fetch the key and then to
reach the door. Which of the moves were in vain nobody tells it. A small model from scratch is shown
walks at random, of which one in ten succeeds, and trains from there.
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
from fastppo.data.rows import write_rows
from fastppo.ppo.options.config import PPOConfig
from fastppo.stages.sft import SFTConfig, train_sft

SIDE = 3
CELLS = range(SIDE * SIDE)
TURNS = 8
"""The longest way, from corner to corner and back, takes as many."""

MOVES = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}

WORDS = [
    "<pad>",
    "<eos>",
    "key",
    "door",
    *MOVES,
    *(f"{letter}{place}" for letter in "cab" for place in CELLS),
]
"""c4 is a cell; a4 says that the policy is there, b4 that it is there and has the key."""

WALKS = 6
"""At random from each prompt, which are the demonstrations."""


class KeyAndDoor:
    """Pays 1 where the policy enters the door's cell with the key; then the episode is over."""

    def reset(self, prompt: str, start: int, key: int, door: int) -> None:
        """The prompt is read as it is."""
        self.cell = start
        self.key = key
        self.door = door
        self.has_key = False

    def step(self, text: str) -> tuple[str, float, bool]:
        """(where the policy is now, 1 at the door, whether the episode is over); a word that is no
        move, and a move against a wall, change nothing."""
        right, down = MOVES.get(text.strip(), (0, 0))
        x = min(max(self.cell % SIDE + right, 0), SIDE - 1)
        y = min(max(self.cell // SIDE + down, 0), SIDE - 1)
        self.cell = x + SIDE * y
        self.has_key = self.has_key or self.cell == self.key
        is_open = self.has_key and self.cell == self.door
        return f" {'b' if self.has_key else 'a'}{self.cell}", float(is_open), is_open


def rooms() -> list[dict[str, Any]]:
    """Every room: three different cells."""
    return [
        {"prompt": f"key c{key} door c{door} a{start}", "start": start, "key": key, "door": door}
        for start, key, door in itertools.permutations(CELLS, 3)
    ]


def walk(room: dict[str, Any], draw: random.Random) -> str:
    """An episode at random, as the policy would read and write it."""
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
    """Writes prompts.jsonl, and model/: a Llama that walks at random."""
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
    """The config of a run, with what it reads made in the directory."""
    folder = directory / f"seed-{seed}"
    if not (folder / "model" / "config.json").exists():
        _prepare_rooms(folder, seed)
    defaults: dict[str, Any] = {
        "model": str(folder / "model"),
        "prompts": str(folder / "prompts.jsonl"),
        "environment": f"{__name__}:KeyAndDoor",
        "max_turns": TURNS,
        # A word ends a turn.
        "max_new_tokens": 1,
        "stop_token_ids": list(range(len(WORDS))),
        "rollout_batch_size": 256,
        "ppo_epochs": 2,
        "minibatches": 4,
        "microbatch_size": 256,
        "learning_rate": 1e-3,
        # A walk at random is nothing worth staying near.
        "kl_coef": 0.0,
        "warn_if": [],
        "output_dir": str(output_dir),
        "device": "cpu",
        "seed": seed,
    }
    return PPOConfig(**defaults | options)
