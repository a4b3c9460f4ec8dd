"""Define three small tasks that were held out when tuning `learning_rate: auto`.

`reverse` asks for four letters in reverse, `sort` for four digits in order, `next-letter` for the
successor of each of five letters. A model over characters first learns from demonstrations, half
of which are wrong in one place.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.studies.common import CONSOLE
from fastppo.data.datasets import Rows, write_rows
from fastppo.ppo.options.config import PPOConfig
from fastppo.recipes.characters import CHARACTERS, make_tokenizer, train_from_scratch

LETTERS = "abcdefgh"
WORDS = 1500
"""Number of words to draw; repeated ones are dropped."""

LEFT_OUT = 200
"""Number of words that appear in no demonstration and no prompt."""

DEMONSTRATIONS = 4
"""Number of demonstrations per word."""


class Data(NamedTuple):
    prompts: Rows
    demonstrations: Rows


def replaced(answer: str, draw: random.Random) -> str:
    """Replace one letter by a random one."""
    place = draw.randrange(len(answer))
    return answer[:place] + draw.choice(LETTERS) + answer[place + 1 :]


def swapped(answer: str, draw: random.Random) -> str:
    """Swap two neighboring digits."""
    place = draw.randrange(len(answer) - 1)
    return answer[:place] + answer[place + 1] + answer[place] + answer[place + 2 :]


def make(
    draw: random.Random,
    *,
    symbols: str,
    length: int,
    end: str,
    solve: Callable[[str], str],
    spoil: Callable[[str, random.Random], str],
) -> Data:
    """Draw words of a task, and demonstrations for them.

    Args:
        end: the end of the prompt, after the word.
        solve: a function that returns the right answer.
        spoil: a function that makes an answer wrong.
    """
    words = ["".join(draw.choice(symbols) for _ in range(length)) for _ in range(WORDS)]
    rows: Rows = [{"prompt": word + end, "answer": solve(word)} for word in dict.fromkeys(words)]
    kept = rows[LEFT_OUT:]
    demonstrations: Rows = []
    for row in kept:
        for _ in range(DEMONSTRATIONS):
            answer = row["answer"]
            completion = answer if draw.random() < 0.5 else spoil(answer, draw)
            demonstrations.append({"prompt": row["prompt"], "completion": completion})
    return Data(kept, demonstrations)


def following(word: str) -> str:
    return "".join(LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)] for letter in word)


def data_of(task: str) -> Data:
    """Return the data of `reverse`, `sort` or `next-letter`."""
    if task == "next-letter":
        draw = random.Random(9)
        return make(draw, symbols=LETTERS, length=5, end=">", solve=following, spoil=replaced)
    draw = random.Random(5)
    reverse = make(
        draw, symbols=LETTERS, length=4, end=">", solve=lambda word: word[::-1], spoil=replaced
    )
    digits = make(
        draw,
        symbols="0123456789",
        length=4,
        end="=",
        solve=lambda word: "".join(sorted(word)),
        spoil=swapped,
    )
    return reverse if task == "reverse" else digits


def correct(prompts: list[Any], completions: list[str], answer: list[str]) -> list[float]:
    """Return the reward of each completion: 1 for the right answer, 0 otherwise."""
    pairs = zip(completions, answer, strict=True)
    return [float(completion.strip() == right) for completion, right in pairs]


def letters(task: str, directory: Path, options: dict[str, Any]) -> PPOConfig:
    """Return the config of a task; write its data and train its model first if necessary."""
    folder = directory / "models" / task
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        data = data_of(task)
        train_from_scratch(
            folder / "model",
            data.demonstrations,
            0,
            CONSOLE,
            tokenizer=make_tokenizer(CHARACTERS + LETTERS + ">"),
            context=192,
            epochs=8,
        )
        write_rows(prompts, data.prompts)
    given: dict[str, Any] = {
        "model": str(folder / "model"),
        "prompts": str(prompts),
        "rewards": [f"{__file__}:{correct.__name__}"],
    }
    return PPOConfig(**given | options)
