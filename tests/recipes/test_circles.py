"""Data and model of the recipe `circles`."""

from __future__ import annotations

import io
import random

import pytest
import torch
from PIL import Image
from rich.console import Console

from fastppo.data.images import ImagePrompt
from fastppo.data.prompts import encode_prompts
from fastppo.models.images import ImageEncoder
from fastppo.models.policy import ActorCritic
from fastppo.recipes import circles
from fastppo.recipes.circles_reward import right_count


@pytest.mark.parametrize("count", [1, circles.MOST])
def test_a_picture_has_as_many_red_circles_as_its_answer(count: int) -> None:
    """A circle does not fill the corners of the box that its pixels span, and a square does."""
    for seed in range(20):
        image = circles.picture(count, random.Random(seed))
        width = circles.SIZE // circles.CELLS
        found = 0
        for cell in range(circles.CELLS**2):
            left, top = cell % circles.CELLS * width, cell // circles.CELLS * width
            pixels = image.crop((left, top, left + width, top + width))
            red = [
                (x, y)
                for x in range(width)
                for y in range(width)
                if pixels.getpixel((x, y)) == circles.COLORS["red"]
            ]
            if red:
                corner = (min(x for x, _ in red), min(y for _, y in red))
                found += corner not in red
        assert found == count


def test_the_model_reads_the_prompts_of_the_recipe() -> None:
    draw = random.Random(0)
    rows = [circles.make_row(draw) for _ in range(3)]
    processor = circles.make_processor()
    prompts = encode_prompts(rows, processor.tokenizer, max_prompt_tokens=32, processor=processor)
    assert all(isinstance(ids, ImagePrompt) for ids in prompts.token_ids)
    torch.manual_seed(0)
    model = circles.make_model(len(processor.tokenizer), processor.image_token_id)
    ImageEncoder(ActorCritic(model), processor).check(prompts)
    assert "<unk>" not in processor.tokenizer.convert_ids_to_tokens(prompts.token_ids[0])
    with Image.open(io.BytesIO(rows[0]["image"])) as image:
        assert image.size == (circles.SIZE, circles.SIZE)


def test_fine_tuning_trains_the_tower_and_half_of_the_counts_are_wrong(monkeypatch) -> None:
    monkeypatch.setattr(circles, "EPOCHS", 1)
    draw = random.Random(0)
    rows = [circles.make_row(draw) for _ in range(2 * circles.BATCH)]
    processor = circles.make_processor()
    torch.manual_seed(0)
    model = circles.make_model(len(processor.tokenizer), processor.image_token_id)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    circles.fine_tune(model, processor, rows, draw, Console(file=io.StringIO()))
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert any("vision_model" in name for name in changed)
    slips = [circles._slip("3", draw) for _ in range(2000)]
    # 4 standard errors of 2000 draws
    assert sum(slip != "3" for slip in slips) / 2000 == pytest.approx(circles.SLIPS, abs=0.045)
    assert set(slips) == {"2", "3", "4"}


def test_the_right_count_and_nothing_else_is_paid() -> None:
    texts = ["3", " 3", "4", "33", ""]
    assert right_count([""] * 5, texts, answer=["3"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]
