"""Images of prompts: their sources, placeholders, positions and thumbnails."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
import torch
from PIL import Image

from fastppo.data.datasets import DataError
from fastppo.data.image_inputs import EncodedImages, rope_positions, without_image_tokens
from fastppo.data.images import ImagePrompt, RowImages, have_images
from fastppo.data.prompts import Prompts, encode_prompts
from fastppo.rollout.prompts import distinct

TEMPLATE = (
    "{% for m in messages %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% endfor %}w0"
)


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _encoded(rows: list[dict[str, Any]]) -> Prompts:
    processor = tiny_vision.processor("idefics3")
    processor.tokenizer.chat_template = TEMPLATE
    return encode_prompts(rows, processor.tokenizer, max_prompt_tokens=60, processor=processor)


def test_a_path_bytes_and_an_image_are_the_same(tmp_path: Path) -> None:
    image = tiny_vision.image(9, 7)
    path = tmp_path / "image.png"
    path.write_bytes(_png(image))
    sources = (image, str(path), path, _png(image), {"bytes": _png(image), "path": None})
    digests = {RowImages.of([source], "row 1").digest for source in sources}
    assert len(digests) == 1
    assert RowImages.of([tiny_vision.image(9, 7, 1)], "row 1").digest not in digests
    (opened,) = RowImages.of([str(path)], "row 1").open()
    assert opened.tobytes() == image.tobytes()


def test_a_photograph_is_turned_upright(tmp_path: Path) -> None:
    """Cameras save the pixels as the sensor has them, with an orientation in EXIF."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    lying = tiny_vision.image(40, 24)
    lying.save(tmp_path / "lying.png", exif=exif)
    upright = lying.transpose(Image.Transpose.ROTATE_270)
    with Image.open(tmp_path / "lying.png") as photograph:
        for source in (tmp_path / "lying.png", photograph):
            (opened,) = RowImages.of([source], "row 1").open()
            assert opened.tobytes() == upright.tobytes()


def test_a_file_that_changes_during_a_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    tiny_vision.image(9, 7).save(path)
    images = RowImages.of([str(path)], "row 1")
    tiny_vision.image(9, 7, seed=1).save(path)
    with pytest.raises(DataError, match=r"image\.png"):
        images.open()


def test_prompts_as_text_and_as_messages_have_the_same_tokens(tmp_path: Path) -> None:
    image = tiny_vision.image(9, 7)
    path = tmp_path / "image.png"
    path.write_bytes(_png(image))
    part = {"type": "image"}
    text = {"type": "text", "text": "w1"}
    prompts = _encoded(
        [
            {"prompt": "<image> w1 w0", "image": image},
            {"prompt": [{"role": "user", "content": "w1"}], "images": [image]},
            {"prompt": [{"role": "user", "content": [part, text]}], "image": image},
            {"prompt": [{"role": "user", "content": [{**part, "image": image}, text]}]},
            {"prompt": [{"role": "user", "content": [{**part, "path": str(path)}, text]}]},
        ]
    )
    assert all(isinstance(ids, ImagePrompt) for ids in prompts.token_ids)
    assert len({(*ids, ids.images.digest) for ids in prompts.token_ids}) == 1
    # Records of a run hold the placeholder instead of the image.
    assert prompts.prompts[3] == [{"role": "user", "content": [part, text]}]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "w1", "image": tiny_vision.image(9, 7)}, "<image>"),
        ({"prompt": "<image> w1"}, "<image>"),
        ({"prompt": "<image> w1", "image": "absent.png"}, "absent.png"),
        ({"prompt": "<image> w1", "image": b"no image"}, "image"),
        ({"prompt": "<image> w1", "image": 3}, "3"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "placeholders"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "video"),
        ({"prompt": "", "image": tiny_vision.image(9, 7)}, "prompt"),
        ({"prompt": " "}, "prompt"),
        (
            {
                "prompt": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "image": tiny_vision.image(9, 7)}],
                    }
                ],
                "image": tiny_vision.image(9, 7),
            },
            "column",
        ),
    ],
)
def test_unusable_rows_are_refused_by_number(row: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError, match="row 1") as refusal:
        _encoded([row])
    assert named in str(refusal.value)


def test_rows_have_images_in_columns_or_messages() -> None:
    part = {"type": "image"}
    assert have_images([{"prompt": "w1"}, {"prompt": "w1", "image": b""}])
    assert have_images([{"prompt": [{"role": "user", "content": [part]}]}])
    assert not have_images([{"prompt": "w1", "images": [], "image": None}])
    assert not have_images([{"prompt": [{"role": "user", "content": "image"}]}])


def test_the_same_ids_with_other_images_are_distinct() -> None:
    images = [tiny_vision.image(9, 7), tiny_vision.image(9, 7, 1), tiny_vision.image(9, 7)]
    ids = _encoded([{"prompt": "<image> w1", "image": image} for image in images]).token_ids
    assert len({tuple(prompt) for prompt in ids}) == 1
    first_rows, which = distinct(ids)
    assert first_rows.tolist() == [0, 1]
    assert which.tolist() == [0, 1, 0]


def test_a_fingerprint_depends_on_the_images() -> None:
    images = [tiny_vision.image(9, 7, seed) for seed in (0, 1)]
    rows = [{"prompt": "<image> w1", "image": image} for image in images]
    one, other = (_encoded([row]).fingerprint() for row in rows)
    assert one != other


def test_a_record_has_a_thumbnail() -> None:
    prompts = _encoded([{"prompt": "<image> w1", "image": tiny_vision.image(300, 200)}])
    record = prompts.record(0)
    (uri,) = record["images"]
    with Image.open(io.BytesIO(base64.b64decode(uri.partition("base64,")[2]))) as thumbnail:
        assert thumbnail.size == (64, 96)
    assert "images" not in Prompts(["w1"], [[1]]).record(0)


def test_positions_after_the_prompt_count_on_in_all_dimensions() -> None:
    positions = torch.tensor([[0, 1, 1, 3], [0, 1, 2, 3], [0, 1, 1, 3]])
    empty = torch.empty(0, 4)
    images = EncodedImages(empty, (), positions, token_id=7, kind=None)
    # The first row has two more tokens; the second one is text.
    rows = torch.tensor([[0] * 6, [1] * 6])
    found = rope_positions([images, None], rows, torch.arange(6).expand(2, -1))
    assert found is not None
    assert found[0].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert found[1:, 0].tolist() == [
        [0, 1, 1, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 1, 3, 4, 5],
    ]
    assert found[1:, 1].tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    plain = images._replace(positions=None)
    assert rope_positions([plain, None], rows, torch.arange(6).expand(2, -1)) is None


def test_generated_image_tokens_are_replaced() -> None:
    tokens = torch.tensor([5, 7, 7, 0])
    assert without_image_tokens(tokens, torch.tensor([7, 7, -1, 7])).tolist() == [5, 0, 7, 0]
    assert without_image_tokens(tokens, torch.tensor([0, 0, 0, 0])).tolist() == [5, 7, 7, 1]
