"""Define the tasks on which the constants of `learning_rate: auto` may be chosen.

Three tasks are those of earlier studies. The others are small: models of 10,000 to 140,000 weights
over letters, with random weights or fine-tuned in seconds. Each has a difficulty of its own: rare
success, noise, outliers, large rewards, many dense rewards, long responses with a single choice. A
task sets its models, prompts, rewards, lengths and KL coefficient, and where its comment says so
the batch; all other options are the defaults.

Tasks that it was not tuned on are in `benchmarks.studies.held_out_tasks` and `independent_tasks`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.studies.common import CONSOLE, demo_stages
from benchmarks.studies.key_and_door import key_and_door
from fastppo.data.datasets import Rows
from fastppo.demo.run import ppo_config
from fastppo.demo.task import gold_reward
from fastppo.ppo.options.config import PPOConfig
from fastppo.recipes.catalogue import find
from fastppo.recipes.characters import make_tokenizer, model_config
from fastppo.recipes.run import prepare, write_files
from fastppo.run.options import read_yaml
from fastppo.stages.sft import SFTConfig, train_sft

TASK_OPTIONS = (
    "model",
    "prompts",
    "rewards",
    "environment",
    "max_turns",
    "max_new_tokens",
    "stop_strings",
    "stop_token_ids",
    "kl_coef",
)
"""Options that a task of an earlier study sets; all others are the defaults."""

Reward = Callable[..., Sequence[float]]


class Judge:
    """Reward that is not trained on; it records the mean and the deviation of each batch."""

    __name__ = "judge"

    def __init__(self, reward: Reward) -> None:
        self.reward = reward

    def __call__(self, prompts: Any, completions: list[str], **columns: Any) -> list[float]:
        rewards = list(self.reward(prompts, completions, **columns))
        self.mean = fmean(rewards)
        self.deviation = pstdev(rewards)
        return rewards


@dataclass(kw_only=True)
class Setup:
    """What a run of a task needs."""

    options: dict[str, Any]
    """Options of the config."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Keywords of `PPOTrainer`."""
    judge: Judge | None = None
    """The judged reward; by default `metric`."""
    metric: str = "reward"
    """The metric that is judged without a judge."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Task of the study."""

    setup: Callable[[Path, int], Setup]
    """Function of the folder of the models and the seed."""
    is_signed: bool = False
    """Whether rewards may be negative. Shares are then measured from the start."""


# ------------------------------------------------------------------------ tasks of earlier studies


def task_options(config: PPOConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in TASK_OPTIONS}


def demo(models: Path, seed: int) -> Setup:
    """The demo of `fastppo demo`, judged by its gold reward."""
    stages = demo_stages(models / "demo", seed)
    written = ppo_config(stages, stages / "unused")
    return Setup(options=task_options(written), judge=Judge(gold_reward))


def rooms(models: Path, seed: int) -> Setup:
    """A delayed reward after up to eight turns."""
    return Setup(options=task_options(key_and_door(models / "rooms", seed, Path("unused"))))


def arithmetic(models: Path, seed: int) -> Setup:
    """Sums of two numbers, 0/1."""
    recipe = find("arithmetic")
    folder = models / f"arithmetic-{seed}"
    written = read_yaml(write_files(recipe, folder), PPOConfig)
    prepare(recipe, folder, seed, CONSOLE)
    return Setup(options={name: written[name] for name in TASK_OPTIONS if name in written})


# ------------------------------------------------------------------------------------ small models


def random_model(folder: Path, seed: int, symbols: str, *, hidden: int, context: int) -> str:
    """Return the folder of a model with random weights and a token per symbol."""
    if not (folder / "config.json").exists():
        tokenizer = make_tokenizer(symbols)
        torch.manual_seed(seed)
        model = LlamaForCausalLM(model_config(hidden, 1, len(tokenizer), context))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def taught_model(
    folder: Path,
    seed: int,
    symbols: str,
    rows: Rows,
    *,
    hidden: int,
    context: int,
    epochs: int,
    layers: int = 1,
) -> str:
    """Return the folder of a Llama with a token per symbol, fine-tuned on demonstrations."""

    def make(vocabulary: int) -> PreTrainedModel:
        return LlamaForCausalLM(model_config(hidden, layers, vocabulary, context))

    return taught(folder, seed, make_tokenizer(symbols), rows, make, epochs=epochs)


