"""Tiny vision-language models with random weights, and their processors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3VLConfig,
    SmolVLMConfig,
    SmolVLMImageProcessorPil,
)

from fastppo.data.prompts import Prompts, encode_prompts
from fastppo.models.images import GridProcessor, ImageEncoder
from fastppo.models.policy import ActorCritic

SPECIAL = (
    "<image>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
)
"""Tokens of images in the two families, after the words of the tiny tokenizer."""
IDS = {token: len(tiny.VOCABULARY) + i for i, token in enumerate(SPECIAL)}

ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
QWEN_IDS = {
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
}


def _text(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tiny.VOCABULARY) + len(SPECIAL),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        **more,
    }


def _tower(**more: Any) -> dict[str, Any]:
    """Return the options of Qwen's vision towers."""
    return {"depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 4, **more}


def _siglip() -> dict[str, Any]:
    return {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "image_size": 32,
        "patch_size": 8,
    }


def _idefics(config: Any) -> PretrainedConfig:
    return config(
        text_config=_text(model_type="llama"),
        vision_config=_siglip(),
        scale_factor=2,
        image_token_id=IDS["<image>"],
        pad_token_id=0,
    )


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "idefics3": lambda: _idefics(Idefics3Config),
    "smolvlm": lambda: _idefics(SmolVLMConfig),
    "qwen2_vl": lambda: Qwen2VLConfig(
        text_config=_text(rope_parameters=ROPE),
        vision_config=_tower(embed_dim=16, hidden_size=32, mlp_ratio=2),
        **QWEN_IDS,
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config=_text(rope_parameters=ROPE),
        vision_config=_tower(
            intermediate_size=24, out_hidden_size=32, window_size=16, fullatt_block_indexes=[1]
        ),
        **QWEN_IDS,
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config=_text(head_dim=8, rope_parameters=ROPE),
        vision_config=_tower(
            depth=3,
            intermediate_size=24,
            out_hidden_size=32,
            num_position_embeddings=64,
            deepstack_visual_indexes=[0, 1],
        ),
        **QWEN_IDS,
    ),
    "qwen3_5": lambda: Qwen3_5Config(
        text_config=_text(
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            rope_parameters={**ROPE, "partial_rotary_factor": 1.0},
        ),
        vision_config=_tower(intermediate_size=24, out_hidden_size=32, num_position_embeddings=64),
        **QWEN_IDS,
    ),
}


def model(architecture: str, seed: int = 0) -> Any:
    """Return a vision-language model whose logits differ between tokens and between images."""
    return model_of(CONFIGS[architecture](), seed)


def model_of(config: PretrainedConfig, seed: int = 0) -> Any:
    """Return a vision-language model of the given config."""
    torch.manual_seed(seed)
    whole = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0)
    return whole.eval()


def tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """Return the tiny tokenizer with the tokens of images."""
    words = tiny.tokenizer(**options)
    words.add_special_tokens(
        {"additional_special_tokens": [AddedToken(token, special=True) for token in SPECIAL]}
    )
    return words


def image_processor(architecture: str) -> Any:
    """Return an image processor that needs Pillow alone."""
    if architecture == "idefics3":
        return Idefics3ImageProcessorPil(**_idefics_options())
    if architecture == "smolvlm":
        return SmolVLMImageProcessorPil(**_idefics_options())
    return Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )


def _idefics_options() -> dict[str, Any]:
    return {
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": False,
    }


def saved_model(directory: Path, architecture: str) -> str:
    """Save a model with its tokenizer and its image processor; return the directory."""
    model(architecture).save_pretrained(directory)
    processor(architecture).save_pretrained(directory)
    image_processor(architecture).save_pretrained(directory)
    return str(directory)


def processor(architecture: str) -> Any:
    """Return a processor that needs Pillow alone."""
    images, words = image_processor(architecture), tokenizer(chat=True)
    if architecture in ("idefics3", "smolvlm"):  # SmolVLM's own needs torchvision for videos
        return Idefics3Processor(image_processor=images, tokenizer=words, image_seq_len=4)
    return GridProcessor(images, words, "<|image_pad|>")


def placeholder(architecture: str) -> str:
    """Return the placeholder of an image in a text."""
    if architecture in ("idefics3", "smolvlm"):
        return "<image>"
    return "<|vision_start|><|image_pad|><|vision_end|>"


def image(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def rows(architecture: str) -> list[dict[str, Any]]:
    """Return prompts with one image, with two, and with none."""
    at = placeholder(architecture)
    return [
        {"prompt": f"w1 {at} w2", "image": image(40, 24)},
        {"prompt": f"{at} w3 {at} w5 w6", "images": [image(16, 48, 1), image(33, 33, 2)]},
        {"prompt": "w4 w5"},
    ]


def encoder(architecture: str) -> tuple[ImageEncoder, Prompts]:
    """Return the vision tower of a new policy, and the prompts of `rows`."""
    reader = processor(architecture)
    policy = ActorCritic(model(architecture))
    prompts = encode_prompts(
        rows(architecture), reader.tokenizer, max_prompt_tokens=100, processor=reader
    )
    return ImageEncoder(policy, reader), prompts
