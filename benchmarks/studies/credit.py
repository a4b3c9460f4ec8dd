"""A critic where credit is the matter: PPO beside REINFORCE, RLOO and GRPO at equal processor time.

    python -m benchmarks.studies.credit runs/key-and-door
    python -m benchmarks.studies.credit runs/sentiment --task smollm2-sentiment --seconds 240

`key-and-door` is an environment of eight turns that pays once, at the end. On a grid of three by
three cells the policy makes one move a turn and reads where it is and whether it has the key; it
has to fetch the key and then to reach the door. Which of the moves were in vain nobody tells it. A
small model from scratch is shown walks at random, of which one in ten succeeds, and trains from
there. `smollm2-sentiment` is the recipe, in bf16 and at a constant rate.

All settings of a seed start from the same weights, with the same rate, batch and epochs, and train
one after another, each for the same processor time of one thread. Prints the reward after equal
compute, and after equal iterations, which do not depend on what else the machine does; what PPO is
ahead of each other, paired by seed; and what its critic does. Writes the curves to credit.json. A
run that ended there is not run again.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.studies.common import (
    CONSOLE,
    Records,
    at_seconds,
    cell,
    column,
    figure_of,
    kept,
    parser_of,
    print_table,
    recipe_config,
    train,
)
from benchmarks.studies.estimators import NO_CRITIC
from fastppo.data.rows import write_rows
from fastppo.ppo.config import PPOConfig
from fastppo.stages.sft import SFTConfig, train_sft

SETTINGS: dict[str, dict[str, Any]] = {
    "PPO": {"advantage": "gae", "value_model": "shared"},
    "REINFORCE": NO_CRITIC | {"advantage": "reinforce"},
    "RLOO": NO_CRITIC | {"advantage": "rloo"},
    "GRPO": NO_CRITIC | {"advantage": "group", "whiten_advantages": "none"},
}
GROUPED = ("RLOO", "GRPO")

SMOOTH = 5
"""Iterations of which a point is the mean."""

OF_THE_CRITIC = {
    "explained_variance": "share of the returns' variance that the critic explains",
    "advantage_correlation": "correlation of the advantages with those without it",
}
CURVES = ("processor_seconds", "reward", *OF_THE_CRITIC)
"""What credit.json has of each iteration, where there is one."""

# ----------------------------------------------------------------------------- the key and the door

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


def key_and_door(directory: Path, seed: int, **options: Any) -> PPOConfig:
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
        "device": "cpu",
        "seed": seed,
    }
    return PPOConfig(**defaults | options)


def sentiment(directory: Path, seed: int, **options: Any) -> PPOConfig:
    """The recipe's; its model is the same for all seeds."""
    of_the_study: dict[str, Any] = {
        "precision": "bf16",
        "param_dtype": "bfloat16",
        # The recipe's head is AdamW's, on a detached trunk.
        "value_head": "auto",
        "value_learning_rate": None,
        "eval_interval": 100_000,
        "seed": seed,
    }
    return recipe_config("smollm2-sentiment", directory / "recipe", 0, **of_the_study | options)