def taught(
    folder: Path,
    seed: int,
    tokenizer: Any,
    rows: Rows,
    make: Callable[[int], PreTrainedModel],
    *,
    epochs: int,
) -> str:
    """Return the folder of a model that was fine-tuned on demonstrations.

    Args:
        make: function of the size of the vocabulary that returns the model.
    """
    if not (folder / "config.json").exists():
        torch.manual_seed(seed)
        train_sft(
            SFTConfig(
                output_dir=str(folder),
                epochs=epochs,
                batch_size=64,
                gradient_accumulation=1,
                learning_rate=3e-3,
                eval_share=0,
                checkpoint_interval=0,
                seed=seed,
                device="cpu",
            ),
            model=make(len(tokenizer)),
            tokenizer=tokenizer,
            rows=rows,
            console=CONSOLE,
        )
    return str(folder)


def small_setup(
    model: str,
    prompts: Rows,
    reward: Reward,
    length: int,
    *,
    judged: Reward | None = None,
    **options: Any,
) -> Setup:
    """Return the setup of a small task without KL.

    Args:
        reward: the reward that is trained on.
        judged: the reward that is judged; by default the same.
        length: maximum length of a response, in tokens.
    """
    defaults: dict[str, Any] = {"model": model, "max_new_tokens": length, "kl_coef": 0.0}
    judge = Judge(judged or reward)
    return Setup(
        options=defaults | options, parts={"prompts": prompts, "rewards": [reward]}, judge=judge
    )


