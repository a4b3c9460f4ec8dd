"""Define the tasks that were held out while developing `learning_rate: auto`.

They have the difficulties of `benchmarks.studies.rate_tasks` in other forms, and some of their own:
a target that changes, LoRA, advantages of a group, a separate critic, a KL in the objective. Nobody
saw a run with `auto` on them before its rule was final.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from benchmarks.studies.rate_tasks import (
    LETTERS,
    SYMBOLS,
    Reward,
    Setup,
    Task,
    as_reward,
    changed,
    copied,
    copy_setup,
    pairs,
    random_model,
    small_setup,
    taught_model,
)

AFTER = dict(zip(LETTERS, LETTERS[1:] + LETTERS[:1], strict=True))


def successors(word: str) -> str:
    return "".join(AFTER[letter] for letter in word)


def is_word(completion: str, word: str) -> float:
    return completion == word


def settled(models: Path, seed: int) -> Setup:
    """A nearly deterministic policy: it copies, and writes the rewarded successors in one of 25."""
    draw = random.Random(seed)

    def demonstration(word: str) -> str:
        return f"-{successors(word)}" if draw.random() < 0.04 else f"+{word}"

    rows = [
        {"prompt": row["prompt"], "completion": demonstration(row["word"])}
        for row in pairs(LETTERS, 4, 6000, seed)
    ]
    model = taught_model(
        models / f"settled-{seed}", seed, f"{SYMBOLS}+-", rows, hidden=48, context=16, epochs=10
    )
    prompts = [
        {"prompt": row["prompt"], "word": f"-{successors(row['word'])}"}
        for row in pairs(LETTERS, 4, 1000, seed + 1)
    ]
    return small_setup(model, prompts, as_reward(is_word), 6)


class Switch:
    """Closeness of the letters to `b`, and to `g` from the 31st batch on."""

    __name__ = "switch"

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, prompts: Any, completions: list[str], **columns: Any) -> list[float]:
        self.batches += 1
        target = LETTERS.index("b" if self.batches <= 30 else "g")
        return [
            sum(1 - abs(LETTERS.index(x) - target) / 7 for x in text if x in LETTERS) / 4
            for text in completions
        ]


def switch(models: Path, seed: int) -> Setup:
    """The target changes at half time; with the default KL coefficient."""
    model = random_model(models / f"switch-{seed}", seed, SYMBOLS, hidden=32, context=16)
    prompts = pairs(LETTERS, 1, 64, seed)
    return small_setup(model, prompts, Switch(), 4, judged=Switch(), kl_coef=0.05)


FORM = "ab:_;cd:_;ef:_;gh:_;abcd"
"""Response of 24 letters with four fields."""


def form(models: Path, seed: int) -> Setup:
    """A template of 24 tokens with four fields to copy to, and rewards of at most 0.001."""
    draw = random.Random(seed)

    def filled(word: str) -> str:
        letters = iter(word)
        return "".join(next(letters) if x == "_" else x for x in FORM)

    def share(completion: str, word: str) -> float:
        right = filled(word)
        if len(completion) != len(FORM) or any(
            a != b for a, b, x in zip(completion, right, FORM, strict=True) if x != "_"
        ):
            return 0.0
        return sum(a == b for a, b in zip(completion, right, strict=True)) / 4 - 5

    def spoiled(word: str) -> str:
        return "".join(x if draw.random() < 0.3 else draw.choice(LETTERS) for x in word)

    rows = [
        {"prompt": row["prompt"], "completion": filled(spoiled(row["word"]))}
        for row in pairs(LETTERS, 4, 2500, seed)
    ]
    model = taught_model(
        models / f"form-{seed}", seed, f"{SYMBOLS};", rows, hidden=48, context=32, epochs=8
    )
    clean = as_reward(share)
    small = changed(clean, lambda value, _: 0.001 * value, seed)
    return small_setup(model, pairs(LETTERS, 4, 1000, seed + 1), small, 25, judged=clean)


def tails(models: Path, seed: int) -> Setup:
    """Noise with heavy tails on both sides: Student's t with 1.5 degrees of freedom, times 0.3."""

    def with_noise(value: float, draw: random.Random) -> float:
        return value + 0.3 * draw.gauss(0, 1) / (draw.gammavariate(0.75, 2) / 1.5) ** 0.5

    return copy_setup(models, seed + 100, changed(as_reward(copied), with_noise, seed))


def priced(models: Path, seed: int) -> Setup:
    """The share of `a`, less 0.03 per nat from a policy that copies: judged with the KL."""
    reward = as_reward(lambda completion: completion.count("a") / 6)
    setup = copy_setup(models, seed + 100, reward, kl_coef=0.03)
    setup.judge = None
    setup.metric = "rlhf_reward"
    return setup


def half_right(models: Path, seed: int, name: str, **lengths: int) -> tuple[str, list[Any]]:
    """Return a model that sorts three digits, right in about half of its demonstrations."""
    draw = random.Random(seed)
    digits = "0123456789"

    def shuffled(word: str) -> str:
        return "".join(draw.sample(sorted(word), len(word)))

    rows = [
        {
            "prompt": row["prompt"],
            "completion": "".join(sorted(row["word"]))
            if draw.random() < 0.4
            else shuffled(row["word"]),
        }
        for row in pairs(digits, 3, 4000, seed)
    ]
    model = taught_model(
        models / f"{name}-{seed}", seed, f"{digits}:", rows, hidden=48, context=16, epochs=8
    )
    prompts = [
        {"prompt": row["prompt"], "word": "".join(sorted(row["word"]))}
        for row in pairs(digits, 3, 1000, seed + 1)
    ]
    return model, prompts


