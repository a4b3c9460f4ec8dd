"""Define eight tasks that the makers of `learning_rate: auto` did not choose.

Their author knew the interface of the studies and the options of `PPOConfig`, but had read neither
the rule behind `auto` nor any result of it, and ran each task once, at a fixed rate, to see that it
works. Nothing was changed after the first run of `auto`. Each is a miniature of something that
users of PPO do with language models. Every task has another architecture; batch, lengths,
advantages and precision vary:

    ledger      GPT-2         a tool with a price per call, up to four turns
    taste       Qwen3         a learned Bradley–Terry reward model, KL and an EOS penalty
    chain       Mixtral       correctness + format, four samples per prompt, GRPO's advantages
    parses      Gemma 3       0/1 at the end of up to 128 tokens, λ = 1
    mood        GPT-NeoX      256 responses from 800 words with natural entropy, KL in the loss
    digest      Qwen2         bf16 weights, LoRA, a score from 0 to 100 with a price per letter
    rubric      Phi           random weights, four prompts, RLOO, a noisy judge's marks from 1 to 10
    thermostat  Llama         random weights, ten turns with a reward each, a separate critic
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.studies.common import CONSOLE
from benchmarks.studies.rate_tasks import Judge, Setup, Task, random_model, small_setup, taught
from fastppo.recipes.characters import make_tokenizer
from fastppo.stages.options import RewardModelConfig
from fastppo.stages.reward_model import train_reward_model

WORD = r"\S+"
"""Pattern of a token of word-level tokenizers."""

EOS = 1
"""Id of the EOS token of `make_tokenizer`."""

# -------------------------------------------------------------------------------------- models


def network(kind: str, vocabulary: int, **sizes: Any) -> PreTrainedModel:
    """Return a model of an architecture with random weights."""
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": EOS}
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, vocab_size=vocabulary, **ids, **sizes), dtype=torch.float32
    )


# -------------------------------------------------------------------------------------- ledger

ITEMS = "abcdef"
PRICE = 0.1
"""What a call of the tool costs."""


class Ledger:
    """Table of secret numbers: `?a;` looks one up, `=7;` is the answer."""

    def reset(self, prompt: str, numbers: list[int], answer: int) -> None:
        self.numbers = dict(zip(ITEMS, numbers, strict=True))
        self.answer = str(answer)
        self.calls = 0

    def step(self, text: str) -> tuple[str, float, bool]:
        """Answer a call, or pay 1 − 0.1·calls for the right answer; other texts end the episode."""
        text = text.strip().removesuffix(";")
        call = re.fullmatch(r"\?([a-f])", text)
        if call:
            self.calls += 1
            return f"{self.numbers[call[1]]};", 0.0, False
        is_right = text == f"={self.answer}"
        return "", (1 - PRICE * self.calls) if is_right else 0.0, True


def ledger(models: Path, seed: int) -> Setup:
    """Tool use with a price: the larger of two secret numbers, which only a tool knows.

    GPT-2. A third of the demonstrations guess at once; the others ask for two items, sometimes the
    wrong ones or a third, and then answer wrongly in half of the cases. The best policy makes two
    right calls and gets 0.8; guessing gets 0.1 to 0.2.
    """
    draw = random.Random(seed)

    def question() -> dict[str, Any]:
        numbers = [draw.randrange(10) for _ in ITEMS]
        first, second = draw.sample(range(len(ITEMS)), 2)
        return {
            "prompt": f"{ITEMS[first]}{ITEMS[second]}:",
            "numbers": numbers,
            "answer": max(numbers[first], numbers[second]),
        }

    def episode(row: dict[str, Any]) -> str:
        guess = f"={draw.randrange(10)};"
        if draw.random() < 0.35:
            return guess
        asked = [x if draw.random() < 0.8 else draw.choice(ITEMS) for x in row["prompt"][:2]]
        if draw.random() < 0.2:
            asked.append(draw.choice(ITEMS))
        seen = [row["numbers"][ITEMS.index(x)] for x in asked]
        calls = "".join(f"?{x};{number};" for x, number in zip(asked, seen, strict=True))
        return calls + (f"={max(seen)};" if draw.random() < 0.5 else guess)

    symbols = f"{ITEMS}0123456789?=;:"
    tokenizer = make_tokenizer(symbols)
    rows = [{"prompt": row["prompt"], "completion": episode(row)} for row in _many(question, 4000)]

    make = functools.partial(network, "gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=40)

    model = taught(models / f"ledger-{seed}", seed, tokenizer, rows, make, epochs=6)
    options = {
        "model": model,
        "max_turns": 4,
        "max_new_tokens": 4,
        "stop_token_ids": [EOS, tokenizer.convert_tokens_to_ids(";")],
        "kl_coef": 0.0,
    }
    return Setup(options=options, parts={"prompts": _many(question, 1000), "environment": Ledger})


def _many(make: Callable[[], Any], count: int) -> list[Any]:
    return [make() for _ in range(count)]


# --------------------------------------------------------------------------------------- taste


class Language:
    """A made-up language: each word has likely successors, and frequencies follow Zipf's law.

    Args:
        words: size of the vocabulary.
        successors: likely successors of each word.
        mixed: share of the words that are drawn whatever the word before.
        draw: source of randomness.
    """

    def __init__(self, words: int, successors: int, mixed: float, draw: random.Random) -> None:
        self.words = [f"w{i}" for i in range(words)]
        self.weights = [1 / (i + 5) for i in range(words)]
        self.mixed = mixed
        self.after = {
            word: draw.choices(self.words, self.weights, k=successors) for word in self.words
        }
        self.ranks = [1 / (i + 1) for i in range(successors)]
        self.draw = draw

    def text(self, length: int) -> list[str]:
        """Return a text of random words."""
        words: list[str] = []
        while len(words) < length:
            if not words or self.draw.random() < self.mixed:
                words += self.draw.choices(self.words, self.weights)
            else:
                words += self.draw.choices(self.after[words[-1]], self.ranks)
        return words


def taste(models: Path, seed: int) -> Setup:
    """RLHF: a reward model learned from 1500 noisy preferences, judged with the price of the KL.

    Qwen3 over 120 words, responses of 6 to 22 words. People like some words, dislike others and
    repetitions; their preferences follow a Bradley–Terry model. A KL coefficient of 0.05 per nat
    and a penalty of 1 without EOS. The judged value is the score less the KL penalty.
    """
    draw = random.Random(seed)
    language = Language(120, 10, 0.25, draw)
    liking = {word: draw.gauss(0, 1) for word in language.words}

    def gold(words: Sequence[str]) -> float:
        repeats = len(words) - len(set(words))
        return sum(liking[word] for word in words) / len(words) ** 0.5 - 0.4 * repeats

    def response() -> list[str]:
        return language.text(2 + draw.randint(6, 22))

    def row(words: list[str]) -> dict[str, str]:
        return {"prompt": " ".join(words[:2]), "completion": " " + " ".join(words[2:])}

    def preference() -> dict[str, str]:
        start, other = response(), response()[2:]
        first, second = start[2:], other
        probability = 1 / (1 + math.exp(gold(second) - gold(first)))
        better, worse = (first, second) if draw.random() < probability else (second, first)
        return {
            "prompt": " ".join(start[:2]),
            "chosen": " " + " ".join(better),
            "rejected": " " + " ".join(worse),
        }

    tokenizer = spaced_tokenizer(language.words)
    rows = [row(response()) for _ in range(3000)]
    comparisons = _many(preference, 1500)
    prompts = [{"prompt": " ".join(language.text(2))} for _ in range(1000)]

    make = functools.partial(
        network,
        "qwen3",
        hidden_size=48,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=64,
    )

    model = taught(models / f"taste-{seed}" / "sft", seed, tokenizer, rows, make, epochs=4)
    scorer = models / f"taste-{seed}" / "reward"
    if not (scorer / "config.json").exists():
        config = RewardModelConfig(
            model=model,
            output_dir=str(scorer),
            epochs=3,
            batch_size=32,
            gradient_accumulation=1,
            learning_rate=1e-3,
            checkpoint_interval=0,
            seed=seed,
            device="cpu",
        )
        train_reward_model(config, rows=comparisons, console=CONSOLE)
    options = {
        "model": model,
        "max_new_tokens": 24,
        "kl_coef": 0.05,
        "missing_eos_penalty": 1.0,
    }
    parts = {"prompts": prompts, "rewards": [str(scorer)]}
    return Setup(options=options, parts=parts, metric="rlhf_reward")


def spaced_tokenizer(words: Sequence[str]) -> Any:
    """Return a tokenizer with a token per word whose texts have spaces between the words."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    ids = {name: i for i, name in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(kinds.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


