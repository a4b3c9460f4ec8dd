"""`smollm2-preferences`: a reward model of preferences between SmolLM2's own sentences.

SmolLM2 continues every prompt of `sentiment` several times. VADER labels pairs of continuations by
sentiment, with noise like human labels. A reward model, initialized from SmolLM2, learns from these
pairs and trains the policy. VADER is the gold reward.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastppo.data.datasets import Rows, write_rows
from fastppo.recipes import sentiment
from fastppo.recipes.sentiment_reward import vader
from fastppo.run.progress import progress, say
from fastppo.stages.reward_model import RewardModelConfig, train_reward_model

SAMPLES = 10
"""Continuations per prompt."""

TOKENS = 16
"""Length of a continuation in tokens."""

SHARPNESS = 4.0
"""A pair with a score difference d gets the right label with probability σ(4·d)."""


def prepare(directory: Path, seed: int, console: Console) -> None:
    """Write model/, reward_model/, preferences.jsonl, prompts.jsonl and held_out.jsonl."""
    sentiment.prepare(directory, seed, console)
    continued = _continuations(directory / "model", sentiment.PROMPTS, seed, console)
    pairs = label(continued, vader, random.Random(seed))
    write_rows(directory / "preferences.jsonl", pairs)
    options = RewardModelConfig(
        model=str(directory / "model"),
        output_dir=str(directory / "reward_model"),
        learning_rate=3e-5,
        batch_size=8,
        gradient_accumulation=2,
        epochs=2,
        checkpoint_interval=0,
        seed=seed,
    )
    metrics = train_reward_model(options, rows=pairs, console=console)
    say(console, f"reward model accuracy {metrics['accuracy']:.0%} on held-out pairs")


def _continuations(
    directory: Path, prompts: Sequence[str], seed: int, console: Console
) -> dict[str, list[str]]:
    """Sample `SAMPLES` continuations of each prompt from the model."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    continued = {}
    with progress("sampling", console, total=len(prompts)) as show:
        for number, prompt in enumerate(prompts, 1):
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            drawn = model.generate(
                ids,
                do_sample=True,
                top_k=0,
                max_new_tokens=TOKENS,
                num_return_sequences=SAMPLES,
                pad_token_id=tokenizer.eos_token_id,
            )
            texts = tokenizer.batch_decode(drawn[:, ids.shape[1] :], skip_special_tokens=True)
            continued[prompt] = texts
            show(completed=number)
    return continued


def label(
    continued: dict[str, list[str]], score: Callable[..., list[float]], draw: random.Random
) -> Rows:
    """Label pairs of neighboring continuations by score; skip ties and empty texts."""
    pairs: Rows = []
    for prompt, texts in continued.items():
        scores = score([prompt] * len(texts), texts)
        for i in range(0, len(texts) - 1, 2):
            difference = scores[i] - scores[i + 1]
            if difference == 0:
                continue
            first = draw.random() < 1 / (1 + math.exp(-SHARPNESS * difference))
            chosen, rejected = (i, i + 1) if first else (i + 1, i)
            pair = {"prompt": prompt, "chosen": texts[chosen], "rejected": texts[rejected]}
            if all(text.strip() for text in pair.values()):
                pairs.append(pair)
    return pairs