def as_reward(function: Callable[..., float]) -> Reward:
    """Return the reward of a function of one completion and the columns of its row."""

    def reward(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
        names = [name for name in columns if name in function.__code__.co_varnames]
        rows = zip(completions, *(columns[name] for name in names), strict=True)
        return [
            float(function(completion, **dict(zip(names, row, strict=True))))
            for completion, *row in rows
        ]

    return reward


def changed(reward: Reward, change: Callable[[float, random.Random], float], seed: int) -> Reward:
    """Return a reward whose values go through a function, which gets a random generator as well."""
    draw = random.Random(seed)

    def changed_reward(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
        return [change(value, draw) for value in reward(prompts, completions, **columns)]

    return changed_reward


# --------------------------------------------------------------------------------- the small tasks

LETTERS = "abcdefgh"
SYMBOLS = f"{LETTERS}:"


def pairs(symbols: str, length: int, count: int, seed: int) -> Rows:
    """Return prompts of random letters and a colon, with the letters as `word`."""
    draw = random.Random(seed)
    words = ["".join(draw.choice(symbols) for _ in range(length)) for _ in range(count)]
    return [{"prompt": f"{word}:", "word": word} for word in words]


def needle(models: Path, seed: int) -> Setup:
    """Rare success: one of two words, 0/1, at batch size 256; 0.4 % at the start."""
    model = random_model(models / f"needle-{seed}", seed, "abcd:", hidden=48, context=16)
    prompts = [
        {"prompt": f"{letter}:", "words": [f"{letter}ca", f"{letter}cb"]} for letter in "abcd"
    ]
    reward = as_reward(lambda completion, words: completion in words)
    return small_setup(model, prompts * 64, reward, 3, rollout_batch_size=256)


def reverse(models: Path, seed: int) -> Setup:
    """Four letters in reverse, 0/1, with the default KL coefficient; half right at the start."""
    draw = random.Random(seed)

    def spoiled(answer: str) -> str:
        place = draw.randrange(len(answer))
        return answer[:place] + draw.choice(LETTERS) + answer[place + 1 :]

    rows = [
        {"prompt": row["prompt"], "answer": row["word"][::-1]}
        for row in pairs(LETTERS, 4, 1500, seed)
    ]
    demonstrations = [
        {
            "prompt": row["prompt"],
            "completion": row["answer"] if draw.random() < 0.5 else spoiled(row["answer"]),
        }
        for row in rows
        for _ in range(4)
    ]
    model = taught_model(
        models / f"reverse-{seed}",
        seed,
        SYMBOLS,
        demonstrations,
        hidden=64,
        layers=2,
        context=16,
        epochs=8,
    )
    reward = as_reward(lambda completion, answer: completion == answer)
    return small_setup(model, rows, reward, 6, kl_coef=0.05)


def dense(models: Path, seed: int) -> Setup:
    """48 token rewards from random weights: each letter should follow the one before it."""

    def by_token(prompts: Any, completions: list[str], completion_ids: Any) -> list[list[float]]:
        return [
            [float(i > 0 and token == 3 + (ids[i - 1] - 2) % 8) for i, token in enumerate(ids)]
            for ids in completion_ids
        ]

    def judged(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
        follows = dict(zip(LETTERS, "bcdefgha", strict=True))
        return [
            sum(follows.get(a) == b for a, b in itertools.pairwise(text)) / 47
            for text in completions
        ]

    model = random_model(models / f"dense-{seed}", seed, SYMBOLS, hidden=32, context=64)
    prompts = pairs(LETTERS, 2, 64, 0)
    setup = small_setup(model, prompts, judged, 48)
    setup.parts["rewards"] = [by_token]
    return setup


def copied(completion: str, word: str) -> float:
    """Return the share of the places with the letter of the word, 0 for another length."""
    return sum(a == b for a, b in zip(completion, word, strict=False)) / max(
        len(word), len(completion)
    )


def copy_setup(models: Path, seed: int, reward: Reward, **options: Any) -> Setup:
    """Return a task of copying five letters, judged by the share of the letters that are right.

    The model has learned from copies in which almost half of the letters are wrong.
    """
    draw = random.Random(seed)
    rows = [
        {
            "prompt": row["prompt"],
            "completion": "".join(
                letter if draw.random() < 0.5 else draw.choice(LETTERS) for letter in row["word"]
            ),
        }
        for row in pairs(LETTERS, 5, 3000, seed + 1)
    ]
    model = taught_model(
        models / f"copy-{seed}", seed, SYMBOLS, rows, hidden=48, context=16, epochs=8
    )
    prompts = pairs(LETTERS, 5, 1000, seed + 2)
    return small_setup(model, prompts, reward, 6, judged=as_reward(copied), **options)


def outliers(models: Path, seed: int) -> Setup:
    """Heavy tails: 3 % of the rewards are −30 whatever the response, the others in [0, 1]."""
    reward = changed(
        as_reward(copied), lambda value, draw: -30.0 if draw.random() < 0.03 else value, seed
    )
    return copy_setup(models, seed, reward)


def thousandfold(models: Path, seed: int) -> Setup:
    """Rewards in [0, 1000]."""
    return copy_setup(models, seed, changed(as_reward(copied), lambda value, _: 1000 * value, seed))


def noise(models: Path, seed: int) -> Setup:
    """A 0/1 reward, whether the word is right, 30 % of which are flipped."""

    def right(completion: str, word: str) -> float:
        return completion == word

    def flipped(value: float, draw: random.Random) -> float:
        return 1 - value if draw.random() < 0.3 else value

    return copy_setup(models, seed, changed(as_reward(right), flipped, seed))


TEMPLATE = "abcdefghhgfedcbaabcdefghhgfedcbaabcdefgh"
CHOICE = 20
"""Place of the single choice in the response."""


def choice(models: Path, seed: int) -> Setup:
    """40 nearly fixed tokens with one choice of eight among them, 0/1: 8 % at the start."""
    draw = random.Random(seed)

    def answer(letter: str) -> str:
        return TEMPLATE[:CHOICE] + letter + TEMPLATE[CHOICE + 1 :]

    def written(letter: str) -> str:
        letters_of = [x if draw.random() < 0.99 else draw.choice(LETTERS) for x in answer(letter)]
        return "".join(letters_of)

    rows = [
        {"prompt": f"{a}:", "completion": written(draw.choice(LETTERS))}
        for a in LETTERS
        for _ in range(200)
    ]
    model = taught_model(
        models / f"choice-{seed}", seed, SYMBOLS, rows, hidden=48, context=48, epochs=12
    )
    prompts = [{"prompt": f"{a}:", "word": answer(a)} for a in LETTERS] * 8
    return small_setup(model, prompts, as_reward(lambda completion, word: completion == word), 41)


def bandit(models: Path, seed: int) -> Setup:
    """One token of eight, with the expected rewards 0, 1/7 … 1 and Gaussian noise of 0.5."""
    model = random_model(models / f"bandit-{seed}", seed, SYMBOLS, hidden=32, context=8)
    clean = as_reward(lambda completion: max(0, LETTERS.find(completion or "a")) / 7)
    noisy = changed(clean, lambda value, draw: draw.gauss(value, 0.5), seed)
    return small_setup(model, [{"prompt": ":"}] * 64, noisy, 1, judged=clean)


TUNED = {
    "demo": Task(setup=demo),
    "key-and-door": Task(setup=rooms),
    "arithmetic": Task(setup=arithmetic),
    "reverse": Task(setup=reverse),
    "needle": Task(setup=needle),
    "dense": Task(setup=dense),
    "outliers": Task(setup=outliers),
    "thousandfold": Task(setup=thousandfold),
    "noise": Task(setup=noise),
    "choice": Task(setup=choice),
    "bandit": Task(setup=bandit),
}
