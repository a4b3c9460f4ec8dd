"""`circles`: count the red circles in a picture, with a vision-language model made from scratch.

The pictures are drawn here: red circles among blue circles and red and blue squares. The model is
an Idefics3 of 0.1 million parameters. It is fine-tuned, vision tower included, on pictures with
their counts, of which half are off by one; with PPO it learns the right counts from a verifier,
while the tower is frozen. Held-out pictures appear in no demonstration and no prompt.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image, ImageDraw
from rich.console import Console
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
)

from fastppo.recipes.characters import make_tokenizer
from fastppo.run.progress import progress

SIZE = 32
"""Width and height of a picture, pixels."""

CELLS = 4
"""Rows and columns of shapes in a picture."""

MOST = 6
"""Most red circles in a picture; there is at least one."""

PATCH = 8
"""Width of a patch of the vision tower, pixels: a cell."""

MERGED = 2
"""Rows and columns of patches per image token."""

PROMPTS = 1500
HELD_OUT = 200
DEMONSTRATED = 3000
"""Number of pictures for fine-tuning."""

SLIPS = 0.5
"""Share of wrong demonstrations."""

EPOCHS = 8
BATCH = 64

QUESTION = "How many red circles ?"
TOKENS = ("<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>")
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
COLORS = {"red": (220, 40, 40), "blue": (40, 60, 220)}


def prepare(directory: Path, seed: int, console: Console) -> None:
    """Write model/, prompts.parquet and held_out.parquet."""
    draw = random.Random(seed)
    for name, count in (("prompts", PROMPTS), ("held_out", HELD_OUT)):
        rows = [make_row(draw) for _ in range(count)]
        Dataset.from_list(rows).to_parquet(directory / f"{name}.parquet")
    torch.manual_seed(seed)
    processor = make_processor()
    model = make_model(len(processor.tokenizer), processor.image_token_id)
    fine_tune(model, processor, [make_row(draw) for _ in range(DEMONSTRATED)], draw, console)
    model.save_pretrained(directory / "model")
    processor.save_pretrained(directory / "model")


def make_row(draw: random.Random) -> dict[str, Any]:
    """Return a prompt with a picture, as the bytes of a PNG file, and its answer."""
    count = draw.randint(1, MOST)
    file = io.BytesIO()
    picture(count, draw).save(file, "PNG")
    messages = [{"role": "user", "content": QUESTION}]
    return {"prompt": messages, "image": file.getvalue(), "answer": str(count)}


def picture(count: int, draw: random.Random) -> Image.Image:
    """Draw `count` red circles among up to five other shapes, each in a cell of its own."""
    image = Image.new("RGB", (SIZE, SIZE), (240, 240, 240))
    pen = ImageDraw.Draw(image)
    others = [("red", "square"), ("blue", "circle"), ("blue", "square")]
    shapes = [("red", "circle")] * count + draw.choices(others, k=draw.randint(0, 5))
    cells = draw.sample(range(CELLS * CELLS), len(shapes))
    width = SIZE // CELLS
    for (color, shape), cell in zip(shapes, cells, strict=True):
        side = draw.randint(width - 3, width - 2)
        left = cell % CELLS * width + draw.randint(0, width - 1 - side)
        top = cell // CELLS * width + draw.randint(0, width - 1 - side)
        pen_of = pen.ellipse if shape == "circle" else pen.rectangle
        pen_of((left, top, left + side, top + side), fill=COLORS[color])
    return image


def make_processor() -> Idefics3Processor:
    """Return a processor that needs Pillow alone."""
    tokenizer = make_tokenizer([*QUESTION.split(), *"0123456789"], r"\w+|[^\w\s]")
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    tokenizer.chat_template = TEMPLATE
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": SIZE}, max_image_size={"longest_edge": SIZE}, do_image_splitting=False
    )
    tokens = (SIZE // PATCH // MERGED) ** 2
    return Idefics3Processor(
        image_processor=images, tokenizer=tokenizer, image_seq_len=tokens, chat_template=TEMPLATE
    )


def make_model(vocabulary: int, image_token_id: int) -> Idefics3ForConditionalGeneration:
    """Return a model with random weights."""
    config = Idefics3Config(
        text_config={
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIZE,
            "patch_size": PATCH,
        },
        scale_factor=MERGED,
        image_token_id=image_token_id,
        tie_word_embeddings=False,
    )
    config.pad_token_id = 0
    model = Idefics3ForConditionalGeneration(config)
    model.generation_config.eos_token_id = 1
    return model


def fine_tune(
    model: Idefics3ForConditionalGeneration,
    processor: Idefics3Processor,
    rows: list[dict[str, Any]],
    draw: random.Random,
    console: Console,
) -> None:
    """Train all weights on the pictures, half of them with a wrong count, by AdamW."""
    text = f"<image>{QUESTION}"
    pictures = [[Image.open(io.BytesIO(row["image"])).convert("RGB")] for row in rows]
    inputs = processor(
        text=[f"{text} {_slip(row['answer'], draw)}<eos>" for row in rows],
        images=pictures,
        return_tensors="pt",
        add_special_tokens=False,
    )
    labels = inputs["input_ids"].clone()
    labels[:, :-2] = -100  # the loss is on the count and EOS
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = EPOCHS * (len(rows) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    with progress("SFT", console, total=EPOCHS) as show:
        for epoch in range(EPOCHS):
            for batch in torch.randperm(len(rows)).split(BATCH)[: len(rows) // BATCH]:
                part = {name: value[batch] for name, value in inputs.items()}
                loss = model(**part, labels=labels[batch]).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            show(completed=epoch + 1, status=f"loss {loss.item():.3f}")


def _slip(answer: str, draw: random.Random) -> str:
    """Return the answer, or a number off by one."""
    return answer if draw.random() >= SLIPS else str(int(answer) + draw.choice((-1, 1)))
