"""Images in prompts.

A row has its images in the column `images` (a list) or `image` (one), or within the content parts
of its messages. An image is a path, the bytes of a file, or an image of Pillow. `ImagePrompt` is
the prompt's token ids with its images, so that whatever passes prompts on passes images on, too.
The vision tower is frozen: a model reads the images of a prompt once per iteration, and its output
(`EncodedImages`) is an input of policy, reference and critic in all epochs.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastppo.data.chat import is_chat, render_chat
from fastppo.data.contents import without_nulls
from fastppo.data.datasets import DataError, Rows
from fastppo.functional.scalars import describe

if TYPE_CHECKING:
    from PIL.Image import Image

    from fastppo.data.image_inputs import EncodedImages

COLUMNS = ("images", "image")
"""Columns that hold images."""

KEYS = ("image", "path")
"""Keys of a message's part that hold its image; the second is that of transformers' chats."""

THUMBNAIL = 96
"""Largest width and height of a thumbnail, pixels."""

PART = {"type": "image"}
"""Placeholder of an image in the content of a message."""


# ------------------------------------------------------------------------------------- the prompts


@dataclass(frozen=True, slots=True, eq=False)
class RowImages:
    """Images of a row."""

    sources: tuple[Any, ...]
    """Paths, bytes, or images of Pillow."""
    digest: str
    """Fingerprint of the images' pixels."""

    @classmethod
    def of(cls, sources: Sequence[Any], where: str) -> RowImages:
        """Check the images of a row.

        Raises:
            DataError: an image cannot be read.
        """
        plain = tuple(_source(source) for source in sources)
        return cls(plain, _digest(open_image(source, where) for source in plain))

    def open(self) -> list[Image]:
        """Return the images in RGB.

        Raises:
            DataError: an image cannot be read, or is not the one that was checked.
        """
        images = [open_image(source, "images") for source in self.sources]
        if _digest(images) != self.digest:
            files = [str(x) for x in self.sources if isinstance(x, (str, Path))]
            raise DataError(
                f"images: {' or '.join(files) or 'an image'} has changed during the run"
            )
        return images

    def thumbnails(self) -> list[str]:
        """Return small copies as data URIs, for records and the report."""
        uris = []
        for image in self.open():
            image.thumbnail((THUMBNAIL, THUMBNAIL))
            file = io.BytesIO()
            image.save(file, "PNG")
            uris.append(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")
        return uris


class ImagePrompt(list[int]):
    """Token ids of a prompt of a run with images. The prompt may have none.

    Attributes:
        images: the images.
        text: the prompt with one placeholder per image.
        unexpanded: token ids with one placeholder per image.
    """

    def __init__(
        self, ids: Sequence[int], images: RowImages, text: str, unexpanded: list[int]
    ) -> None:
        super().__init__(ids)
        self.images = images
        self.text = text
        self.unexpanded = unexpanded
        self._encoded: EncodedImages | None = None

    @property
    def encoded(self) -> EncodedImages:
        """Output of the vision tower.

        Raises:
            RuntimeError: no tower has read the images.
        """
        if self._encoded is None:
            raise RuntimeError("the images of a prompt have not been read by the vision tower")
        return self._encoded

    def with_encoded(self, encoded: EncodedImages) -> ImagePrompt:
        """Return a copy with the output of the vision tower."""
        prompt = ImagePrompt(self, self.images, self.text, self.unexpanded)
        prompt._encoded = encoded
        return prompt


def encoded_images(prompts: Sequence[Sequence[int]]) -> tuple[EncodedImages | None, ...] | None:
    """Return the tower's output for each prompt; None if no prompt has images."""
    if not any(isinstance(prompt, ImagePrompt) for prompt in prompts):
        return None
    return tuple(x.encoded if isinstance(x, ImagePrompt) else None for x in prompts)


def have_images(rows: Rows, column: str = "prompt") -> bool:
    """Return whether rows have images, or placeholders of images in their prompts.

    Args:
        column: name of the prompt column.
    """
    return any(
        any(row.get(name) not in (None, []) for name in COLUMNS) or _placeholders(row.get(column))
        for row in rows
    )


def encode_image_prompt(
    row: Mapping[str, Any], processor: Any, column: str, where: str
) -> tuple[Any, ImagePrompt]:
    """Tokenize the prompt of a row with the model's processor.

    Args:
        column: name of the prompt column.
        where: the start of an error message.

    Returns:
        (the prompt with placeholders alone, its token ids).

    Raises:
        DataError: the number of images is not that of the placeholders, an image cannot be read, or
            the processor rejects the prompt.
    """
    prompt: Any = row.get(column)
    sources = _images_of(row)
    tokenizer = processor.tokenizer
    options: dict[str, Any] = {}
    if is_chat(prompt):
        prompt, within = _split_messages(prompt, len(sources), where)
        if sources and within:
            raise DataError(f"{where}: images are both in a column and in the messages")
        sources = sources or within
        if _placeholders(prompt) != len(sources):
            raise DataError(
                f"{where}: {len(sources)} images for {_placeholders(prompt)} placeholders; an "
                f"image is in the column {' or '.join(COLUMNS)}, or in its part under "
                f"{' or '.join(KEYS)}"
            )
        text = render_chat(tokenizer, prompt, where, add_generation_prompt=True)
        options["add_special_tokens"] = False
    elif isinstance(prompt, str) and prompt.strip():
        text = prompt
    else:
        raise DataError(
            f"{where}: expected a prompt that is a string or a list of {{role, content}} messages, "
            f"got {describe(prompt)}"
        )
    placeholders = text.count(processor.image_token)
    if placeholders != len(sources):
        raise DataError(
            f"{where}: expected one {processor.image_token} per image in the prompt's text, got "
            f"{placeholders} for {len(sources)} images"
        )
    unexpanded = list(tokenizer(text, **options)["input_ids"])
    images = RowImages.of(sources, where)
    if not sources:
        return prompt, ImagePrompt(unexpanded, images, text, unexpanded)
    try:
        ids = processor(text=[text], images=[images.open()], **options)["input_ids"][0]
    except (ValueError, TypeError, LookupError) as error:
        raise DataError(f"{where}: the processor rejects the prompt: {error}") from error
    return prompt, ImagePrompt(list(map(int, ids)), images, text, unexpanded)


def _digest(images: Iterable[Image]) -> str:
    """Return a fingerprint of the pixels."""
    digest = hashlib.sha256()
    for image in images:
        digest.update(f"{image.size} ".encode() + image.tobytes())
    return digest.hexdigest()


def open_image(source: Any, where: str) -> Image:
    """Return an image in RGB and upright; raise DataError if it cannot be read.

    Args:
        source: a path, bytes, or an image of Pillow.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ImportError("images in prompts need Pillow: pip install pillow") from error
    if isinstance(source, Image.Image):
        return ImageOps.exif_transpose(source).convert("RGB")
    if not isinstance(source, (str, Path, bytes)):
        raise DataError(
            f"{where}: an image must be a path, bytes or an image of Pillow, got {describe(source)}"
        )
    file: Any = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with Image.open(file) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"{where}: the image cannot be read: {error}") from error


def _source(value: Any) -> Any:
    """Return the path or the bytes of an image as `datasets` stores it; others as they are."""
    if isinstance(value, Mapping):
        return value.get("bytes") or value.get("path")
    return value


def _images_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the images in the columns of a row."""
    images: list[Any] = []
    for name in COLUMNS:
        value = row.get(name)
        if isinstance(value, (list, tuple)):
            images += value
        elif value is not None:
            images.append(value)
    return images


def _placeholders(prompt: Any) -> int:
    """Count the image parts of messages."""
    if not is_chat(prompt):
        return 0
    contents = [message["content"] for message in prompt]
    return sum(
        isinstance(part, Mapping) and part.get("type") == "image"
        for content in contents
        if isinstance(content, (list, tuple))
        for part in content
    )


def _split_messages(
    messages: Sequence[Mapping[str, Any]], count: int, where: str
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages whose contents are lists of parts, and the images within them.

    If no message has a placeholder, those of the `count` images begin the first message of the
    user.

    Raises:
        DataError: a part is neither text nor an image.
    """
    images: list[Any] = []
    split: list[dict[str, Any]] = []
    missing = 0 if _placeholders(messages) else count
    for message in messages:
        content = message["content"]
        parts: list[Any] = [{"type": "text", "text": content}]
        if isinstance(content, (list, tuple)):
            parts = []
            for part in content:
                if isinstance(part, Mapping) and part.get("type") not in ("text", "image"):
                    raise DataError(
                        f"{where}: a part of a message must be text or an image, got "
                        f"{describe(part.get('type'))}"
                    )
                is_image = isinstance(part, Mapping) and part.get("type") == "image"
                if is_image:
                    images += [part[key] for key in KEYS if part.get(key) is not None][:1]
                parts.append(dict(PART) if is_image else without_nulls(part))
        if message["role"] == "user" and missing:
            parts = [dict(PART) for _ in range(missing)] + parts
            missing = 0
        split.append({**message, "content": parts})
    return split, images