def siblings(models: Path, seed: int) -> Setup:
    """Sort three digits, 0/1, with advantages within groups of eight."""
    model, prompts = half_right(models, seed, "digits")
    group: dict[str, Any] = {"advantage": "group", "samples_per_prompt": 8}
    return small_setup(model, prompts, as_reward(is_word), 4, **group)


def adapters(models: Path, seed: int) -> Setup:
    """Digits from large to small with LoRA, from a policy that writes them in any order."""
    model, prompts = half_right(models, seed, "digits")
    backwards = [{"prompt": row["prompt"], "word": row["word"][::-1]} for row in prompts]
    return small_setup(model, backwards, as_reward(copied), 4, lora_rank=4)


class Lock:
    """Two right letters open it; a wrong one ends the game."""

    def reset(self, prompt: str) -> None:
        self.left = [prompt[0], "c"]

    def step(self, text: str) -> tuple[str, float, bool]:
        if text != self.left.pop(0):
            return "-", 0.0, True
        return "+", float(not self.left), not self.left


def lock(models: Path, seed: int) -> Setup:
    """Rare success in two turns, 1 % at the start, at batch size 128."""
    symbols = "abcd:+-"
    model = random_model(models / f"lock-{seed}", seed, symbols, hidden=48, context=16)
    options = {
        "model": model,
        "max_turns": 2,
        "max_new_tokens": 1,
        "stop_token_ids": list(range(len(symbols) + 3)),
        "rollout_batch_size": 128,
        "kl_coef": 0.0,
    }
    prompts = [{"prompt": f"{letter}:"} for letter in "abcd"] * 32
    return Setup(options=options, parts={"prompts": prompts, "environment": Lock})


class HighOrLow:
    """Guess a number from 1 to 7 in three turns: 1 for the number."""

    def reset(self, prompt: str, number: int) -> None:
        self.number = number

    def step(self, text: str) -> tuple[str, float, bool]:
        guess = int(text) if text.isdigit() else 0
        if guess == self.number:
            return "!", 1.0, True
        return "<" if guess < self.number else ">", 0.0, False


def guesses(models: Path, seed: int) -> Setup:
    """A guessing game of three turns with a separate critic, at batch size 128."""
    draw = random.Random(seed)
    symbols = "0123456789:<>!"

    def game() -> str:
        number = draw.randint(1, 7)
        text = ""
        for guess in draw.choices(range(1, 8), k=3):
            sign = "!" if guess == number else "<" if guess < number else ">"
            text += f"{guess}{sign}"
            if sign == "!":
                break
        return text

    rows = [{"prompt": ":", "completion": game()} for _ in range(2000)]
    model = taught_model(
        models / f"guesses-{seed}", seed, symbols, rows, hidden=32, context=16, epochs=4
    )
    options = {
        "model": model,
        "max_turns": 3,
        "max_new_tokens": 1,
        "stop_token_ids": list(range(len(symbols) + 3)),
        "value_model": "critic",
        "rollout_batch_size": 128,
        "kl_coef": 0.0,
    }
    prompts = [{"prompt": ":", "number": number} for number in range(1, 8) for _ in range(20)]
    return Setup(options=options, parts={"prompts": prompts, "environment": HighOrLow})


def ragged(models: Path, seed: int) -> Setup:
    """Prompts of one to eight letters: repeat the first of them, from random weights."""
    draw = random.Random(seed)
    model = random_model(models / f"ragged-{seed}", seed, "abcd:", hidden=48, context=32)
    words = ["".join(draw.choices("abcd", k=draw.randint(1, 8))) for _ in range(500)]
    prompts = [{"prompt": f"{word}:", "word": 12 * word[0]} for word in words]
    return small_setup(model, prompts, as_reward(copied), 12)


def coins(models: Path, seed: int) -> Setup:
    """The successor of a letter, 1 with probability 0.8 if right and 0.2 if wrong; batch 32."""
    model = random_model(models / f"coins-{seed}", seed, SYMBOLS, hidden=32, context=8)
    prompts = [{"prompt": f"{letter}:", "word": AFTER[letter]} for letter in LETTERS] * 4
    clean = as_reward(is_word)
    tossed = changed(clean, lambda value, draw: draw.random() < 0.2 + 0.6 * value, seed)
    return small_setup(model, prompts, tossed, 1, judged=clean, rollout_batch_size=32)


def fines(models: Path, seed: int) -> Setup:
    """−100 times the share of letters other than `a` and `e` in 64 tokens; two epochs."""
    model = random_model(models / f"fines-{seed}", seed, SYMBOLS, hidden=32, context=80)
    clean = as_reward(lambda completion: sum(x in "ae" for x in completion) / 64)
    fine: Reward = changed(clean, lambda value, _: 100 * (value - 1), seed)
    return small_setup(model, pairs(LETTERS, 2, 64, seed), fine, 64, judged=clean, ppo_epochs=2)


HELD_OUT = {
    "settled": Task(setup=settled),
    "switch": Task(setup=switch),
    "form": Task(setup=form),
    "tails": Task(setup=tails),
    "priced": Task(setup=priced, is_signed=True),
    "siblings": Task(setup=siblings),
    "adapters": Task(setup=adapters),
    "lock": Task(setup=lock),
    "guesses": Task(setup=guesses),
    "ragged": Task(setup=ragged),
    "coins": Task(setup=coins),
    "fines": Task(setup=fines),
}
