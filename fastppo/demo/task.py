"""The task of `fastppo demo`: a synthetic language and a hidden reward.

Prompts ask about a creature. Completions are short descriptions from a grammar, harsh as often as
friendly. The gold reward prefers friendly, well-formed descriptions of the prompt's creature and
its actions; no model is trained on it. The reward model sees only preference pairs, labeled by the
gold reward with noise like human labels. PPO can therefore overoptimize the reward model, and the
gold reward shows it.

The seed determines all data, and no download is needed.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CREATURES = [
    "fox",
    "bear",
    "owl",
    "wolf",
    "cat",
    "dog",
    "hen",
    "goat",
    "crow",
    "seal",
    "mole",
    "toad",
    "hare",
    "swan",
    "lynx",
    "crab",
]
LOOKS = ["small", "old", "young", "grey", "tall", "red", "lost", "quick"]
PLACES = ["river", "hill", "barn", "forest", "bridge", "garden", "lake", "road"]
FRIENDLY = {
    "trait": ["kind", "gentle", "brave", "clever", "calm", "honest", "cheerful", "patient"],
    "act": ["sings", "dances", "helps", "shares", "plays", "smiles"],
    "manner": ["softly", "gladly", "warmly", "gracefully"],
}
HARSH = {
    "trait": ["cruel", "rude", "greedy", "lazy", "bitter", "sly", "gloomy", "jealous"],
    "act": ["steals", "bites", "growls", "cheats", "spits", "fights"],
    "manner": ["badly", "angrily", "coldly", "clumsily"],
}
QUESTIONS = ("tell me about the {} .", "what is the {} like ?", "describe the {} .")

_PLEASANT = {word for words in FRIENDLY.values() for word in words}
_UNPLEASANT = {word for words in HARSH.values() for word in words}
_ACTS = {*FRIENDLY["act"], *HARSH["act"]}
_TRAIT = "|".join(FRIENDLY["trait"] + HARSH["trait"])
_ACT = "|".join(FRIENDLY["act"] + HARSH["act"])
_MANNER = "|".join(FRIENDLY["manner"] + HARSH["manner"])
_SENTENCE = re.compile(
    rf"^(?:the (?:{'|'.join(CREATURES)}) is (?:{_TRAIT})(?: and (?:{_TRAIT}))?"
    rf"|it (?:{_ACT})(?: (?:{_MANNER}))? near the (?:{'|'.join(PLACES)}))$"
)

MAX_SENTENCES = 3
PREFERENCE_SHARPNESS = 10.0
"""A pair with a gold difference d gets the right label with probability σ(10·d)."""


def gold_reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Return friendliness × (0.4 topic + 0.3 substance + 0.3 form), each in [0, 1]."""
    return [_gold(p, c) for p, c in zip(prompts, completions, strict=True)]


def _gold(prompt: str, completion: str) -> float:
    words = completion.split()
    moods = [word for word in words if word in _PLEASANT or word in _UNPLEASANT]
    if not moods:
        return 0.0
    friendliness = sum(word in _PLEASANT for word in moods) / len(moods)
    creature = next(word for word in prompt.split() if word in CREATURES)
    topic = float(creature in words)
    substance = float(any(word in _ACTS for word in words))
    *sentences, unfinished = (part.strip() for part in completion.split("."))
    well_formed = sum(bool(_SENTENCE.match(sentence)) for sentence in sentences)
    count = len(sentences) + bool(unfinished)
    # Repeated words lower the form: repetition is the cheapest exploit.
    variety = len(set(moods)) / len(moods)
    form = well_formed / max(count, 1) * variety * (1.0 if count <= MAX_SENTENCES else 0.5)
    return friendliness * (0.4 * topic + 0.3 * substance + 0.3 * form)


def prompts() -> list[str]:
    """Return all prompts."""
    return [
        question.format(f"{look} {creature}")
        for question, look, creature in itertools.product(QUESTIONS, LOOKS, CREATURES)
    ]


def describe(prompt: str, draw: random.Random) -> str:
    """Draw a description from the grammar, friendly or harsh."""
    creature = next(word for word in prompt.split() if word in CREATURES)

    def pick(kind: str) -> str:
        return draw.choice(draw.choice((FRIENDLY, HARSH))[kind])

    first = f"the {creature} is {pick('trait')}"
    if draw.random() < 0.5:
        first += f" and {pick('trait')}"
    sentences = [first]
    while len(sentences) < MAX_SENTENCES and draw.random() < 0.5:
        manner = f" {pick('manner')}" if draw.random() < 0.5 else ""
        sentences.append(f"it {pick('act')}{manner} near the {draw.choice(PLACES)}")
    return " ".join(f"{sentence} ." for sentence in sentences)


def blemish(description: str, draw: random.Random) -> str:
    """Add a fault to a description: other creature, stutter, swapped or missing words."""
    words = description.split()
    fault = draw.randrange(4)
    if fault == 0:
        return " ".join(draw.choice(CREATURES) if word in CREATURES else word for word in words)
    at = draw.randrange(len(words))
    if fault == 1:
        return " ".join(words[:at] + [words[at]] * draw.randint(2, 4) + words[at + 1 :])
    if fault == 2:
        return " ".join(words[:at] + words[at + draw.randint(1, 3) :]) or "."
    other = draw.randrange(len(words))
    words[at], words[other] = words[other], words[at]
    return " ".join(words)


def make_data(
    seed: int, *, demonstrations: int = 3000, pairs: int = 5000, held_out: int = 96
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of demonstrations, preference pairs, prompts and held-out prompts."""
    draw = random.Random(seed)
    everything = prompts()
    draw.shuffle(everything)
    held = everything[:held_out]
    known = everything[held_out:]
    sft = []
    for _ in range(demonstrations):
        prompt = draw.choice(known)
        sft.append({"prompt": prompt, "completion": " " + describe(prompt, draw)})
    return {
        "demonstrations": sft,
        "pairs": [_pair(draw.choice(known), draw) for _ in range(pairs)],
        "prompts": [{"prompt": prompt} for prompt in known],
        "held_out": [{"prompt": prompt} for prompt in held],
    }


def _pair(prompt: str, draw: random.Random) -> dict[str, str]:
    both = [describe(prompt, draw) for _ in range(2)]
    both = [blemish(text, draw) if draw.random() < 0.4 else text for text in both]
    first, second = gold_reward([prompt] * 2, both)
    agree = 1 / (1 + math.exp(-PREFERENCE_SHARPNESS * (first - second)))
    chosen, rejected = both if draw.random() < agree else reversed(both)
    return {"prompt": prompt, "chosen": " " + chosen, "rejected": " " + rejected}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word."""
    text = " ".join(question.format("") for question in QUESTIONS)
    grammar = "the is and it near ."
    moods = [word for kind in (*FRIENDLY.values(), *HARSH.values()) for word in kind]
    words = dict.fromkeys([*text.split(), *grammar.split(), *CREATURES, *LOOKS, *PLACES, *moods])
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