# --------------------------------------------------------------------------------------- chain


def chain(models: Path, seed: int) -> Setup:
    """Reasoning with a verifier: four digits modulo 10, 1 for the answer and 0.2 for the format.

    Mixtral with four experts. The format is the three running sums, `#`, and the answer. A third
    of the demonstrations have no running sums and a random answer; in the others each step is wrong
    in one of four. GRPO's advantages and loss: four samples per prompt, 128 responses, the clip
    range of DAPO.
    """
    draw = random.Random(seed)

    def problem() -> tuple[str, list[int]]:
        digits = [draw.randrange(10) for _ in range(4)]
        return "+".join(map(str, digits)) + "=", digits

    def solution(digits: list[int]) -> str:
        if draw.random() < 0.35:
            return f"#{draw.randrange(10)}"
        sums = [digits[0]]
        for digit in digits[1:]:
            is_right = draw.random() < 0.75
            sums.append((sums[-1] + digit) % 10 if is_right else draw.randrange(10))
        return "".join(map(str, sums[1:])) + f"#{sums[-1]}"

    problems = _many(problem, 6000)
    rows = [{"prompt": text, "completion": solution(digits)} for text, digits in problems]
    prompts = [
        {"prompt": text, "answer": str(sum(digits) % 10)} for text, digits in _many(problem, 1000)
    ]

    def correct(prompts: Any, completions: list[str], answer: list[str]) -> list[float]:
        ends = (text.rpartition("#") for text in completions)
        return [
            float(mark == "#" and end == right)
            for (_, mark, end), right in zip(ends, answer, strict=True)
        ]

    def form(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
        return [float(bool(re.fullmatch(r"\d{3}#\d", text))) for text in completions]

    def both(prompts: Any, completions: list[str], answer: list[str]) -> list[float]:
        pairs = zip(correct(prompts, completions, answer), form(prompts, completions), strict=True)
        return [right + 0.2 * formed for right, formed in pairs]

    make = functools.partial(
        network,
        "mixtral",
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
    )

    tokenizer = make_tokenizer("0123456789+=#")
    model = taught(models / f"chain-{seed}", seed, tokenizer, rows, make, epochs=8)
    options = {
        "model": model,
        "max_new_tokens": 8,
        "kl_coef": 0.0,
        "rollout_batch_size": 128,
        "samples_per_prompt": 4,
        "advantage": "group",
        "aggregation": "seq-mean-token-mean",
        "clip_ratio_high": 0.28,
        "reward_weights": [1.0, 0.2],
    }
    parts = {"prompts": prompts, "rewards": [correct, form]}
    return Setup(options=options, parts=parts, judge=Judge(_with_columns(both, "answer")))


def _with_columns(reward: Callable[..., list[float]], *names: str) -> Callable[..., list[float]]:
    """Return a reward that gets these columns only."""

    def selected(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
        return reward(prompts, completions, **{name: columns[name] for name in names})

    return selected


# -------------------------------------------------------------------------------------- parses

OPENING = {"(": ")", "[": "]"}
DEPTH = 2
NAMES = "xyz"
LEAST = 32
"""Least number of letters of a program."""


def does_parse(text: str) -> bool:
    """Whether all brackets are closed, by their kind and in order."""
    stack = []
    for letter in text:
        if letter in OPENING:
            stack.append(OPENING[letter])
        elif letter in ")]" and (not stack or stack.pop() != letter):
            return False
    return not stack


def program(start: str, length: int, draw: random.Random) -> str:
    """Return a text of about `length` letters that parses together with its start."""
    stack = [OPENING[letter] for letter in start]
    text = ""
    while len(text) < length or stack:
        is_late = len(text) >= length
        if draw.random() < 0.7:
            text += draw.choice(NAMES)
        elif stack and (is_late or len(stack) == DEPTH or draw.random() < 0.5):
            text += stack.pop()
        elif not is_late:
            text += draw.choice("([")
            stack.append(OPENING[text[-1]])
    return text


def parses(models: Path, seed: int) -> Setup:
    """Code that parses: 0/1 at the end of up to 128 tokens.

    Gemma 3. The prompt is one or two opening brackets; the response must close everything, have at
    least 32 letters and end with EOS. The demonstrations have 32 to 90 letters, one of 100 of
    which is wrong. Two epochs, and λ = 1 as usual with a single reward at the end.
    """
    draw = random.Random(seed)

    def start() -> str:
        return "".join(draw.choice("([") for _ in range(draw.randint(1, 2)))

    def noisy(text: str) -> str:
        return "".join(x if draw.random() > 0.01 else draw.choice("()[]xyz") for x in text)

    rows = []
    for _ in range(1800):
        begin = start()
        text = noisy(program(begin, draw.randint(32, 90), draw))
        rows.append({"prompt": f":{begin}", "completion": text})
    prompts = [{"prompt": f":{begin}", "begin": begin} for begin in _many(start, 300)]

    def passes(
        prompts: Any,
        completions: list[str],
        completion_ids: list[list[int]],
        begin: list[str],
    ) -> list[float]:
        every = zip(completions, completion_ids, begin, strict=True)
        return [
            float(len(text) >= LEAST and ids[-1] == EOS and does_parse(first + text))
            for text, ids, first in every
        ]

    class LengthyJudge(Judge):
        """Judge of a reward that reads token ids."""

        def __call__(  # type: ignore[override]
            self,
            prompts: Any,
            completions: list[str],
            completion_ids: list[list[int]],
            begin: list[str],
        ) -> list[float]:
            return super().__call__(
                prompts, completions, completion_ids=completion_ids, begin=begin
            )

    make = functools.partial(
        network,
        "gemma3_text",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        max_position_embeddings=160,
    )

    tokenizer = make_tokenizer("()[]xyz:")
    model = taught(models / f"parses-{seed}", seed, tokenizer, rows, make, epochs=10)
    setup = small_setup(model, prompts, passes, 128, lam=1.0, ppo_epochs=2)
    setup.judge = LengthyJudge(passes)
    return setup


# ---------------------------------------------------------------------------------------- mood

LENGTH_OF_MOOD = 14


def mood(models: Path, seed: int) -> Setup:
    """Sentiment: zero to five stars for up to 14 words of a vocabulary of 800, at batch size 256.

    GPT-NeoX, trained on texts with almost five nats per word. One word of eight is good and one of
    eight bad; the stars saturate. Four minibatches of four epochs, and a KL to the reference in the
    loss.
    """
    draw = random.Random(seed)
    language = Language(800, 12, 0.4, draw)
    shuffled = draw.sample(language.words, 200)
    worth = dict.fromkeys(shuffled[:100], 1.0) | dict.fromkeys(shuffled[100:], -1.0)
    texts = [language.text(LENGTH_OF_MOOD + 3) for _ in range(6000)]
    rows = [
        {"prompt": " ".join(text[:3]), "completion": " " + " ".join(text[3:])} for text in texts
    ]
    prompts = [{"prompt": " ".join(language.text(3))} for _ in range(1000)]

    def stars(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
        sums = [sum(worth.get(word, 0.0) for word in text.split()) for text in completions]
        return [5 / (1 + math.exp(1 - x / 2)) for x in sums]

    make = functools.partial(
        network,
        "gpt_neox",
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=32,
    )

    tokenizer = spaced_tokenizer(language.words)
    model = taught(models / f"mood-{seed}", seed, tokenizer, rows, make, epochs=3)
    return small_setup(
        model,
        prompts,
        stars,
        LENGTH_OF_MOOD,
        rollout_batch_size=256,
        minibatches=4,
        ppo_epochs=4,
        kl_loss_coef=0.01,
    )


# -------------------------------------------------------------------------------------- digest

SMALL = "abcdefgh"


def in_order(text: str, wanted: str) -> int:
    """Return the length of the longest common subsequence."""
    lengths = [0] * (len(wanted) + 1)
    for letter in text:
        before = lengths[:]
        for i, other in enumerate(wanted):
            lengths[i + 1] = before[i] + 1 if letter == other else max(before[i + 1], lengths[i])
    return lengths[-1]


def digest(models: Path, seed: int) -> Setup:
    """A summary with a price on its length, scored from 0 to 100.

    The score is the recall of ROUGE-L in percent, less 8 per letter too many. Qwen2 with bf16
    weights and LoRA of rank 8, at batch size 32. The summary of ten letters is its four capitals,
    in order. The demonstrations lack a third of them and have other letters too.
    """
    draw = random.Random(seed)

    def document() -> dict[str, str]:
        letters = [draw.choice(SMALL) for _ in range(10)]
        for place in draw.sample(range(10), 4):
            letters[place] = letters[place].upper()
        text = "".join(letters)
        return {"prompt": f"{text}>", "wanted": "".join(x for x in text if x.isupper())}

    def extract(text: str) -> str:
        return "".join(x for x in text if draw.random() < (0.65 if x.isupper() else 0.2))

    def score(prompts: Any, completions: list[str], wanted: list[str]) -> list[float]:
        return [
            max(0.0, 25.0 * in_order(text, right) - 8 * max(0, len(text) - len(right)))
            for text, right in zip(completions, wanted, strict=True)
        ]

    rows = [
        {"prompt": row["prompt"], "completion": extract(row["prompt"][:-1]) or "a"}
        for row in _many(document, 5000)
    ]

    make = functools.partial(
        network,
        "qwen2",
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )

    tokenizer = make_tokenizer(f"{SMALL}{SMALL.upper()}>")
    model = taught(models / f"digest-{seed}", seed, tokenizer, rows, make, epochs=6)
    return small_setup(
        model,
        _many(document, 1000),
        score,
        11,
        judged=_with_columns(score, "wanted"),
        rollout_batch_size=32,
        lora_rank=8,
        lora_alpha=16.0,
        param_dtype="bfloat16",
        precision="bf16",
    )


# -------------------------------------------------------------------------------------- rubric

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
VOWELS = "aeiou"


def grade(text: str, first: str) -> float:
    """Return how well a word fulfills the rubric, from 0 to 1."""
    alternates = [(a in VOWELS) != (b in VOWELS) for a, b in itertools.pairwise(text)]
    return (
        0.2 * text.startswith(first)
        + 0.4 * sum(alternates) / max(7, len(alternates))
        + 0.2 * len(set(text)) / max(8, len(text))
        + 0.2 * (6 <= len(text) <= 10)
    )


def rubric(models: Path, seed: int) -> Setup:
    """A judge's marks, whole numbers from 1 to 10 with noise, on a handful of repeated prompts.

    Phi with random weights over 26 letters, at temperature 0.8 and with an entropy bonus. A word of
    six to ten letters should begin with the prompt's letter, alternate vowels and consonants, and
    repeat no letter. Four prompts with 16 samples each, RLOO. The noise has a deviation of one
    mark; the judged value has none and goes from 0 to 1.
    """
    folder = models / f"rubric-{seed}"
    if not (folder / "config.json").exists():
        tokenizer = make_tokenizer(f"{ALPHABET}:")
        torch.manual_seed(seed)
        model = network(
            "phi",
            len(tokenizer),
            hidden_size=48,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    draw = random.Random(seed)

    def clean(prompts: Any, completions: list[str], first: list[str]) -> list[float]:
        return [grade(text, letter) for text, letter in zip(completions, first, strict=True)]

    def marks(prompts: Any, completions: list[str], first: list[str]) -> list[float]:
        noisy = [1 + 9 * x + draw.gauss(0, 1) for x in clean(prompts, completions, first)]
        return [float(min(10, max(1, round(x)))) for x in noisy]

    prompts = [{"prompt": f"{letter}:", "first": letter} for letter in "kmst"]
    return small_setup(
        str(folder),
        prompts,
        marks,
        12,
        judged=_with_columns(clean, "first"),
        samples_per_prompt=16,
        advantage="rloo",
        temperature=0.8,
        entropy_coef=0.005,
    )


# ---------------------------------------------------------------------------------- thermostat

LEVELS = "abcdefghi"
TURNS = 10


class Thermostat:
    """Room whose temperature drifts, pays up to 1 for each turn near the wanted temperature."""

    chance: random.Random

    def reset(self, prompt: str, wanted: int, level: int, drift: float) -> None:
        self.wanted = wanted
        self.level = level
        self.drift = drift
        self.turn = 0

    def step(self, text: str) -> tuple[str, float, bool]:
        """Heat with `+`, cool with `-`, do nothing with any other text."""
        self.turn += 1
        self.level += {"+": 1, "-": -1}.get(text.strip(), 0)
        if self.chance.random() < abs(self.drift):
            self.level += 1 if self.drift > 0 else -1
        self.level = min(max(self.level, 0), len(LEVELS) - 1)
        reward = max(0.0, 1 - abs(self.level - self.wanted) / 4)
        return LEVELS[self.level], reward, self.turn == TURNS


def thermostat(models: Path, seed: int) -> Setup:
    """Control: ten turns with a reward each, from random weights, with chance in the environment.

    Llama. Each episode has a hidden drift, up, down or none, which moves the temperature in four of
    ten turns. `turn_gae` with a separate critic; rewards from 0 to 10.
    """
    draw = random.Random(seed)
    symbols = f"{LEVELS}+-0:"
    model = random_model(models / f"thermostat-{seed}", seed, symbols, hidden=40, context=40)

    class Room(Thermostat):
        """Thermostat whose chance comes from the seed of the run."""

        chance = random.Random(seed)

    def room() -> dict[str, Any]:
        wanted, level = draw.randrange(1, 8), draw.randrange(len(LEVELS))
        return {
            "prompt": f"{LEVELS[wanted]}:{LEVELS[level]}",
            "wanted": wanted,
            "level": level,
            "drift": draw.choice([-0.4, 0.0, 0.4]),
        }

    options = {
        "model": model,
        "max_turns": TURNS,
        "max_new_tokens": 1,
        "stop_token_ids": list(range(len(symbols) + 3)),
        "advantage": "turn_gae",
        "value_model": "critic",
        "kl_coef": 0.0,
    }
    return Setup(options=options, parts={"prompts": _many(room, 600), "environment": Room})


INDEPENDENT: dict[str, Task] = {
    "ledger": Task(setup=ledger),
    "taste": Task(setup=taste, is_signed=True),
    "chain": Task(setup=chain),
    "parses": Task(setup=parses),
    "mood": Task(setup=mood),
    "digest": Task(setup=digest),
    "rubric": Task(setup=rubric),
    "thermostat": Task(setup=thermostat),
}
