"""The frozen vision tower of a policy, and the processor of its images.

The tower reads the images of each prompt once per iteration, one prompt at a time, so that its
output does not depend on the other prompts. `ImageEncoder.check` compares the logits of the first
prompt with the model's own, and refuses models that need more than the tower's output and
positions, such as Gemma 3, whose image tokens attend in both directions.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoImageProcessor, AutoProcessor

from fastppo.data.image_inputs import EncodedImages, ImageInputs, rope_positions
from fastppo.data.images import ImagePrompt
from fastppo.data.prompts import Prompts
from fastppo.models.multimodal import PROCESSOR_FILES
from fastppo.models.policy import LanguageModel
from fastppo.models.sharding import is_sharded, unsharded
from fastppo.models.trunk import hidden_states, trunk_of

OUTPUTS = "mm_encoder_outputs"
"""Keyword of transformers' trunks for the output of a tower, from 5.18 on."""


class GridProcessor:
    """The processor of Qwen's models, without the one for videos, which needs torchvision.

    Args:
        image_processor: returns `image_grid_thw`, the patches of each image in time, height and
            width.
        image_token: placeholder of an image in a text.
    """

    def __init__(self, image_processor: Any, tokenizer: Any, image_token: str) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.image_token = image_token

    def __call__(
        self, text: Sequence[str], images: Sequence[Sequence[Any]], **options: Any
    ) -> dict[str, Any]:
        """Return the ids of one text and the tensors of its images."""
        inputs = dict(self.image_processor(images=list(images[0]), return_tensors="pt"))
        merged = self.image_processor.merge_size**2
        before, *after = text[0].split(self.image_token)
        for grid, piece in zip(inputs["image_grid_thw"], after, strict=True):
            before += self.image_token * (int(grid.prod()) // merged) + piece
        return {**self.tokenizer([before], **options), **inputs}

    def save_pretrained(self, directory: Any) -> None:
        """Save both parts."""
        self.image_processor.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


def load_processor(name: str, tokenizer: Any, config: Any) -> Any:
    """Return the processor of a directory or hub name, which gets the run's tokenizer.

    Args:
        config: the model's.

    Raises:
        ValueError: there is none that works here.
    """
    try:
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=False)
        if not hasattr(processor, "image_processor"):
            raise ValueError("it has no image processor")
        processor.tokenizer = tokenizer
        return processor
    except Exception as error:  # damaged files, or packages that are missing, fail in any way
        if importlib.util.find_spec("torchvision") is None:
            images = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
            if hasattr(images, "merge_size"):
                token = tokenizer.convert_ids_to_tokens(config.image_token_id)
                return GridProcessor(images, tokenizer, token)
        raise ValueError(
            f"model {name}: its processor of images cannot be loaded: {error}"
        ) from error


class NoImages:
    """Leaves prompts of text as they are."""

    def __call__(self, prompts: Prompts) -> Prompts:
        """Return the prompts."""
        return prompts

    def save(self, directory: Path) -> None:
        """Save a processor that was passed in next to the policy, unless it has files there."""


