"""`smollm2-tools`: products of two numbers, with a tool to compute them.

The chat template names the tool in one line. Demonstrations teach the format of a call and of the
turn after it. Half of them guess the product instead of calling, and a quarter of the calls have
wrong numbers; the model learns from the reward to call with the prompt's numbers.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastppo.data.datasets import Rows, write_rows
from fastppo.environments.tools import Tools
from fastppo.recipes import smollm2
from fastppo.recipes.products_tools import Products
from fastppo.stages.options import SFTConfig
from fastppo.stages.sft import train_sft

SMALLEST = 11
LARGEST = 99
"""Largest factor."""

DEMONSTRATIONS = 128
HELD_OUT = 64
PROMPTS = 2000

GUESSED = 0.5
"""Share of demonstrations that guess a product instead of calling the tool."""
WRONG = 0.25
"""Share of demonstrated calls with other numbers than the prompt's."""

CHAT_TEMPLATE = """{% for t in tools or [] %}<|im_start|>system
Tool: {{ t['function']['name'] }}({{ t['function']['parameters']['properties'] | join(', ') }})\
<|im_end|>
{% endfor %}{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Names the tool in one line. Its JSON schema would be longer than all other text."""


def prepare(directory: Path, seed: int, console: Console) -> None:
    """Write model/, prompts.jsonl and held_out.jsonl."""
    draw = random.Random(seed)
    numbers = range(SMALLEST, LARGEST + 1)
    products = [(a, b) for a in numbers for b in numbers]
    draw.shuffle(products)
    rows = [_row(a, b) for a, b in products]
    write_rows(directory / "held_out.jsonl", rows[:HELD_OUT])
    write_rows(directory / "prompts.jsonl", rows[HELD_OUT : HELD_OUT + PROMPTS])
    with TemporaryDirectory() as temporary:
        base = Path(temporary) / "smollm2"
        smollm2.unpack(base)
        model = AutoModelForCausalLM.from_pretrained(base)
        tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = CHAT_TEMPLATE
    train_sft(
        SFTConfig(
            output_dir=str(directory / "model"),
            seed=seed,
            epochs=1,
            batch_size=8,
            gradient_accumulation=1,
            learning_rate=2.0e-4,
            eval_share=0,
            checkpoint_interval=0,
            device="cpu",
        ),
        model=model,
        tokenizer=tokenizer,
        rows=_demonstrations(products[-DEMONSTRATIONS:], draw, tokenizer),
        console=console,
    )


def _row(a: int, b: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"What is {a} times {b}?"}],
        "answer": str(a * b),
    }


def _demonstrations(products: list[tuple[int, int]], draw: random.Random, tokenizer: Any) -> Rows:
    """Return prompts and completions as text, one row per turn."""
    numbers = range(SMALLEST, LARGEST + 1)
    rows = []
    for a, b in products:
        prompt = tokenizer.apply_chat_template(
            _row(a, b)["prompt"],
            tools=Tools(Products).schemas,
            add_generation_prompt=True,
            tokenize=False,
        )
        if draw.random() < GUESSED:
            rows.append({"prompt": prompt, "completion": str(draw.choice(numbers) * b)})
            continue
        if draw.random() < WRONG:
            a = draw.choice(numbers)
            b = draw.choice(numbers)
        arguments = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
        call = f"<tool_call>{arguments}</tool_call>"
        told = f"<|im_end|>\n<|im_start|>tool\n{a * b}<|im_end|>\n<|im_start|>assistant\n"
        rows += [
            {"prompt": prompt, "completion": call},
            {"prompt": f"{prompt}{call}{told}", "completion": str(a * b)},
        ]
    return rows
