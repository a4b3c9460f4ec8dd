"""Images as inputs of a trunk: the output of the vision tower, and the positions of M-RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class EncodedImages(NamedTuple):
    """Output of the vision tower for the images of one prompt."""

    features: Tensor
    """Embeddings of the n image tokens, [n, H]."""
    deepstack: tuple[Tensor, ...]
    """What the first layers of the language model add at the image tokens, [n, H] each."""
    positions: Tensor | None
    """Positions of the prompt's tokens in time, height and width (M-RoPE), [3, S] int64 on the CPU;
    None for models with plain positions."""
    token_id: int
    """Id of an image token."""
    kind: Any
    """Class of the tower's output in transformers."""
    block: int | None = None
    """Embeddings in a block if that output is one tensor, [blocks, block, H], as of Idefics3 in
    transformers 5.19; 0 if it is [tokens, H]; None if it lists the embeddings by image."""


class ImageInputs(NamedTuple):
    """Images of a batch of sequences, as a trunk reads them."""

    features: Tensor
    """Embeddings of the image tokens of all sequences in turn, [n, H]."""
    deepstack: tuple[Tensor, ...]
    position_ids: Tensor | None
    """Position in the text, then in time, height and width: [4, B, S] int64."""
    kind: Any
    block: int | None
    """`kind` and `block` are those of `EncodedImages`."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keywords of transformers' trunks."""
        more: dict[str, Any] = {}
        if self.deepstack:
            more["deepstack_features"] = [[features] for features in self.deepstack]
        features: Any = [self.features] if self.block is None else self.features
        if self.block:
            features = self.features.unflatten(0, (-1, self.block))
        output = self.kind(pooler_output=features, **more)
        keywords: dict[str, Any] = {"mm_encoder_outputs": {"image": output}}
        if self.position_ids is not None:
            keywords["position_ids"] = self.position_ids
        return keywords

    @classmethod
    def of(
        cls, encoded: Sequence[EncodedImages | None], position_ids: Tensor | None = None
    ) -> ImageInputs | None:
        """Join the images of several sequences; None if there are none.

        Args:
            position_ids: [4, B, S] int64, for models with M-RoPE.
        """
        given = [images for images in encoded if images is not None and len(images.features)]
        if not given:
            return None
        return cls(
            features=torch.cat([images.features for images in given]),
            deepstack=tuple(map(torch.cat, zip(*(x.deepstack for x in given), strict=True))),
            position_ids=position_ids,
            kind=given[0].kind,
            block=given[0].block,
        )


def rope_positions(
    encoded: Sequence[EncodedImages | None], rows: Tensor, positions: Tensor
) -> Tensor | None:
    """Return the positions of tokens in the text, in time, height and width, [4, …] int64.

    After the prompt, all four count tokens; the last three begin after the prompt's largest.

    Args:
        encoded: of B sequences.
        rows, positions: the sequence of each token, and its place there, […] int64 on the CPU.

    Returns:
        None for models with plain positions.
    """
    if all(images is None or images.positions is None for images in encoded):
        return None
    longest = int(positions.max()) + 1
    table = torch.arange(longest).expand(3, len(encoded), longest).clone()
    for row, images in enumerate(encoded):
        if images is not None and images.positions is not None:
            tokens = images.positions.shape[1]
            table[:, row, tokens:] += int(images.positions.max()) + 1 - tokens
            table[:, row, :tokens] = images.positions
    return torch.cat([positions.unsqueeze(0), table[:, rows, positions]])


def without_image_tokens(tokens: Tensor, image_tokens: Tensor) -> Tensor:
    """Replace image tokens that the policy generated, since no image belongs to them.

    Args:
        tokens: generated tokens, [n] int64.
        image_tokens: the id of image tokens for each of them, −1 if there is none, [n].
    """
    replacement = (image_tokens == 0).long()
    return torch.where(tokens == image_tokens, replacement, tokens)