# --------------------------------------------------------------------------------------- the study


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of the study."""

    config: Callable[..., PPOConfig]
    samples_per_prompt: int
    """Of RLOO and GRPO."""


TASKS = {
    "key-and-door": Task(config=key_and_door, samples_per_prompt=8),
    # Of 32 responses to an iteration; eight would leave four prompts.
    "smollm2-sentiment": Task(config=sentiment, samples_per_prompt=4),
}


def run(directory: Path, task: Task, label: str, seed: int, seconds: float) -> Records:
    """The records of one setting and seed."""
    output = directory / f"seed-{seed}" / label
    options = dict(SETTINGS[label])
    if label in GROUPED:
        options["samples_per_prompt"] = task.samples_per_prompt
    config = task.config(
        directory,
        seed,
        iterations=100_000,
        lr_schedule="constant",
        checkpoint_interval=0,
        output_dir=str(output),
        **options,
    )
    return kept(output / "records.json", partial(train, config, seconds=seconds))


def paired(differences: Iterable[float]) -> str:
    """Mean ± standard error."""
    of_seeds = np.array(list(differences))
    if len(of_seeds) == 1:
        return f"{of_seeds[0]:+.3f}"
    return f"{of_seeds.mean():+.3f} ± {of_seeds.std(ddof=1) / len(of_seeds) ** 0.5:.3f}"


def by_third(records: Records, name: str, points: Sequence[float]) -> list[float]:
    """Medians of a metric between two points and the next; NaN where no iteration has it. A batch
    whose returns are all the same makes nonsense of a mean."""
    times = column(records, "processor_seconds")
    values = np.array([record.get(name, np.nan) for record in records])
    parts = np.split(values, np.searchsorted(times, points[:-1]))
    return [float(np.nanmedian(part)) if np.isfinite(part).any() else np.nan for part in parts]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, seeds=5, seconds=40.0)
    parser.add_argument("--task", choices=TASKS, default="key-and-door")
    options = parser.parse_args(arguments)
    seconds = 3.0 if options.quick else options.seconds
    seeds = range(1 if options.quick else options.seeds)
    task = TASKS[options.task]
    runs: dict[str, list[Records]] = {label: [] for label in SETTINGS}
    for seed in seeds:
        for label in SETTINGS:
            runs[label].append(run(options.directory, task, label, seed, seconds))
    points = [seconds / 3, 2 * seconds / 3, seconds]
    fewest = min(len(records) for of_seeds in runs.values() for records in of_seeds)
    iterations = [max(1, fewest * third // 3) for third in (1, 2, 3)]
    places = [iteration - 1 for iteration in iterations]
    rewards = {
        label: np.array(
            [
                [
                    *at_seconds(records, "reward", points, SMOOTH),
                    *column(records, "reward", SMOOTH)[places],
                ]
                for records in of_seeds
            ]
        )
        for label, of_seeds in runs.items()
    }
    rows = {label: [cell(values) for values in by_seed.T] for label, by_seed in rewards.items()}
    for label in SETTINGS:
        if label != "PPO":
            ahead = rewards["PPO"] - rewards[label]
            rows[f"PPO − {label}"] = [paired(values) for values in ahead.T]
    for name, title in OF_THE_CRITIC.items():
        of_seeds = np.array([by_third(records, name, points) for records in runs["PPO"]])
        rows[title] = [*(cell(values, 2) for values in of_seeds.T), "", "", ""]
    heads = [f"{point:.0f} s" for point in points]
    heads += [f"iteration {iteration}" for iteration in iterations]
    print_table(["reward", *heads], rows)
    _write(options.directory / "credit.json", options.task, runs)
    _draw(runs, seconds, options.directory / "credit.png")


def _write(path: Path, task: str, runs: dict[str, list[Records]]) -> None:
    """The curves of every run, rounded."""
    curves = {
        label: [
            {
                name: [round(record[name], 4) for record in records if name in record]
                for name in CURVES
            }
            for records in of_seeds
        ]
        for label, of_seeds in runs.items()
    }
    text = json.dumps({"task": task, "runs": curves})
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _draw(runs: dict[str, list[Records]], seconds: float, path: Path) -> None:
    """The reward against compute: mean of the seeds, and the least and the most."""
    figure, axes = figure_of(
        [
            ("Reward after equal compute", "seconds, one thread", "reward"),
            ("What PPO's critic explains", "seconds, one thread", "share of the returns' variance"),
        ]
    )
    x = np.linspace(0.05 * seconds, seconds, 80)
    curves = [(label, axes[0], "reward") for label in SETTINGS]
    curves.append(("PPO", axes[1], "explained_variance"))
    for label, axis, metric in curves:
        lines = np.array([at_seconds(records, metric, x, SMOOTH) for records in runs[label]])
        (line,) = axis.plot(x, lines.mean(0), linewidth=1.8, label=label)
        axis.fill_between(x, lines.min(0), lines.max(0), color=line.get_color(), alpha=0.12)
    axes[0].legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