class ImageEncoder(NoImages):
    """Runs the vision tower on the images of prompts.

    Args:
        policy: a vision-language model.
        processor: its processor.

    Raises:
        ValueError: the model does not take the output of a tower.
    """

    def __init__(self, policy: LanguageModel, processor: Any) -> None:
        self.policy = policy
        self.processor = processor
        self.trunk: Any = trunk_of(policy.causal_lm)
        forward: Any = self.trunk.forward
        if OUTPUTS not in inspect.signature(forward).parameters:
            raise ValueError(
                f"images: {type(self.trunk).__name__} takes no {OUTPUTS} in this version of "
                "transformers; use transformers>=5.18 and a family such as Idefics3, SmolVLM, "
                "Qwen2.5-VL or Qwen3-VL"
            )
        tower: Any = self.trunk.get_image_features
        self.names = set(inspect.signature(tower).parameters)

    def save(self, directory: Path) -> None:
        if not any((directory / file).exists() for file in PROCESSOR_FILES):
            self.processor.save_pretrained(directory)

    def __call__(self, prompts: Prompts) -> Prompts:
        """Return the prompts with the tower's output for their images, each computed once."""
        read: dict[tuple[str, str], EncodedImages] = {}
        token_ids: list[list[int]] = []
        gathered: AbstractContextManager = nullcontext()
        if is_sharded(self.policy):
            gathered = unsharded(self.policy)
        with gathered:
            for ids in prompts.token_ids:
                if isinstance(ids, ImagePrompt):
                    key = (ids.images.digest, ids.text)
                    if key not in read:
                        read[key] = self.encode(ids)
                    ids = ids.with_encoded(read[key])
                token_ids.append(ids)
        return Prompts(prompts.prompts, token_ids, prompts.columns)

    def inputs(self, prompt: ImagePrompt) -> dict[str, Any]:
        """Return the processor's tensors for the images of a prompt, on the policy's device."""
        inputs = self.processor(
            text=[prompt.text], images=[prompt.images.open()], return_tensors="pt"
        )
        device = self.policy.device
        return {name: value.to(device) for name, value in inputs.items() if name != "input_ids"}

    @torch.no_grad()
    def encode(self, prompt: ImagePrompt) -> EncodedImages:
        """Run the vision tower on the images of a prompt.

        Raises:
            ValueError: the tower does not return one embedding per image token.
        """
        token_id = self.policy.config.image_token_id
        if not prompt.images.sources:
            return EncodedImages(torch.empty(0), (), None, token_id, kind=None, block=None)
        inputs = {k: v for k, v in self.inputs(prompt).items() if k in self.names}
        with self.policy.autocast():
            output = self.trunk.get_image_features(**inputs, return_dict=True)
        features = _joined(output.pooler_output)
        count = prompt.count(token_id)
        if len(features) != count:
            raise ValueError(
                f"images: the prompt has {count} image tokens, and the vision tower returns "
                f"{len(features)} embeddings"
            )
        deepstack = getattr(output, "deepstack_features", None) or ()
        return EncodedImages(
            features=features,
            deepstack=tuple(map(_joined, deepstack)),
            positions=self._positions(prompt, inputs),
            token_id=token_id,
            kind=type(output),
            block=_block(output.pooler_output),
        )

    def _positions(self, prompt: ImagePrompt, inputs: dict[str, Any]) -> Any:
        """Return the positions of M-RoPE, [3, S] on the CPU; None for models without it."""
        if not hasattr(self.trunk, "get_rope_index"):
            return None
        ids = torch.tensor([prompt])
        positions, _ = self.trunk.get_rope_index(
            ids,
            mm_token_type_ids=(ids == self.policy.config.image_token_id).int(),
            image_grid_thw=inputs["image_grid_thw"].cpu(),
        )
        return positions[:, 0]

    @torch.no_grad()
    def check(self, prompts: Prompts) -> None:
        """Compare the logits of the first prompt with images with the model's own.

        Raises:
            ValueError: they cannot be computed, or differ.
        """
        given = [ids for ids in prompts.token_ids if isinstance(ids, ImagePrompt)]
        first = next((ids for ids in given if ids.images.sources), None)
        if first is None:
            return
        name = type(self.policy.causal_lm).__name__
        try:
            theirs, ours = self._both_logits(first)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model of another kind may fail in any way
            raise ValueError(
                f"images: {name} cannot be trained with images: on the first prompt with images, "
                f"its vision tower, or its trunk on the tower's output, raises "
                f"{type(error).__name__}: {error}"
            ) from error
        tolerance = 1e-3 if self.policy.is_full_precision else 5e-2
        worst = (theirs - ours).abs().max().item()
        if not worst <= tolerance * (1 + theirs.abs().max().item()):
            raise ValueError(
                f"images: {name} computes other logits from its vision tower's output than from "
                f"the image, by {worst:.3g}. Do its image tokens attend in both directions? That "
                "is not supported"
            )

    def _both_logits(self, prompt: ImagePrompt) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits from the images, and from the tower's output, [1, S, V] fp32."""
        ids = torch.tensor([prompt], device=self.policy.device)
        encoded = [self.encode(prompt)]
        places = torch.arange(len(prompt)).unsqueeze(0)
        positions = rope_positions(encoded, torch.zeros_like(places), places)
        if positions is not None:
            positions = positions.to(ids.device)
        inputs = self.inputs(prompt)
        if "mm_token_type_ids" not in inputs and positions is not None:
            inputs["mm_token_type_ids"] = (ids == self.policy.config.image_token_id).int()
        with self.policy.autocast():
            theirs = self.policy.causal_lm(input_ids=ids, use_cache=False, **inputs).logits.float()
            images = ImageInputs.of(encoded, positions)
            states = hidden_states(self.trunk, ids, images=images)
            return theirs, self.policy.head.logits(states)


def _block(output: Any) -> int | None:
    """Return the `EncodedImages.block` of what a tower returns."""
    if not isinstance(output, torch.Tensor):
        return None
    return output.shape[-2] if output.dim() > 2 else 0


def _joined(features: Any) -> torch.Tensor:
    """Return the embeddings of several images, [n, H] on end."""
    if isinstance(features, torch.Tensor):
        return features.flatten(0, -2)
    return torch.cat([part.flatten(0, -2) for part in features])
